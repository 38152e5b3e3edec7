//! The snippets of docs/command.md work as described.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "support/command.rs"]
mod support;

use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;
use support::{Beside, Store, finish};

const PAGE: &str = include_str!("../../docs/command.md");

/// Returns the blocks of the page in `language`.
fn blocks(language: &str) -> impl Iterator<Item = &'static str> {
    let begin = format!("```{language}\n");
    let at: Vec<usize> = PAGE.match_indices(&begin).map(|(at, begin)| at + begin.len()).collect();
    at.into_iter().map(|at| PAGE[at..].split("```").next().unwrap())
}

/// Returns the script with the comment `# name`.
fn script(name: &str) -> String {
    let comment = format!("# {name}\n");
    let mut found = blocks("sh").chain(blocks("bash")).filter(|block| block.contains(&comment));
    let block = found.next().unwrap_or_else(|| panic!("no block {name}"));
    assert!(found.next().is_none(), "{name} is there twice");
    block.to_owned()
}

/// A machine with a store and with `leasehold` on the path.
struct Machine {
    store: Store,
}

impl Machine {
    fn new() -> Self {
        let store = Store::new();
        std::fs::create_dir(store.path("bin")).unwrap();
        symlink(env!("CARGO_BIN_EXE_leasehold"), store.path("bin/leasehold")).unwrap();
        std::fs::write(store.path("url"), store.url()).unwrap();
        Self { store }
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        let path = format!("{}:{}", self.store.path("bin").display(), std::env::var("PATH").unwrap());
        command
            .env("PATH", path)
            .env_remove("LEASEHOLD_URL")
            .env("LEASEHOLD_URL_FILE", self.store.path("url"));
        command.current_dir(self.store.path(""));
        command
    }

    /// Writes an executable file.
    fn write(&self, name: &str, text: &str) -> PathBuf {
        let written = self.store.path("text");
        std::fs::write(&written, text).unwrap();
        self.store.program(name, &written, "755")
    }

    fn hold(&self, key: &str) -> Beside {
        let mut holder = Beside::start(&mut self.store.tool(&format!("lock {key}")));
        holder.line();
        holder
    }
}

#[test]
fn a_line_of_cron() {
    let machine = Machine::new();
    let report = machine.write("report.sh", "#!/bin/sh\necho reported");
    let cron = blocks("cron").next().unwrap();
    let line = cron.lines().nth(1).unwrap().splitn(6, ' ').nth(5).unwrap();
    let line = line
        .replace("/usr/local/bin/leasehold", "leasehold")
        .replace("/usr/local/bin/report.sh", &report.display().to_string());
    let run = |machine: &Machine| finish(machine.command("sh").args(["-c", &line]));
    let nothing_to_mail = (0, String::new(), String::new());
    assert_eq!(run(&machine), (0, "reported\n".to_owned(), String::new()));
    assert_eq!(run(&machine), nothing_to_mail, "not due");
    let other = Machine::new();
    let _holder = other.hold("report");
    assert_eq!(run(&other), nothing_to_mail);
    // The page's command that ends a window by hand.
    let open =
        PAGE.split("`rm DIRECTORY/").nth(1).unwrap().split('`').next().unwrap().replace("KEY", "report");
    let open = format!("rm {}/{open}", machine.store.locks().display());
    assert_eq!(finish(machine.command("sh").args(["-c", &open])).0, 0);
    assert_eq!(run(&machine).1, "reported\n");
}

#[test]
fn a_unit_of_systemd() {
    let machine = Machine::new();
    let report = machine.write("report.sh", "#!/bin/sh\necho reported");
    let unit = blocks("ini").next().unwrap();
    let of = |name: &str| unit.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    let (name, value) = of("Environment=").split_once('=').unwrap();
    let value = value.replace("%d", &machine.store.path("").display().to_string());
    assert_eq!(
        (name, of("LoadCredential=").split(':').next()),
        ("LEASEHOLD_URL_FILE", value.rsplit('/').next())
    );
    let line = of("ExecStart=")
        .replace("/usr/local/bin/leasehold", "leasehold")
        .replace("/usr/local/bin/report.sh", &report.display().to_string());
    let run = |line: &str| finish(machine.command("sh").args(["-c", line]).env(name, &value));
    let ((_, first, _), (code, second, _)) = (run(&line), run(&line));
    assert_eq!((first.as_str(), second.as_str(), code), ("reported\n", "", 0), "once a night");
    let other = line.replace("run report", "run other");
    let _holder = machine.hold("other");
    assert_eq!(of("SuccessExitStatus="), run(&other).0.to_string());
}

#[test]
fn a_whole_script_under_a_lock() {
    let machine = Machine::new();
    let path = machine.write("job", &script("whole-script"));
    let run = || finish(machine.command(&path.display().to_string()).args(["a", "b c"]));
    assert_eq!(run(), (0, "one at a time: a b c\n".to_owned(), String::new()));
    let holder = machine.hold("report");
    assert_eq!(run().0, 75);
    drop(holder);
    let mut by_hand = machine.command("leasehold");
    let (code, stdout, stderr) = finish(by_hand.args(["run", "report", "--"]).arg(&path).arg("--locked"));
    assert_eq!((code, stdout.as_str()), (0, "one at a time: \n"), "{stderr}");
    // A process left behind by an earlier run still has its variables, but not its lock.
    let _holder = machine.hold("report");
    let mut left_behind = machine.command(&path.display().to_string());
    assert_eq!(finish(left_behind.env("LEASEHOLD_KEY", "report")).0, 75);
}

#[test]
fn some_commands_of_a_script_under_a_lock() {
    for (shell, name) in [("bash", "some-commands"), ("bash", "some-commands-sh"), ("sh", "some-commands-sh")]
    {
        let machine = Machine::new();
        let text = script(name);
        // Adds an inspection under the lock.
        let text = text.replace("    echo", "    leasehold inspect deploy > /dev/null && echo");
        let (code, stdout, stderr) = finish(machine.command(shell).args(["-c", &text]));
        assert!(code == 0 && stdout.starts_with("held with token "), "{shell} {name}: {stdout}{stderr}");
        assert!(stdout.ends_with("\nheld until the end\n"), "{shell} {name}: {stdout}");
        assert!(machine.store.is_free("deploy"));

        let lost = text.replace("--wait 5m", "--max-hold 50ms").replace("    e", "    sleep 0.3; e");
        let (code, stdout, stderr) = finish(machine.command(shell).args(["-c", &lost]));
        assert!(code == 76 && !stdout.contains("until the end"), "{shell} {name}: {code} {stdout}{stderr}");

        let _holder = machine.hold("deploy");
        let (code, stdout, stderr) =
            finish(machine.command(shell).args(["-c", &text.replace("--wait 5m", "--no-wait")]));
        assert_eq!((code, stdout.as_str()), (75, ""), "{shell} {name}: {stderr}");
    }
}

#[test]
fn a_script_that_is_killed_lets_its_lock_go() {
    let machine = Machine::new();
    let text = script("some-commands").replace("    exec", "    read -r line; exec");
    let mut shell = Beside::start(machine.command("bash").args(["-c", &text]));
    assert!(shell.line().starts_with("held with token "));
    assert!(!machine.store.is_free("deploy"));
    shell.kill();
    machine.store.take("deploy");
}

#[test]
fn the_habits_of_flock() {
    let machine = Machine::new();
    assert_eq!(finish(machine.command("sh").args(["-c", &script("as-flock")])).1, "ONE\n");
}

#[test]
fn several_keys() {
    let machine = Machine::new();
    let (code, stdout, stderr) = finish(machine.command("sh").args(["-c", &script("several-keys")]));
    let tokens = stdout.trim_end().strip_prefix("moved under ").unwrap_or_default();
    assert!(code == 0 && tokens.split(' ').count() == 2, "{stdout}{stderr}");
}

#[test]
fn a_leader_runs_its_command() {
    let machine = Machine::new();
    machine.write("scheduler", "#!/bin/sh\nread line; echo \"$LEASEHOLD_KEY is led\"");
    let mut observer = Beside::start(&mut machine.store.tool("observe scheduler"));
    assert_eq!(observer.line(), "none");
    let mut leader = Beside::start(machine.command("sh").args(["-c", &script("elect")]));
    let seen = observer.line();
    assert!(seen.starts_with("leader ") && seen.ends_with(" 10.0.0.7:8080"), "{seen}");
    leader.go_on();
    assert_eq!((leader.line().as_str(), leader.code()), ("scheduler is led", 0));
    assert_eq!(observer.line(), "none");
}

#[test]
fn monitoring() {
    let machine = Machine::new();
    let run = |url: &str| {
        std::fs::write(machine.store.path("url"), url).unwrap();
        let ended = finish(machine.command("sh").args(["-c", &script("monitoring")]));
        let text = std::fs::read_to_string(machine.store.path("check.json")).unwrap();
        (ended.2, serde_json::from_str::<Value>(&text).unwrap()["ok"].clone())
    };
    assert_eq!(run(&machine.store.url()), (String::new(), true.into()));
    let (stderr, ok) = run("redis://host");
    assert!(stderr.contains("does not work") && ok == false, "{stderr}");
}

#[test]
fn bash_completes_keys() {
    let machine = Machine::new();
    let _holders = ["ledger:41", "ledger:42", "report"].map(|key| machine.hold(key));
    let completed = |line: &str| {
        let script = format!(
            "source <(leasehold completions bash); read -ra COMP_WORDS <<< '{line}x'; \
             COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMP_WORDS[COMP_CWORD]=${{COMP_WORDS[COMP_CWORD]%x}}; \
             COMP_LINE='{line}'; COMP_POINT=${{#COMP_LINE}}; \
             _leasehold_with_keys leasehold \"${{COMP_WORDS[COMP_CWORD]}}\" \"${{COMP_WORDS[COMP_CWORD - 1]}}\"; \
             printf '%s\\n' \"${{COMPREPLY[@]}}\""
        );
        let (_, stdout, stderr) = finish(machine.command("bash").args(["-c", &script]));
        assert_eq!(stderr, "");
        stdout.lines().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(completed("leasehold inspect rep"), ["report"]);
    assert_eq!(completed("leasehold release ledger:4"), ["41", "42"], "behind the colon");
    let all = completed("leasehold inspect ");
    assert!(all.contains(&"report".to_owned()) && all.contains(&"--json".to_owned()), "{all:?}");
    assert_eq!(completed("leasehold insp"), ["inspect"]);
    assert_eq!(completed("leasehold inspect --js"), ["--json"]);
    // Completes keys of the store that the line names.
    let elsewhere = Store::new();
    let mut holder = Beside::start(&mut elsewhere.tool("lock reported"));
    holder.line();
    let url = elsewhere.url();
    for named in [format!("--url {url}"), format!("--url={url}"), format!("--url \"{url}\"")] {
        assert_eq!(completed(&format!("leasehold {named} release rep")), ["reported"]);
    }
    assert!(
        !completed("leasehold --url $URL release rep").contains(&"report".to_owned()),
        "nobody knows which"
    );
}

#[test]
fn every_block_is_run() {
    let run = [
        "whole-script",
        "some-commands",
        "some-commands-sh",
        "as-flock",
        "several-keys",
        "elect",
        "monitoring",
    ];
    assert_eq!(blocks("sh").chain(blocks("bash")).count(), run.len());
    assert_eq!((blocks("cron").count(), blocks("ini").count()), (1, 2));
}

#[test]
fn the_page_names_every_field() {
    let store = Store::new();
    let mut holder = Beside::start(&mut store.tool("lock k --json"));
    let held = holder.line();
    let printed = ["list --json", "inspect k --json", "check --json", "release k --force --json --holder"];
    let id = format!("{}-1", "0".repeat(32));
    let mut names = std::collections::BTreeSet::new();
    for arguments in printed {
        let mut command = store.tool(arguments);
        if arguments.ends_with("--holder") {
            command.arg(&id);
        }
        collect(&serde_json::from_str(&finish(&mut command).1).unwrap(), &mut names);
    }
    collect(&serde_json::from_str(&held).unwrap(), &mut names);
    let mut observer = Beside::start(&mut store.tool("observe k --json"));
    collect(&serde_json::from_str(&observer.line()).unwrap(), &mut names);
    let page = PAGE.split("## JSON").nth(1).unwrap();
    for name in names {
        assert!(page.contains(&format!("`{name}`")), "{name}");
    }
}

/// Collects the names of all fields except capabilities, which `leasehold check` lists.
fn collect(value: &Value, names: &mut std::collections::BTreeSet<String>) {
    match value {
        Value::Array(values) => values.iter().for_each(|value| collect(value, names)),
        Value::Object(fields) => {
            for (name, value) in fields {
                names.insert(name.clone());
                if name != "capabilities" {
                    collect(value, names);
                }
            }
        }
        _ => {}
    }
}
