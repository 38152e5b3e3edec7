//! Measures the command from its start to the end of its child, beside `etcdctl lock`.

use bench::record::Group;
use bench::report::times;
use test_servers::Etcd;

use crate::command::{self, Tool, alternate};

const STARTS: usize = 31;

pub(crate) fn measure(etcd: &Etcd, group: &mut Group) {
    println!("starts of the command, beside etcdctl lock");
    let Ok(programs) = test_setup::programs::etcd() else {
        group.note("The row beside `etcdctl lock` is missing, because `etcdctl` is not installed here.");
        return;
    };
    let (members, url) = (etcd.addresses().join(","), etcd.url(&Etcd::fresh_prefix()));
    let theirs = ["--endpoints", members.as_str(), "lock", "command/started", "true"];
    let ours = ["--quiet", "--url", url.as_str(), "run", "started", "--", "true"];
    let tools = [
        Tool::new("etcdctl lock", programs.join("etcdctl"), &theirs),
        Tool::new("leasehold", command::build(), &ours),
    ];
    let [floor, series] = alternate(&tools, bench::or_smoke(STARTS, 3), |tool| tool.time(&[]));
    group.rows.push(times("`leasehold run`, etcd, from start to end", &series, &floor, None));
}
