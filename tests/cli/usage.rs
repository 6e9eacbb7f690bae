//! What is refused, and how: one sentence that names the value and what is accepted.

use crate::support::{file, finish, model, program, recording, run, scratch};

/// Exit code of a command that could not be understood.
const USAGE: i32 = 2;

#[test]
fn a_bad_knob_in_the_environment_is_a_misuse() {
    for (name, value, accepts) in [
        ("CMF_NEMO_ACT", "f64", "f32 or int8"),
        ("CMF_NEMO_STEPS", "0", "1 to 256"),
        ("CMF_NEMO_CTX", "many", "16 to 1048576"),
        ("CMF_NEMO_EXPERT_GB", "-1", "0 or more"),
        ("CMF_NEMO_SKIP", "brain", "in_proj"),
    ] {
        let ran = finish(program().args(["transcribe"]).arg(model()).arg(recording()).env(name, value));
        ran.refused(USAGE, &[name, value, accepts]);
        assert!(ran.stdout.is_empty(), "{}", ran.stdout);
    }
    finish(program().arg("doctor").env("CMF_NEMO_STPES", "4")).refused(USAGE, &["CMF_NEMO_STPES", "CMF_NEMO_STEPS"]);
}

#[test]
fn a_bad_flag_is_a_misuse() {
    for (arguments, says) in [
        (vec!["doctor", "--act", "f64"], vec!["CMF_NEMO_ACT", "f64", "f32 or int8"]),
        (vec!["doctor", "--knob", "steps"], vec!["NAME=VALUE", "steps"]),
        (vec!["doctor", "--knob", "stpes=1"], vec!["CMF_NEMO_STPES", "CMF_NEMO_STEPS"]),
        (vec!["frobnicate"], vec!["frobnicate"]),
        (vec!["generate", "x.cmf"], vec!["--prompt", "--ids", "--rows"]),
        (vec!["generate", "x.cmf", "--prompt", "a", "--ids", "1"], vec!["cannot be used with"]),
        (vec!["generate", "x.cmf", "--ids", "one"], vec!["one"]),
        (vec!["convert", "in", "out", "--quant", "q3"], vec!["q3", "exact", "q8_2f", "q4tp"]),
        (vec!["transcribe", "x.cmf"], vec!["no recording"]),
        (vec!["transcribe", "x.cmf", "a.wav", "--max-new-tokens", "0"], vec!["0"]),
        (vec!["transcribe", "x.cmf", "a.wav", "--format", "xml"], vec!["xml", "text", "json"]),
    ] {
        run(arguments).refused(USAGE, &says);
    }
}

#[test]
fn an_adapter_that_is_not_there_is_a_misuse() {
    let ran = run([
        "transcribe".as_ref(),
        model().as_os_str(),
        recording().as_os_str(),
        "--device".as_ref(),
        "No Such Adapter".as_ref(),
    ]);
    assert_ne!(ran.code, 0);
    ran.refused(ran.code, &["No Such Adapter"]);
}

#[test]
fn every_command_explains_itself() {
    let all = run(["--help"]).ok().stdout;
    for command in
        ["transcribe", "generate", "convert", "info", "verify", "doctor", "bench", "tune", "calibrate", "synth"]
    {
        assert!(all.contains(command), "{command}");
        let help = run([command, "--help"]).ok().stdout;
        assert!(help.contains("Examples:") && help.contains("--quiet"), "{help}");
    }
}

#[test]
fn every_flag_has_a_twin_in_the_environment() {
    // Of the knobs, `doctor` shows value and origin.
    for (flag, name, value, shown) in [
        (vec!["--device", "vulkan:7"], "CMF_NEMO_DEVICE", "vulkan:7", "vulkan:7"),
        (vec!["--expert-gb", "2.5"], "CMF_NEMO_EXPERT_GB", "2.5", "2.5"),
        (vec!["--threads", "3"], "CMF_NEMO_THREADS", "3", "3"),
        (vec!["--act", "f32"], "CMF_NEMO_ACT", "f32", "f32"),
        (vec!["--ctx", "4096"], "CMF_NEMO_CTX", "4096", "4096"),
        (vec!["--no-drafts"], "CMF_NEMO_MTP", "0", "0"),
        (vec!["--knob", "steps=5"], "CMF_NEMO_STEPS", "5", "5"),
    ] {
        let knob = |ran: crate::support::Ran| {
            let report = ran.ok().json_value();
            let knobs = report["knobs"].as_array().unwrap().clone();
            let found = knobs.into_iter().find(|knob| knob["name"] == name).unwrap();
            (found["value"].as_str().unwrap().to_owned(), found["from"].as_str().unwrap().to_owned())
        };
        let doctor = || {
            let mut command = program();
            command.args(["doctor", "--json"]).env_remove("CMF_NEMO_DEVICE");
            command
        };
        assert_eq!(knob(finish(doctor().args(&flag))), (shown.into(), "flag".into()), "{flag:?}");
        assert_eq!(knob(finish(doctor().env(name, value))), (shown.into(), "environment".into()), "{name}");
        // Where both speak, the flag is heard.
        assert_eq!(knob(finish(doctor().env(name, value).args(&flag))), (shown.into(), "flag".into()), "{name}");
    }
    let trace = scratch().join("by-environment.json");
    finish(program().arg("doctor").env("RIPARIAN_TRACE", &trace)).ok();
    assert!(std::fs::read_to_string(&trace).unwrap().trim_end().ends_with(']'), "a whole trace");
    let profile = file("by-environment.profile", b"CMF_NEMO_STEPS=7\n");
    let told = finish(program().args(["doctor", "--json"]).env("RIPARIAN_PROFILE", &profile)).ok().stdout;
    assert!(told.contains("\"profile\""), "{told}");
    let noted = |quiet: &str| {
        let flags = ["--stats", "--max-new-tokens", "1"];
        let ran =
            finish(program().arg("transcribe").arg(model()).arg(recording()).args(flags).env("RIPARIAN_QUIET", quiet));
        ran.ok().stderr
    };
    assert!(noted("1").is_empty() && noted("0").contains("prefill"));
}
