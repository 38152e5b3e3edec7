//! The command `leasehold gc`.

use leasehold::file::FileConfig;
use leasehold::{Error, ErrorKind};
use serde_json::json;

use crate::args::GcArgs;
use crate::chosen_store::ChosenStore;
use crate::{file_store, output};

pub(crate) async fn gc(args: &GcArgs, store: &ChosenStore) -> Result<u8, Error> {
    let lock = store.connect_to_inspect().await?;
    let directory = file_store::directory(&*lock).ok_or_else(|| {
        let message = "only a file store has files of unused keys: name one by --url file:///DIRECTORY";
        Error::new(ErrorKind::Unsupported, message).with_store(lock.to_string())
    })?;
    let collected = FileConfig::new(directory).collect_garbage(args.unused_for)?;
    let (removed, kept) = (collected.removed, collected.kept);
    if args.json {
        output::json(&json!({ "store": lock.to_string(), "removed": removed, "kept": kept }));
    } else {
        let missing = file_store::missing_note(&*lock);
        output::line(&format!("removed the files of {removed} unused keys on {lock}, kept {kept}{missing}"));
    }
    Ok(0)
}
