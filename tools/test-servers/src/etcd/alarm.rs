//! The alarm of a full database, raised without filling it.

use serde_json::json;

use super::Etcd;

/// The member that the alarm names. It does not exist, so only the test raises and ends this alarm.
const NOBODY: &str = "1";

impl Etcd {
    /// Raises or ends the alarm of a full database (`NOSPACE`), with which members refuse writes. This is quicker than
    /// [`Self::fill`], and works with the usual quota.
    ///
    /// # Panics
    ///
    /// If a member refuses it.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the servers stay in their current state until their values are dropped.
    pub async fn set_alarm(&self, is_raised: bool) {
        let action = if is_raised { "ACTIVATE" } else { "DEACTIVATE" };
        let alarm = json!({ "action": action, "memberID": NOBODY, "alarm": "NOSPACE" });
        self.ask("maintenance/alarm", alarm).await;
    }
}
