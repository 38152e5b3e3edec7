//! `file:` URLs.

use leasehold_api::Error;
use leasehold_engine::scheme::{HANDOVER, OpenOptions, Scheme, StoreConfig, StoreUrl, invalid};
use leasehold_engine::{Engine, EngineBuilder, async_trait};

use crate::config::FileConfig;

/// The schemes of this store.
pub const SCHEMES: &[Scheme] = &[Scheme::new(&["file"], read)];

fn read(url: &StoreUrl) -> Result<Box<dyn StoreConfig>, Error> {
    // Refuses `file:dir` and `file://dir`, because they would mean `/dir` and a host, and neither is
    // intended.
    if !url.rest.starts_with("///") && !url.rest.starts_with("//localhost/") {
        return Err(invalid(
            "a file URL names an absolute path on this machine, with three slashes and without a host or a user: write file:///var/lib/locks",
        ));
    }
    let directory = url
        .file_path
        .as_deref()
        .filter(|path| path.parent().is_some())
        .ok_or_else(|| invalid("a file URL names a directory of its own: write file:///var/lib/locks"))?;
    let given = url.only(&["poll", "mode", "read-only", "handover"])?;
    let mut config = FileConfig::new(directory);
    if let Some(poll) = given.duration("poll")? {
        config = config.poll(poll);
    }
    if let Some(text) = given.get("mode") {
        config = config.mode(octal(text)?);
    }
    match given.get("read-only") {
        None => {}
        Some("true") => config = config.read_only(),
        Some(_) => return Err(invalid("the parameter read-only is true or left out")),
    }
    if let Some(handover) = given.one_of("handover", &HANDOVER)? {
        config = config.handover(handover);
    }
    Ok(Box::new(config))
}

/// Reads permissions in the usual octal notation: 0660.
fn octal(text: &str) -> Result<u32, Error> {
    u32::from_str_radix(text, 8).map_err(|error| {
        invalid("the parameter mode is written in octal: 0660 for one group, 0666 for everybody")
            .with_source(error)
    })
}

#[async_trait]
impl StoreConfig for FileConfig {
    async fn open(&self, options: &OpenOptions) -> Result<EngineBuilder, Error> {
        let config = if options.is_look_only() { self.clone().read_only() } else { self.clone() };
        Ok(Engine::builder(config.backend()?))
    }
}
