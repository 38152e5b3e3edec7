#![doc = include_str!("../README.md")]

mod acquire;
mod backend;
mod beat;
mod beats;
mod clock;
mod counters;
mod courtesy;
mod driver;
mod engine;
mod grant;
mod hold;
mod pursuit;
mod queue;
mod shared;
mod single;
mod sync;
mod undo;

pub use backend::{
    Attempt, Backend, Confirm, Events, Freed, Granted, Held, HoldRef, Renewed, Request, Stop, Timing, Waiting,
};
pub use clock::{Clock, Moment, SystemClock, TokioClock};
pub use counters::Counters;
pub use engine::{Engine, EngineBuilder};
pub use leasehold_api::async_trait;
pub use single::{Single, SingleKey};
