//! For the packages beside this one, which are released together with it. Not part of the public interface.

pub use crate::claimer::pass::{Pass, PassEnd};
pub use crate::name::{Column, literal};
pub use crate::spec::migration_tools::{
    Session, Step, block, derived, dollar_tag, hash, identity, quote, regclass,
};
pub use crate::spec::{Reader, Texts};
pub use crate::statements::{group_number, inserted};
pub use crate::store::{Line, Sealed, Upkeep, Wake};
