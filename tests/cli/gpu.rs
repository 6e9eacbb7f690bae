//! The program on a named adapter with banks that do not hold all experts (lavapipe in CI; `RIPARIAN_TEST_ADAPTER`
//! names another).

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde_json::Value;

use crate::support::{Ran, demo, finish, model, program, scratch};
use crate::trace::traced_on;

#[test]
fn a_named_adapter_transcribes_with_a_partial_bank() {
    let adapter = std::env::var("RIPARIAN_TEST_ADAPTER").unwrap_or_else(|_| "llvmpipe".into());
    let info = finish(program().arg("info").arg(model()).arg("--json")).ok().json_value();
    let number = |path: &str| info.pointer(path).and_then(Value::as_f64).unwrap();
    let half = number("/experts/bytes_each") * number("/experts/layers") * number("/experts/routed") / 2.0;
    let half = format!("{}", half / 1e9);
    let recordings: Vec<_> = demo().into_iter().take(2).collect();
    for (budget, partial) in [("0.000001", true), (half.as_str(), true), ("1", false)] {
        for act in ["f32", "int8"] {
            let flags = ["--format", "json", "--device", &adapter, "--expert-gb", budget, "--act", act];
            let wavs = recordings.iter().map(|(wav, _)| wav);
            let ran = finish(program().arg("transcribe").arg(model()).args(wavs).args(flags)).ok();
            let lines = ran.json();
            assert_eq!(lines.len(), recordings.len());
            for (line, (wav, said)) in lines.iter().zip(&recordings) {
                let what = format!("{budget} GB, {act}, {}", wav.display());
                assert_eq!(line["text"], said.as_str(), "{what}");
                let device = line["device"].as_str().unwrap();
                assert!(device.to_lowercase().contains(&adapter.to_lowercase()), "{what}: {device}");
                assert!(device.contains("subgroups"), "the kernel variant is named: {device}");
                let [misses, completed] = ["/bank/misses", "/bank/completed"].map(|at| line.pointer(at).unwrap());
                assert_eq!(misses.as_u64().unwrap() > 0, partial, "{what}: {misses} misses");
                assert_eq!(completed.as_u64().unwrap() > 0, partial, "{what}: {completed} completed");
            }
        }
    }
}

#[test]
fn tune_measures_the_adapter_it_would_decode_on() {
    let adapter = std::env::var("RIPARIAN_TEST_ADAPTER").unwrap_or_else(|_| "llvmpipe".into());
    let path = scratch().join("tune.cmf");
    finish(program().arg("synth").arg(&path).args(["--geometry", "tiny"])).ok();
    let profile = scratch().join("tune.profile");
    let flags = ["--device", &adapter, "--json", "--out"];
    let told = finish(program().arg("tune").arg(&path).args(flags).arg(&profile)).ok().json_value();
    for figure in ["upload_gb_s", "memory_gb_s", "dispatch_us", "readback_us"] {
        let value = told["adapter"][figure].as_f64().unwrap_or_default();
        assert!(value > 0.0, "{figure}: {told}");
    }
    // All experts, and a budget below them.
    let budgets = told["decode"].as_array().unwrap().iter().map(|d| d["expert_gb"].is_null()).collect::<Vec<_>>();
    assert!(budgets.contains(&true) && budgets.contains(&false), "{told}");
    finish(program().arg("doctor").arg("--profile").arg(&profile)).ok();
}

fn adapter() -> String {
    std::env::var("RIPARIAN_TEST_ADAPTER").unwrap_or_else(|_| "llvmpipe".into())
}

/// `tokens` ids behind 24 on the adapter: what was told of it, and the trace.
fn ran(name: &str, tokens: &str, flags: &[&str]) -> (Ran, crate::trace::Trace) {
    // Made once: a runtime that another test has open notices a file that is replaced.
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    let path = MADE.get_or_init(|| {
        let path = scratch().join("classes.cmf");
        finish(program().arg("synth").arg(&path).args(["--geometry", "tiny", "--mtp"])).ok();
        path
    });
    ran_on(path, name, tokens, flags)
}

fn ran_on(model: &Path, name: &str, tokens: &str, flags: &[&str]) -> (Ran, crate::trace::Trace) {
    let ids = (1..25).map(|id: u32| id.to_string()).collect::<Vec<_>>().join(",");
    let (model, adapter) = (model.to_str().unwrap(), adapter());
    let usual = [
        "generate",
        model,
        "--ids",
        &ids,
        "--max-new-tokens",
        tokens,
        "--ignore-eos",
        "--stats",
        "--device",
        &adapter,
        "--knob",
        "steps=2",
    ];
    traced_on(&format!("classes-{name}"), &[&usual[..], flags].concat())
}

/// Device time as it is told: kind of work, class, dispatches, ms.
fn class_times(told: &str) -> Vec<(String, String, f64, f64)> {
    let numbers = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [kind, class, dispatches, "dispatches", ms, "ms,", ..] = words[..] else { return None };
        Some((kind.to_owned(), class.to_owned(), dispatches.parse().ok()?, ms.parse().ok()?))
    };
    told.lines().filter_map(numbers).collect()
}

#[test]
fn device_time_is_told_for_each_class_in_decode_prefill_drafts_and_verify() {
    let kinds = |times: &[(String, String, f64, f64)]| {
        let mut kinds: Vec<String> = times.iter().map(|time| time.0.clone()).collect();
        kinds.dedup();
        kinds
    };
    let plain = ran("plain", "12", &["--no-drafts", "--knob", "ts=1", "--knob", "prof=1"]);
    let times = class_times(&plain.0.stderr);
    assert_eq!(kinds(&times), ["decode", "prefill"], "{}", plain.0.stderr);
    for kind in ["decode", "prefill"] {
        let of = |class: &str| times.iter().find(|time| time.0 == kind && time.1 == class).cloned();
        for class in ["in_proj", "scan", "out_proj", "qkv", "attn", "o_proj", "router", "exp_up", "exp_down", "head"] {
            let (.., dispatches, ms) = of(class).unwrap_or_else(|| panic!("no {class} in {kind}: {times:?}"));
            assert!(dispatches > 0.0 && ms > 0.0, "{kind} {class}");
        }
        let all = of("all").unwrap();
        let sum: f64 = times.iter().filter(|time| time.0 == kind && time.1 != "all").map(|time| time.3).sum();
        assert!((sum - all.3).abs() < 0.01, "{kind}: {sum} of {all:?}");
    }
    // CMF_NEMO_PROF beside it.
    assert!(
        plain.0.stderr.lines().any(|line| line.starts_with("flight") && line.contains("median")),
        "{}",
        plain.0.stderr
    );
    // The same dispatches are on the device's row.
    let drawn = |kind: &str| plain.1.args("scan").filter(|args| args["kind"] == kind).count() as f64;
    let told = |kind: &str| times.iter().find(|time| time.0 == kind && time.1 == "scan").unwrap().2;
    assert_eq!((drawn("decode"), drawn("prefill")), (told("decode"), told("prefill")));

    let drafts = ran("drafts", "12", &["--draft-depth", "2", "--knob", "ts=1"]);
    let times = class_times(&drafts.0.stderr);
    assert_eq!(kinds(&times), ["prefill", "draft", "verify"], "{}", drafts.0.stderr);

    // CMF_NEMO_SKIP leaves classes out.
    let less = ran("less", "12", &["--no-drafts", "--knob", "ts=1", "--knob", "skip=attn,sh_down"]);
    let times = class_times(&less.0.stderr);
    assert!(times.len() > 10 && !times.iter().any(|time| ["attn", "sh_down"].contains(&&*time.1)), "{times:?}");
    let off = ran("off", "12", &["--no-drafts"]).0.stderr;
    assert!(class_times(&off).is_empty() && off.contains("decode "), "{off}");
}

#[test]
fn submissions_are_as_long_as_they_may_be() {
    // Deep enough that a step takes many times a millisecond on a software adapter, however fast the machine.
    let deep = scratch().join("deep.cmf");
    finish(program().arg("synth").arg(&deep).args(["--geometry", "tiny", "--layers", "64"])).ok();
    // The first says how long a step takes; from then on many go together, or each by itself.
    let submissions = |ms: &str| {
        let flags = ["--no-drafts", "--knob", "steps=16", "--knob", &format!("submit_ms={ms}")];
        let (_, trace) = ran_on(&deep, ms, "64", &flags);
        trace.args("submit").count()
    };
    let (short, long) = (submissions("1"), submissions("10000"));
    assert!(short > long + 16, "{short} submissions of 1 ms, {long} of ten seconds");
}
