//! The host's team of threads (`src/host/team.rs`) as shuttle can run it: the same text, but for where its names come
//! from. Every change is demanded to be possible, so that a team that is written otherwise fails here and not in silence.

use std::{env, fs, path::Path};

const FROM: &str = "../src/host/team.rs";

/// What stands there, and what takes its place.
const CHANGES: &[(&str, &str)] = &[
    // Inner attributes and docs may not be included.
    ("//!", "//"),
    ("#![allow(", "// allow("),
    ("use std::sync::Arc;", "use shuttle::sync::Arc;"),
    ("use std::sync::atomic::", "use shuttle::sync::atomic::"),
    ("use std::thread::{self, JoinHandle, Thread};", "use shuttle::thread::{self, JoinHandle, Thread};"),
    ("use std::time::{Duration, Instant};", "use std::time::Duration;\nuse super::time::Instant;"),
    ("std::hint::spin_loop()", "shuttle::hint::spin_loop()"),
    // A look is a step of the scheduler here; two show as much as sixty-four.
    ("const LOOKS: usize = 64;", "const LOOKS: usize = 2;"),
    // Few enough that callers find none left.
    ("const REGIONS: usize = 8;", "const REGIONS: usize = 2;"),
];

fn main() {
    println!("cargo::rerun-if-changed={FROM}");
    let mut text = fs::read_to_string(FROM).expect("the team's source");
    for (from, to) in CHANGES {
        assert!(text.contains(from), "{FROM} has no `{from}` any more: say in build.rs what stands there now");
        text = text.replace(from, to);
    }
    assert!(!text.contains("std::sync") && !text.contains("std::thread::"), "{FROM} uses more of std than is replaced");
    fs::write(Path::new(&env::var("OUT_DIR").expect("cargo")).join("team.rs"), text).expect("room for the team");
}
