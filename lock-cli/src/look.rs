//! Connecting to look: a file store makes nothing then, and read access is enough.

use std::path::Path;
use std::sync::Arc;

use leasehold::file::FileConfig;
use leasehold::{Error, Lock};

use crate::place::{Place, default_dir};

/// The store at `place`, to be looked at only if it is a file store.
pub(crate) async fn connect(place: &Place) -> Result<Arc<dyn Lock>, Error> {
    match place.url() {
        None => Ok(Arc::new(FileConfig::new(default_dir()?).read_only().connect()?)),
        Some(url) if is_file(url) && !url.contains("read-only=") => {
            let separator = if url.contains('?') { '&' } else { '?' };
            leasehold::connect(&format!("{}{separator}read-only=true", url.trim())).await
        }
        Some(url) => leasehold::connect(url).await,
    }
}

pub(crate) fn is_file(url: &str) -> bool {
    url.trim().get(..5).is_some_and(|scheme| scheme.eq_ignore_ascii_case("file:"))
}

/// The directory of a file store.
pub(crate) fn directory(lock: &dyn Lock) -> Option<String> {
    lock.to_string().strip_prefix("file://").map(str::to_owned)
}

/// What to say beside "nothing is locked" where nothing could be: a path may have been mistyped.
pub(crate) fn if_missing(lock: &dyn Lock) -> &'static str {
    match directory(lock) {
        Some(directory) if !Path::new(&directory).exists() => {
            ": there is no such directory, so nothing was ever locked there"
        }
        _ => "",
    }
}

/// Whether this user may only look at a file store that is there.
pub(crate) fn is_barred(lock: &dyn Lock) -> bool {
    use rustix::fs::{Access, access};
    directory(lock).is_some_and(|directory| {
        Path::new(&directory).exists() && access(directory, Access::WRITE_OK | Access::EXEC_OK).is_err()
    })
}
