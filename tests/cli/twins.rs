//! Every flag of every command and its twin in the environment: they do the same, and the flag is heard where both speak.
//!
//! The flags are those that `--help` lists. What a command understood is told at the log level `debug`, before it begins:
//! the inputs here do not exist, so that none gets further.

use crate::support::{Ran, finish, program, run};

/// A flag as `--help` explains it.
#[derive(Debug)]
struct Flag {
    name: String,
    takes_value: bool,
    help: String,
}

impl Flag {
    /// The variable that its help names.
    fn variable(&self) -> Option<String> {
        let after = |mark: &str| {
            let (_, rest) = self.help.split_once(mark)?;
            Some(rest.split(|c: char| !c.is_ascii_uppercase() && c != '_').next()?.to_owned())
        };
        after("[env: ").or_else(|| Some("CMF_NEMO_".to_owned() + &after("(CMF_NEMO_")?))
    }
}

fn flags(command: &str) -> Vec<Flag> {
    let mut flags: Vec<Flag> = Vec::new();
    for line in run([command, "--help"]).ok().stdout.lines() {
        let text = line.trim_start();
        let long = text.strip_prefix("-q, ").or(text.strip_prefix("-h, ")).unwrap_or(text).strip_prefix("--");
        // A flag stands at the left, what explains it further right or in the same line.
        if let Some(long) = long.filter(|_| line.len() - text.len() <= 6) {
            let name = long.split(|c: char| !c.is_ascii_lowercase() && c != '-').next().unwrap().to_owned();
            let takes_value = long[name.len()..].starts_with(" <");
            flags.push(Flag { name, takes_value, help: long.to_owned() });
        } else if let Some(flag) = flags.last_mut() {
            flag.help += " ";
            flag.help += text;
        }
    }
    flags.retain(|flag| flag.name != "help");
    assert!(flags.iter().any(|flag| flag.name == "quiet"), "{flags:?}");
    flags
}

/// Arguments with which a command starts, and soon fails.
fn inputs(command: &str) -> &'static [&'static str] {
    match command {
        "transcribe" => &["/nowhere/m.cmf", "/nowhere/a.wav"],
        "generate" => &["/nowhere/m.cmf", "--ids", "1"],
        "convert" => &["/nowhere", "/nowhere/m.cmf"],
        "calibrate" => &["/nowhere/m.cmf", "/nowhere/a.wav"],
        "doctor" => &[],
        _ => &["/nowhere/m.cmf"],
    }
}

/// Two values of a flag, neither its default.
fn values(command: &str, flag: &Flag) -> [&'static str; 2] {
    match (command, flag.name.as_str()) {
        _ if !flag.takes_value => ["1", "0"],
        (_, "format") => ["json", "text"],
        (_, "prompt" | "out" | "compare" | "record-routes") => ["one", "two"],
        ("convert", "quant") => ["q4tp", "q8_2f"],
        ("convert", "perception") => ["q8_2f", "exact"],
        ("bench", "prompt-len") => ["7,9", "8"],
        ("bench", "drafts") => ["off,3", "on"],
        ("synth", "geometry") => ["neither", "nor"],
        ("synth", "codec") => ["q8_2f", "q4tp"],
        ("synth", "zipf" | "accept") => ["0.5", "0.25"],
        ("synth", "pattern") => ["ME", "-M"],
        ("bench", _) | ("synth", _) | (_, "max-new-tokens") => ["5", "6"],
        _ => panic!("a new flag: {command} --{}, give it two values here", flag.name),
    }
}

/// What the command understood, or why it did not.
fn understood(command: &str, flags: &[&str], variables: &[(&str, &str)]) -> String {
    let mut told = program();
    told.arg(command).args(inputs(command)).args(flags).env("RUST_LOG", "riparian=debug").env("NO_COLOR", "1");
    if command == "synth" {
        // Planning the largest geometry takes a while; one that is none ends sooner.
        told.env("RIPARIAN_GEOMETRY", "none");
    }
    told.envs(variables.iter().copied());
    let Ran { stderr, .. } = finish(&mut told);
    let line = |of: &str| stderr.lines().find(|line| line.contains(of)).unwrap_or_else(|| panic!("{of}: {stderr}"));
    format!("{}\n{}", line("arguments command="), line("knobs given="))
}

/// The same wherever it came from.
fn wherever(told: &str) -> String {
    told.replace("(flag)", "").replace("(environment)", "")
}

const COMMANDS: [&str; 10] =
    ["transcribe", "generate", "convert", "info", "bench", "tune", "calibrate", "synth", "verify", "doctor"];

/// Flags of every command.
fn global(flags: Vec<Flag>) -> (Vec<Flag>, Vec<Flag>) {
    const GLOBAL: [&str; 11] = [
        "device",
        "expert-gb",
        "threads",
        "act",
        "ctx",
        "no-drafts",
        "draft-depth",
        "knob",
        "profile",
        "trace",
        "quiet",
    ];
    flags.into_iter().partition(|flag| GLOBAL.contains(&flag.name.as_str()))
}

#[test]
fn every_flag_of_a_command_has_a_twin_that_does_the_same() {
    // What one command is about is named on its line alone.
    let inputs = [
        ("generate", "prompt"),
        ("generate", "raw"),
        ("generate", "ids"),
        ("generate", "rows"),
        ("calibrate", "routes"),
    ];
    let mut walked = 0;
    for command in COMMANDS {
        let nothing = understood(command, &[], &[]);
        for flag in global(flags(command)).1 {
            let Some(variable) = flag.variable() else {
                assert!(inputs.contains(&(command, flag.name.as_str())), "{command} --{} has no twin", flag.name);
                continue;
            };
            let [one, other] = values(command, &flag);
            let name = format!("--{}", flag.name);
            let joined = format!("{name}={one}");
            let given: &[&str] = if flag.takes_value { &[&joined] } else { &[&name] };
            let by_flag = understood(command, given, &[]);
            assert_ne!(by_flag, nothing, "{command} {given:?} changes nothing");
            assert_eq!(understood(command, &[], &[(&variable, one)]), by_flag, "{command}: {variable}={one}");
            assert_eq!(
                understood(command, given, &[(&variable, other)]),
                by_flag,
                "{command} {given:?} {variable}={other}"
            );
            walked += 1;
        }
    }
    assert!(walked > 50, "{walked} flags");
}

#[test]
fn the_flags_of_every_command_have_twins_that_do_the_same() {
    let profile = crate::support::file("twin.profile", b"# nothing\n");
    let profile = profile.to_str().unwrap();
    let trace = crate::support::scratch().join("twin.json");
    let trace = trace.to_str().unwrap();
    // Flag, its value, and another that the variable has where both speak.
    let given = [
        ("device", "cpu", "vulkan:7"),
        ("expert-gb", "2.5", "3"),
        ("threads", "3", "2"),
        ("act", "f32", "int8"),
        ("ctx", "4096", "512"),
        ("no-drafts", "0", "1"),
        ("draft-depth", "3", "2"),
        ("profile", profile, "/nowhere"),
        ("trace", trace, "/nowhere/t.json"),
        ("quiet", "1", "0"),
    ];
    for command in COMMANDS {
        let all = global(flags(command)).0;
        // Of --knob the twin is the knob's own variable.
        assert_eq!(all.len(), given.len() + 1, "{command}: {all:?}");
        let (mut line, mut variables, mut others) = (Vec::new(), Vec::new(), Vec::new());
        for (name, value, other) in given {
            let flag = all.iter().find(|flag| flag.name == name).unwrap_or_else(|| panic!("{command} --{name}"));
            line.push(if flag.takes_value { format!("--{name}={value}") } else { format!("--{name}") });
            let variable = flag.variable().unwrap_or_else(|| panic!("{command} --{name} names no twin"));
            variables.push((variable.clone(), value));
            others.push((variable, other));
        }
        let line: Vec<&str> = line.iter().map(String::as_str).collect();
        fn lent<'a>(pairs: &'a [(String, &'a str)]) -> Vec<(&'a str, &'a str)> {
            pairs.iter().map(|(name, value)| (name.as_str(), *value)).collect()
        }
        let nothing = understood(command, &[], &[]);
        let (by_flag, by_variable) = (understood(command, &line, &[]), understood(command, &[], &lent(&variables)));
        assert_ne!(by_flag, nothing, "{command}");
        // What knobs came of is the same; the arguments themselves hold what was on the line.
        let knobs = |told: &str| wherever(told.lines().last().unwrap());
        assert_eq!(knobs(&by_flag), knobs(&by_variable), "{command}");
        assert_eq!(by_flag.matches("(flag)").count(), 7, "{by_flag}");
        assert_eq!(by_variable.matches("(environment)").count(), 7, "{by_variable}");
        let both = understood(command, &line, &lent(&others));
        assert_eq!(both, by_flag, "{command}: where both speak the flag is heard");
        for (field, value) in [("profile: Some(", profile), ("trace: Some(", trace), ("quiet: ", "true")] {
            for told in [&by_flag, &by_variable] {
                let rest = told.split_once(field).unwrap_or_else(|| panic!("{field}: {told}")).1;
                assert!(rest.trim_start_matches('"').starts_with(value), "{command}: {field} {told}");
            }
        }
    }
}
