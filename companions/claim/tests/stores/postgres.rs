//! The suite on tables in Postgres, in each variant of states and leases.

use crate::suite::Variant;
use crate::suite::postgres::run;
use crate::suite::{for_each_case, mount_cases};

mod text {
    use super::*;

    fn start(name: &str) {
        run(Variant::TEXT, name);
    }

    for_each_case!(mount_cases);
}

mod enumeration {
    use super::*;

    fn start(name: &str) {
        run(Variant::ENUM, name);
    }

    for_each_case!(mount_cases);
}

mod boolean {
    use super::*;

    fn start(name: &str) {
        run(Variant::BOOLEAN, name);
    }

    for_each_case!(mount_cases);
}

mod side {
    use super::*;

    fn start(name: &str) {
        run(Variant::SIDE, name);
    }

    for_each_case!(mount_cases);
}

mod boolean_side {
    use super::*;

    fn start(name: &str) {
        run(Variant::BOOLEAN_SIDE, name);
    }

    for_each_case!(mount_cases);
}
