//! The command `leasehold elect`.

use std::cell::Cell;
use std::fmt;
use std::path::Path;
use std::slice;
use std::time::{Duration, Instant};

use leasehold::election::{Election, ElectionHandle, Failure, Next, OnLoss, State, Term, TermResult};
use leasehold::{Error, ErrorKind, Operation};
use tokio::sync::Mutex;
use tokio::time::sleep;

use crate::args::{self, ElectArgs, Restart};
use crate::chosen_store::ChosenStore;
use crate::output::{self, Notes};
use crate::signal_helpers::SETTLE;
use crate::signals::Signals;
use crate::supervise::{EndPolicy, Ended, OnAsk};
use crate::wait_budget::{OutageReport, WaitBudget};
use crate::{child, exit, grant, identity, signals, supervise};

pub(crate) async fn elect(args: &ElectArgs, store: &ChosenStore, notes: Notes) -> Result<u8, Error> {
    let command = args.command();
    // Checks first that the program exists, because a leader without its program would keep others out.
    if let Err(code) = child::find(&command[0]) {
        return Ok(code);
    }
    let mut signals =
        Signals::listen().map_err(|error| output::system("cannot listen for signals", error))?;
    let mut outage = OutageReport::new(notes);
    let connected = grant::connect(store, WaitBudget::new(None), &mut signals, &mut outage, notes).await?;
    let lock = match connected {
        Ok(lock) => lock,
        Err(code) => return Ok(code),
    };
    if args.step_down_if_asked {
        grant::needs_asks(&*lock)?;
    }
    let program = Path::new(&command[0]).file_name().unwrap_or(&command[0]).to_string_lossy();
    let value = args.value.clone().unwrap_or_else(|| identity::label(&program));
    // The body itself ends the command after a loss.
    let mut election = Election::new(lock.clone(), args.key.get().clone()).value(value).on_loss(OnLoss::Tell);
    if let Some(ttl) = args.ttl {
        election = election.ttl(ttl);
    }
    let handle = election.handle();
    // Locked by the running command, and between commands by `between_terms`.
    let signals = Mutex::new(signals);
    let code = Cell::new(0);
    let replica = Replica { args, store, notes, signals: &signals, code: &code };
    let led = tokio::select! {
        biased;
        led = election.lead(async |term| replica.serve(term).await) => led,
        by_signal = replica.between_terms(&handle) => {
            code.set(by_signal);
            Ok(())
        }
        () = replica.report(handle.clone(), &mut outage) => Ok(()),
    };
    let mut signals = signals.into_inner();
    let closed = grant::close(&*lock, notes, &mut signals).await;
    match led {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::Lost => {
            output::problem(&format!("{error}; another replica might have led at the same time"));
            return Ok(exit::LOST);
        }
        Err(error) if error.operation() == Some(Operation::Release) => {
            notes.say(&format!("the command has ended, but the release was not confirmed: {error}"));
        }
        Err(error) => return Err(error),
    }
    if let Err(reason) = closed {
        let key = args::named([args.key.get()]);
        output::problem(&format!("the store has not confirmed that {key} is free ({reason})"));
    }
    Ok(code.get())
}

/// One replica of an election.
struct Replica<'a> {
    args: &'a ElectArgs,
    store: &'a ChosenStore,
    notes: Notes,
    signals: &'a Mutex<Signals>,
    /// The exit code of this tool.
    code: &'a Cell<u8>,
}

impl Replica<'_> {
    /// Runs the command of one term.
    async fn serve(&self, term: &Term) -> TermResult {
        let Self { args, notes, .. } = *self;
        let mut signals = self.signals.lock().await;
        let command = args.command();
        let mut running = match child::start(&command, slice::from_ref(term.guard()), self.store)? {
            Ok(running) => running,
            Err(code) => return self.done(code),
        };
        let key = args.key.get().clone();
        let lost = async { (key, term.guard().lost().await) };
        let policy = EndPolicy {
            on_loss: args::OnLoss::Kill,
            loss_grace: Duration::ZERO,
            grace: args.grace,
            step_down: args.step_down,
            on_ask: if args.step_down_if_asked { OnAsk::StepDown } else { OnAsk::Ignore },
        };
        let asked = grant::asked(slice::from_ref(term.guard()));
        let ended = supervise::until_end(&mut running, lost, asked, &mut signals, policy, notes).await;
        let Ended { status, is_lost, is_signalled, has_stepped_down } =
            ended.map_err(|error| output::system("cannot learn how the command ended", error))?;
        let code = child::exit_code(status);
        let is_last = match (args.restart, code) {
            (Restart::Never, _) | (Restart::OnFailure, 0) => !is_lost && !has_stepped_down,
            (Restart::OnFailure | Restart::Always, _) => false,
        };
        if is_signalled || is_last {
            // Discards the signals that were meant for the command, because timeout(1) sends each twice.
            drop(signals.drain().await);
            return self.done(code);
        }
        // Waits for this tool's own copy of a signal to the group, which can end the command first.
        sleep(SETTLE).await;
        let late = signals.drain().await;
        if late.iter().any(|signal| args.step_down != Some(*signal) && signals::is_an_end(*signal)) {
            return self.done(code);
        }
        if is_lost {
            return Ok(Next::Again);
        }
        if has_stepped_down || args.step_down.is_some_and(|signal| late.contains(&signal)) {
            term.step_down(args.rest);
            return Ok(Next::Again);
        }
        if code == 0 { Ok(Next::Again) } else { Err(ExitCode(code).into()) }
    }

    fn done(&self, code: u8) -> TermResult {
        self.code.set(code);
        Ok(Next::Done)
    }

    /// Handles signals while no command runs. Returns the exit code after a signal that ends this tool.
    async fn between_terms(&self, handle: &ElectionHandle) -> u8 {
        let mut changes = handle.clone();
        loop {
            while holds(&handle.state()) {
                changes.changed().await;
            }
            let mut signals = self.signals.lock().await;
            let signal = loop {
                tokio::select! {
                    biased;
                    state = changes.changed() => if holds(&state) { break None },
                    signal = signals.next() => break Some(signal),
                }
            };
            match signal {
                None => {}
                Some(signal) if self.args.step_down == Some(signal) => handle.step_down(self.args.rest),
                Some(signal) => return exit::of_signal(signal.as_raw()),
            }
        }
    }

    /// Prints the changes of the state.
    async fn report(&self, mut handle: ElectionHandle, outage: &mut OutageReport) {
        let (key, notes) = (args::named([self.args.key.get()]), self.notes);
        loop {
            match handle.changed().await {
                State::Candidate => notes.detail(&format!("candidate for {key}")),
                State::Leading { token } => {
                    outage.end();
                    let token = output::or_dash(token.map(|token| token.to_string()));
                    notes.say(&format!("leading {key}, token {token}"));
                }
                State::InDoubt { .. } => {
                    notes.say(&format!("leading {key} in doubt: the store does not answer"));
                }
                State::Resting { until } => {
                    let left = until.saturating_duration_since(Instant::now());
                    notes.say(&format!("no candidate for {key} for {}", output::left(left)));
                }
                State::Failed { error: Failure::Lock(error), .. } if error.kind() == ErrorKind::Lost => {}
                State::Failed { error: Failure::Lock(error), .. } => outage.report(&error),
                State::Failed { error: Failure::Body(error), next_try } => {
                    let left = next_try.saturating_duration_since(Instant::now());
                    notes.say(&format!("{error}; candidate again in {}", output::left(left)));
                }
                _ => {}
            }
        }
    }
}

/// Returns whether a command can run in this state. After a loss it has just been killed.
fn holds(state: &State) -> bool {
    matches!(state, State::Leading { .. } | State::InDoubt { .. })
}

/// The exit code of a failed command.
#[derive(Debug)]
struct ExitCode(u8);

impl fmt::Display for ExitCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the command has failed with code {}", self.0)
    }
}

impl std::error::Error for ExitCode {}
