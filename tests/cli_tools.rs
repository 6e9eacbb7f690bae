//! The program's tools on a synthetic model: synth, bench, routes and calibration, through the binary.
#![cfg(feature = "cli")]

use std::path::Path;
use std::process::{Command, Output};

use riparian::policy::routes::Routes;
use serde_json::Value;

fn riparian(dir: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_riparian"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("CMF_NEMO_") {
            command.env_remove(name);
        }
    }
    command.current_dir(dir).args(args).args(["--device", "cpu", "--threads", "2"]).output().unwrap()
}

fn succeeded(out: &Output) -> String {
    let (stdout, stderr) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "{stdout}{stderr}");
    stdout.into_owned()
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

#[test]
fn a_synthetic_model_is_measured_recorded_and_calibrated() {
    let dir = tempfile::tempdir().unwrap();
    let at = |args: &[&str]| succeeded(&riparian(dir.path(), args));

    let made = json(&at(&["synth", "m.cmf", "--geometry", "kernel", "--mtp", "--accept", "0.6", "--json"]));
    assert_eq!((made["cmd"].as_str(), made["blocks"].as_u64()), (Some("synth"), Some(10)));
    let gb = std::fs::metadata(dir.path().join("m.cmf")).unwrap().len() as f64 / 1e9;
    assert!((made["gb"].as_f64().unwrap() - gb).abs() < 1e-12);

    // All experts, with and without drafts, and a bank of a quarter of them.
    let quarter = made["expert_gb"].as_f64().unwrap() / 4.0;
    let budgets = format!("all,{quarter}");
    let measured = at(&[
        "bench",
        "m.cmf",
        "--prompt-len",
        "9,33",
        "--tokens",
        "40",
        "--repeats",
        "2",
        "--drafts",
        "on,off",
        "--expert-gb",
        &budgets,
        "--json",
        "--record-routes",
        "routes.bin",
    ]);
    let lines: Vec<Value> = measured.lines().map(json).collect();
    assert_eq!(lines.len(), 8, "two budgets, drafts on and off, two prompts");
    for line in &lines {
        assert_eq!(line["expected_ids"], "40/40", "{line}");
        assert_eq!((line["cmd"].as_str(), line["tokens"].as_u64()), (Some("decode"), Some(40)));
        assert!(line["prefill_per_s"].as_f64().unwrap() > 0.0 && line["decode_tok_s"].as_f64().unwrap() > 0.0);
        assert!(line["load_s"].as_f64().unwrap() > 0.0);
        assert_eq!(line["runs"].as_array().unwrap().len(), 2);
        let partial = !line["expert_gb"].is_null();
        assert_eq!(line["partial"], partial, "{line}");
        assert!(partial || line["misses"] == 0);
    }
    assert!(lines.iter().any(|line| line["mtp_used"] == true) && lines.iter().any(|line| line["mtp_used"] == false));
    let missed =
        |line: &&Value| line["runs"][0]["misses"].as_u64().unwrap() + line["first_run"]["misses"].as_u64().unwrap();
    assert!(lines.iter().any(|line| missed(&line) > 0), "a quarter of the experts is missed now and then");

    // The table says the same to people, and compares.
    std::fs::write(dir.path().join("before.jsonl"), &measured).unwrap();
    let table = at(&[
        "bench",
        "m.cmf",
        "--prompt-len",
        "9",
        "--tokens",
        "12",
        "--warmup",
        "0",
        "--repeats",
        "1",
        "--drafts",
        "off",
        "--compare",
        "before.jsonl",
    ]);
    assert!(table.contains("tok/s") && table.contains("12/12") && table.contains("against"), "{table}");

    // The routes are those of all positions but each last id, which was fed to nothing.
    let routes = Routes::read(&mut &std::fs::read(dir.path().join("routes.bin")).unwrap()[..]).unwrap();
    assert_eq!((routes.of.layers, routes.of.experts, routes.of.top_k), (4, 16, 4));
    assert_eq!((routes.texts.len(), routes.positions()), (8, (4 * (9 + 33), 8 * 39)));
    assert_eq!(routes.texts[0], routes.texts[2], "the same text is routed alike with and without drafts");

    // Calibration leaves the model alone and is read by the next command.
    let before = std::fs::read(dir.path().join("m.cmf")).unwrap();
    let told = json(&at(&["calibrate", "m.cmf", "--routes", "routes.bin", "--json"]));
    assert_eq!(told["positions"].as_u64(), Some(4 * 42 + 8 * 39));
    assert!(std::fs::read(dir.path().join("m.cmf")).unwrap() == before);
    let model = riparian::model::open(&dir.path().join("m.cmf"), &Default::default()).unwrap();
    for (counts, hot) in routes.counts().iter().zip(&model.expert_hot) {
        assert!(hot.windows(2).all(|pair| counts[pair[0].index()] >= counts[pair[1].index()]));
    }
}

#[test]
fn a_profile_says_what_was_measured_and_flags_override_it() {
    let dir = tempfile::tempdir().unwrap();
    let at = |args: &[&str]| succeeded(&riparian(dir.path(), args));
    at(&["synth", "m.cmf", "--geometry", "tiny", "--mtp"]);
    let told = json(&at(&["tune", "m.cmf", "--out", "here.profile", "--json"]));
    assert!(told["completions"].as_array().unwrap().iter().all(|c| c["layer_us"].as_f64().unwrap() > 0.0));
    let decoded = told["decode"].as_array().unwrap();
    assert!(decoded.iter().all(|d| d["decode_tok_s"].as_f64().unwrap() > 0.0), "{told}");
    assert!(decoded.iter().any(|d| d["drafts"] == true) && decoded.iter().any(|d| d["drafts"] == false), "{told}");
    assert!(told["adapter"].is_null(), "none was asked for: {told}");
    // Without drafts, and one to four of them a round; what is proposed is what was fastest, but for 3 %.
    let rates: Vec<(u64, f64)> = (decoded.iter())
        .map(|d| (d["draft_depth"].as_u64().unwrap(), d["decode_tok_s"].as_f64().unwrap()))
        .filter(|(depth, _)| *depth > 0)
        .collect();
    assert_eq!(rates.iter().map(|(depth, _)| *depth).collect::<Vec<_>>(), [1, 2, 3, 4], "{told}");
    let proposed = told["proposed"].as_object().unwrap();
    let drafts = proposed["CMF_NEMO_MTP"] == "1";
    assert_eq!(proposed.len(), if drafts { 4 } else { 3 }, "{told}");
    if let Some(depth) = proposed.get("CMF_NEMO_MTP_DEPTH") {
        let best = rates.iter().map(|(_, rate)| *rate).fold(0.0, f64::max);
        let chosen = rates.iter().find(|(d, _)| depth.as_str() == Some(&d.to_string())).unwrap();
        assert!(drafts && chosen.1 * 1.13 > best, "{told}");
    }
    assert_eq!(told["gives"].as_object().unwrap().len(), proposed.len());
    let profile = std::fs::read_to_string(dir.path().join("here.profile")).unwrap();
    for (name, value) in proposed {
        assert!(profile.lines().any(|line| line == format!("{name}={}", value.as_str().unwrap())), "{profile}");
    }
    let page = at(&["doctor", "--profile", "here.profile", "--json"]);
    let knobs = json(&page)["knobs"].to_string();
    // Every call here gives --threads, which goes before the profile's.
    assert!(knobs.contains("profile") && knobs.contains("flag"), "{knobs}");
    std::fs::write(dir.path().join("bad.profile"), "nonsense").unwrap();
    let out = riparian(dir.path(), &["doctor", "--profile", "bad.profile"]);
    assert_eq!(out.status.code(), Some(2), "a profile that is not understood is a misuse");
}

#[test]
fn what_cannot_be_is_refused_with_a_reason() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |args: &[&str]| {
        let out = riparian(dir.path(), args);
        assert!(!out.status.success(), "{args:?}");
        String::from_utf8_lossy(&out.stderr).into_owned()
    };
    assert!(refused(&["synth", "m.cmf", "--geometry", "huge"]).contains("nano-30b, mini, kernel or tiny"));
    assert!(refused(&["synth", "m.cmf", "--geometry", "tiny", "--inter", "40"]).contains("q4tp cannot hold"));
    assert!(refused(&["bench", "m.cmf", "--drafts", "maybe"]).contains("accepted are on and off"));
    assert!(refused(&["bench", "absent.cmf"]).contains("absent.cmf"));
    assert!(refused(&["calibrate", "m.cmf"]).contains("RECORDING"));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}
