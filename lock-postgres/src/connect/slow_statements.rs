//! Switches off the driver's warnings about slow statements.

use std::time::Duration;

use sqlx::ConnectOptions as _;
use sqlx::postgres::PgConnectOptions;

/// Switches off the warning for statements over a second, because the stores' statements wait on purpose. A
/// setting of the caller is kept. It can only be read from the options' `Debug` text.
pub(crate) fn without_slow_statements(options: PgConnectOptions) -> PgConnectOptions {
    let is_default = log_settings(&options) == log_settings(&PgConnectOptions::new_without_pgpass());
    if is_default { options.log_slow_statements(log::LevelFilter::Off, Duration::MAX) } else { options }
}

/// Returns the part of the text without secrets.
fn log_settings(options: &PgConnectOptions) -> Option<String> {
    let text = format!("{options:?}");
    let (_, settings) = text.rsplit_once("log_settings: ")?;
    Some(settings.split_once('}')?.0.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::PgConfig;

    #[test]
    fn the_driver_warns_of_slow_statements_where_the_caller_asked_for_it_alone() {
        let shown =
            |options: PgConnectOptions| log_settings(PgConfig::from_options(options).options()).unwrap();
        let fresh = PgConnectOptions::new_without_pgpass;
        assert!(shown(fresh()).contains("slow_statements_level: Off"), "{}", shown(fresh()));
        for duration in [Duration::from_secs(2), Duration::from_millis(10)] {
            let set = fresh().log_slow_statements(log::LevelFilter::Warn, duration);
            assert_eq!(Some(shown(set.clone())), log_settings(&set));
        }
        // Uses a database name that looks like the settings.
        let odd = fresh().database("log_settings: x");
        assert!(shown(odd).contains("slow_statements_level: Off"));
    }
}
