//! The command `leasehold run`.

use std::path::Path;

use leasehold::Error;

use crate::acquire::AcquireRequest;
use crate::args::RunArgs;
use crate::chosen_store::ChosenStore;
use crate::grant;
use crate::output::{self, Notes};
use crate::supervise::{EndPolicy, OnAsk};
use crate::{child, supervise};

pub(crate) async fn run(args: &RunArgs, store: &ChosenStore, notes: Notes) -> Result<u8, Error> {
    let command = args.command();
    // Checks first that the program exists, because a missing one should not cost a long wait or a window of
    // --once-per.
    if let Err(code) = child::find(&command[0]) {
        return Ok(code);
    }
    // Takes only the program's name for the label, because arguments can be secrets and labels are public.
    let program = Path::new(&command[0]).file_name().unwrap_or(&command[0]).to_string_lossy();
    let needs_asks = args.on_ask.is_some();
    let request =
        AcquireRequest { args: &args.acquire, store, notes, program: &program, not_due: 0, needs_asks };
    grant::run_with_lock(request, async |guards, lock, signals| {
        let mut running = match child::start(&command, &guards, store)? {
            Ok(running) => running,
            Err(code) => return guards.release().await.map(|()| code),
        };
        let policy = EndPolicy {
            on_loss: args.on_loss,
            loss_grace: args.grace,
            grace: args.grace,
            step_down: None,
            on_ask: args.on_ask.map_or(OnAsk::Ignore, OnAsk::Signal),
        };
        let (lost, asked) = (guards.lost(), grant::asked(&guards));
        let ended = supervise::until_end(&mut running, lost, asked, signals, policy, notes).await;
        let ended = ended.map_err(|error| output::system("cannot learn how the command ended", error))?;
        grant::release(guards, lock, child::exit_code(ended.status), "the command", signals, notes).await
    })
    .await
}
