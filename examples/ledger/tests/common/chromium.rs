//! A real browser without a window, driven by its `DevTools` protocol over a pipe.

#![allow(clippy::unwrap_used, unreachable_pub)] // Of tests, which are to fail here.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use test_bounds::Bound;

use super::LONG;

/// Runs the browser, and removes its profile when it has ended. It ends when its pipe does, and so with this process.
///
/// Without the sandbox, which many containers do not permit: the only page is the project's own.
const LAUNCH: &str = r#"
profile=$(mktemp -d) || exit
HOME=$profile "$0" --headless --no-sandbox --disable-dev-shm-usage --remote-debugging-pipe \
    --user-data-dir="$profile" 3<&0 4>&1 </dev/null >/dev/null
rm -rf "$profile"
"#;

/// Nobody, because a browser must not run as root.
const NOBODY: u32 = 65_534;

/// Time limit for the end of the browser.
const ENDS: Duration = Duration::from_secs(10);

/// A page in a separate browser.
pub struct Page {
    browser: Child,
    input: Option<ChildStdin>,
    messages: Receiver<Value>,
    log: Option<JoinHandle<String>>,
    session: Option<String>,
    calls: u64,
    complaints: Vec<String>,
}

impl Page {
    /// Opens a page of `width` by 800 pixels.
    pub fn open(url: &str, width: u32) -> Self {
        let program = test_setup::programs::chromium().unwrap_or_else(|missing| panic!("{missing}"));
        let mut command = Command::new("sh");
        command.args(["-c", LAUNCH]).arg(program).current_dir("/").process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        if rustix::process::geteuid().is_root() {
            command.uid(NOBODY).gid(NOBODY);
        }
        let mut browser = command.spawn().unwrap();
        let mut output = BufReader::new(browser.stdout.take().unwrap());
        let (sender, messages) = mpsc::channel();
        thread::spawn(move || {
            let mut message = Vec::new();
            while output.read_until(0, &mut message).is_ok_and(|length| length > 0) {
                let parsed = serde_json::from_slice(&message[..message.len() - 1]).unwrap_or_default();
                message.clear();
                if sender.send(parsed).is_err() {
                    return;
                }
            }
        });
        let mut errors = browser.stderr.take().unwrap();
        let log = thread::spawn(move || {
            let mut log = Vec::new();
            let _ = errors.read_to_end(&mut log);
            String::from_utf8_lossy(&log).into_owned()
        });
        let input = browser.stdin.take();
        let mut page = Self {
            browser,
            input,
            messages,
            log: Some(log),
            session: None,
            calls: 0,
            complaints: Vec::new(),
        };
        let target = page.call("Target.createTarget", json!({ "url": "about:blank" }));
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let attached = page.call("Target.attachToTarget", attach);
        page.session = Some(attached["sessionId"].as_str().unwrap().to_owned());
        for domain in ["Runtime.enable", "Log.enable", "Page.enable"] {
            page.call(domain, json!({}));
        }
        let screen = json!({ "width": width, "height": 800, "deviceScaleFactor": 1, "mobile": false });
        page.call("Emulation.setDeviceMetricsOverride", screen);
        page.call("Emulation.setFocusEmulationEnabled", json!({ "enabled": true }));
        page.call("Page.navigate", json!({ "url": url }));
        page
    }

    /// Calls a method of the `DevTools` protocol and returns its result.
    pub fn call(&mut self, method: &str, params: Value) -> Value {
        self.calls += 1;
        let mut message = json!({ "id": self.calls, "method": method, "params": params });
        if let Some(session) = &self.session {
            message["sessionId"] = session.as_str().into();
        }
        let mut bytes = message.to_string().into_bytes();
        bytes.push(0);
        // The read shows why, if the browser has ended.
        let _ = self.input.as_mut().unwrap().write_all(&bytes);
        let bound = Bound::new(LONG);
        loop {
            let message = match self.messages.recv_timeout(Duration::from_secs(1)) {
                Ok(message) => message,
                Err(RecvTimeoutError::Timeout) => {
                    bound.check(format!("no answer to {method}"));
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => {
                    let log = self.log.take().map(JoinHandle::join);
                    panic!("the browser has ended: {log:?}");
                }
            };
            if message["id"] == self.calls {
                assert!(message["error"].is_null(), "{method}: {}", message["error"]);
                return message["result"].clone();
            }
            self.note(&message);
        }
    }

    /// Keeps an exception or a violation of the policy. Statuses such as 402 are answers, and not kept.
    fn note(&mut self, event: &Value) {
        let entry = &event["params"]["entry"];
        let is_error =
            event["method"] == "Log.entryAdded" && entry["level"] == "error" && entry["source"] != "network";
        if is_error || event["method"] == "Runtime.exceptionThrown" {
            self.complaints.push(event["params"].to_string());
        }
    }

    /// Returns the exceptions and violations of the page's policy so far.
    pub fn complaints(&mut self) -> Vec<String> {
        self.evaluate("0");
        self.complaints.clone()
    }

    /// Returns the value of an expression in the page.
    pub fn evaluate(&mut self, expression: &str) -> Value {
        let params = json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let result = self.call("Runtime.evaluate", params);
        assert!(result["exceptionDetails"].is_null(), "{expression}: {result}");
        result["result"]["value"].clone()
    }

    /// Returns the text of the first element that `selector` finds.
    pub fn text(&mut self, selector: &str) -> String {
        let value = self.evaluate(&format!("document.querySelector({selector:?})?.textContent"));
        value.as_str().unwrap_or_else(|| panic!("the page has no {selector}")).to_owned()
    }

    /// Returns the number of elements that `selector` finds.
    pub fn count(&mut self, selector: &str) -> u64 {
        self.evaluate(&format!("document.querySelectorAll({selector:?}).length")).as_u64().unwrap()
    }

    /// Waits until an expression is true in the page.
    pub fn until(&mut self, expression: &str) {
        let bound = Bound::new(LONG);
        while self.evaluate(expression) != true {
            let shown = self.evaluate("document.body?.innerText");
            bound.check(format!("never {expression} in {shown}"));
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Presses a key.
    pub fn press(&mut self, key: &str) {
        let (code, text) = match key {
            "Tab" => (9, ""),
            "Enter" => (13, "\r"),
            " " => (32, " "),
            "ArrowRight" => (39, ""),
            _ => panic!("no code of {key}"),
        };
        for kind in ["keyDown", "keyUp"] {
            let text = if kind == "keyDown" { text } else { "" };
            let params =
                json!({ "type": kind, "key": key, "code": key, "text": text, "windowsVirtualKeyCode": code });
            self.call("Input.dispatchKeyEvent", params);
        }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        drop(self.input.take());
        let begun = Instant::now();
        while self.browser.try_wait().is_ok_and(|status| status.is_none()) {
            if begun.elapsed() > ENDS {
                let group = rustix::process::Pid::from_child(&self.browser);
                let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
            }
            thread::sleep(Duration::from_millis(10));
        }
    }
}
