//! The program on a named adapter with banks that do not hold all experts (lavapipe in CI; `RIPARIAN_TEST_ADAPTER`
//! names another).

use serde_json::Value;

use crate::support::{demo, finish, model, program, scratch};

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
