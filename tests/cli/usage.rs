//! What is refused, and how: one sentence that names the value and what is accepted.

use crate::support::{finish, model, program, recording, run};

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
    for command in ["transcribe", "generate", "convert", "info", "verify", "doctor"] {
        assert!(all.contains(command), "{command}");
        let help = run([command, "--help"]).ok().stdout;
        assert!(help.contains("Examples:") && help.contains("--quiet"), "{help}");
    }
}
