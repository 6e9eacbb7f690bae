//! `--trace`: the file is one that a viewer draws as it was meant, and a partial-bank run has every span and counter of
//! `runtime.md` §8 in it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::support::{Ran, checkpoint, finish, model, program, recording, run, scratch};

/// Times are microseconds made from nanoseconds: what is left is rounding.
const ROUNDING_US: f64 = 2e-3;

/// Numbers that a viewer takes end here: it reads them as signed, or as floats.
const VIEWER_IDS: u64 = 1 << 53;

/// The number of an asynchronous slice.
fn local(event: &Value) -> String {
    event["id2"]["local"].as_str().unwrap_or_else(|| panic!("no number: {event}")).to_owned()
}

/// A slice of a track.
#[derive(Clone, Debug)]
struct Slice {
    name: String,
    start: f64,
    end: f64,
}

/// A process and a thread of the file.
type Track = (u64, u64);

/// A trace that was checked.
pub(crate) struct Trace {
    events: Vec<Value>,
    names: BTreeMap<Track, String>,
    slices: BTreeMap<Track, Vec<Slice>>,
    /// Name and duration of asynchronous slices.
    asynchronous: Vec<(String, f64)>,
    /// Values in the order of their times.
    counters: BTreeMap<String, Vec<f64>>,
}

impl Trace {
    /// Reads a file and checks all that a viewer relies on.
    fn read(path: &Path) -> Self {
        let events: Vec<Value> = serde_json::from_slice(&std::fs::read(path).unwrap()).expect("one JSON array");
        let mut trace = Self {
            events: Vec::new(),
            names: BTreeMap::new(),
            slices: BTreeMap::new(),
            asynchronous: Vec::new(),
            counters: BTreeMap::new(),
        };
        let mut counters: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
        let mut ended: HashMap<Track, f64> = HashMap::new();
        let mut begun: HashMap<(String, String, String), f64> = HashMap::new();
        for event in &events {
            let field = |name: &str| event[name].as_str().unwrap_or_else(|| panic!("no {name}: {event}")).to_owned();
            let track = (event["pid"].as_u64().expect("pid"), event["tid"].as_u64().expect("tid"));
            let (phase, name) = (field("ph"), field("name"));
            if phase == "M" {
                let named = event["args"]["name"].as_str().expect("a name").to_owned();
                match name.as_str() {
                    "thread_name" => assert!(trace.names.insert(track, named).is_none(), "named twice: {event}"),
                    "process_name" => {}
                    _ => panic!("an unknown record: {event}"),
                }
                continue;
            }
            let at = event["ts"].as_f64().expect("a time");
            assert!(at.is_finite() && at >= 0.0, "{event}");
            assert!(phase == "C" || trace.names.contains_key(&track), "the track has no name yet: {event}");
            match phase.as_str() {
                "X" => {
                    let dur = event["dur"].as_f64().expect("a duration");
                    assert!(dur.is_finite() && dur >= 0.0, "{event}");
                    let last = ended.entry(track).or_insert(0.0);
                    assert!(at + dur >= *last - ROUNDING_US, "written later, but it ended before the last: {event}");
                    *last = at + dur;
                    trace.slices.entry(track).or_default().push(Slice { name, start: at, end: at + dur });
                }
                "b" => assert!(begun.insert((field("cat"), name, local(event)), at).is_none()),
                "e" => {
                    let key = (field("cat"), name.clone(), local(event));
                    let from = begun.remove(&key).unwrap_or_else(|| panic!("ends what never began: {event}"));
                    assert!(at >= from, "{event}");
                    trace.asynchronous.push((name, at - from));
                }
                "C" => {
                    let [(series, value)] = &event["args"].as_object().unwrap().iter().collect::<Vec<_>>()[..] else {
                        panic!("one series: {event}")
                    };
                    let value = value.as_f64().expect("a number");
                    counters.entry(format!("{name} {series}")).or_default().push((at, value));
                }
                "i" => assert_eq!(event["s"], "t", "{event}"),
                "s" | "t" | "f" => {
                    assert!(event["id"].as_u64().is_some_and(|id| id < VIEWER_IDS), "{event}");
                    assert_eq!(event["bp"] == "e", phase == "f", "{event}");
                }
                _ => panic!("an unknown phase: {event}"),
            }
        }
        assert!(begun.is_empty(), "never ended: {begun:?}");
        for (name, mut values) in counters {
            values.sort_by(|a, b| a.0.total_cmp(&b.0));
            trace.counters.insert(name, values.into_iter().map(|(_, value)| value).collect());
        }
        trace.events = events;
        trace.nest();
        trace.arrows();
        trace
    }

    /// Slices of a track lie within each other or apart.
    fn nest(&self) {
        for (track, slices) in &self.slices {
            let mut slices = slices.clone();
            slices.sort_by(|a, b| a.start.total_cmp(&b.start).then(b.end.total_cmp(&a.end)));
            let mut around: Vec<&Slice> = Vec::new();
            for slice in &slices {
                around.retain(|outer| outer.end > slice.start + ROUNDING_US);
                if let Some(outer) = around.last() {
                    assert!(slice.end <= outer.end + ROUNDING_US, "{track:?}: {slice:?} sticks out of {outer:?}");
                }
                around.push(slice);
            }
        }
    }

    /// Every arrow begins once, goes forward in time and touches a slice at every point. Gives the names of the slices
    /// that each finished arrow touches.
    fn arrows(&self) -> Vec<Vec<String>> {
        let mut points: BTreeMap<u64, Vec<(f64, &str, String)>> = BTreeMap::new();
        for event in self.events.iter().filter(|event| event["cat"] == "flow") {
            let track = (event["pid"].as_u64().unwrap(), event["tid"].as_u64().unwrap());
            let at = event["ts"].as_f64().unwrap();
            let here = |slice: &&Slice| slice.start <= at + ROUNDING_US && at <= slice.end + ROUNDING_US;
            let found = self.slices[&track].iter().filter(here);
            // The innermost.
            let found = found.min_by(|a, b| (a.end - a.start).total_cmp(&(b.end - b.start)));
            let found = found.unwrap_or_else(|| panic!("touches no slice: {event}"));
            let point = (at, event["ph"].as_str().unwrap(), found.name.clone());
            points.entry(event["id"].as_u64().unwrap()).or_default().push(point);
        }
        let mut arrows = Vec::new();
        for (id, mut points) in points {
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
            let phases: String = points.iter().map(|(_, phase, _)| *phase).collect();
            // One that a cancelled session or a lost device left behind has no end.
            assert!(phases.starts_with('s') && phases[1..].trim_start_matches('t').len() <= 1, "arrow {id}: {phases}");
            if phases.ends_with('f') {
                arrows.push(points.into_iter().map(|(.., slice)| slice).collect());
            }
        }
        arrows
    }

    /// Names of slices on the tracks of this name.
    fn on(&self, actor: &str) -> BTreeSet<&str> {
        let tracks = self.names.iter().filter(|(_, name)| name.as_str() == actor).map(|(track, _)| track);
        tracks.filter_map(|track| self.slices.get(track)).flatten().map(|slice| slice.name.as_str()).collect()
    }

    pub(crate) fn args<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Value> {
        self.events.iter().filter(move |event| event["name"] == name).map(|event| &event["args"])
    }

    fn last(&self, counter: &str) -> f64 {
        *self
            .counters
            .get(counter)
            .unwrap_or_else(|| panic!("no {counter} in {:?}", self.counters.keys()))
            .last()
            .unwrap()
    }
}

/// Runs a command, on the host unless it names another device, with `--trace`, and reads what came of it.
pub(crate) fn traced_on(name: &str, arguments: &[&str]) -> (Ran, Trace) {
    let path = scratch().join(format!("{name}.trace.json"));
    let ran = finish(program().args(arguments).arg("--trace").arg(&path)).ok();
    (ran, Trace::read(&path))
}

/// What the run wrote to stdout, and its trace.
fn traced(name: &str, arguments: &[&str]) -> (String, Trace) {
    let (ran, trace) = traced_on(name, arguments);
    (ran.stdout, trace)
}

/// A synthetic model with a draft layer, and the GB that a quarter of its experts take.
fn synthetic() -> (PathBuf, String) {
    let path = scratch().join("traced.cmf");
    let flags = ["--geometry", "kernel", "--mtp", "--accept", "0.6", "--json"];
    let made = finish(program().arg("synth").arg(&path).args(flags)).ok().json_value();
    (path, format!("{}", made["expert_gb"].as_f64().unwrap() / 4.0))
}

#[test]
fn a_partial_bank_run_has_every_span_and_counter() {
    let (model, quarter) = synthetic();
    let model = model.to_str().unwrap();
    let ids = (0..40).map(|id: u32| id.to_string()).collect::<Vec<_>>().join(",");
    let flags = ["--ids", &ids, "--max-new-tokens", "96", "--ignore-eos", "--expert-gb", &quarter, "--format", "json"];
    let (stdout, trace) = traced("partial", &[&["generate", model], &flags[..]].concat());
    let line: Value = serde_json::from_str(&stdout).unwrap();

    // What hops between actors is asynchronous; what an actor does is on its track.
    for span in ["load", "session", "prefill", "flight"] {
        assert!(trace.asynchronous.iter().any(|(name, dur)| name == span && *dur > 0.0), "no {span}");
    }
    for (actor, spans) in [
        ("loader", vec!["open", "fetch"]),
        ("submitter", vec!["resume", "verify", "rollback"]),
        ("readback", vec!["land", "miss"]),
        ("completer", vec!["complete"]),
        ("admission", vec!["admit"]),
        ("drafts", vec!["draft"]),
        ("device", vec!["route", "experts", "sum", "accept", "upload"]),
    ] {
        let seen = trace.on(actor);
        spans.iter().for_each(|span| assert!(seen.contains(span), "no {span} on {actor}'s track, but {seen:?}"));
    }
    for (span, fields) in [
        ("flight", vec!["flight", "session", "kind", "steps", "position"]),
        ("complete", vec!["layer", "experts", "rows"]),
        ("prefill", vec!["session", "rows", "passes"]),
        ("verify", vec!["rounds", "offered", "kept"]),
    ] {
        let args = trace.args(span).next().unwrap();
        fields.iter().for_each(|field| assert!(!args[field].is_null(), "{span} has no {field}: {args}"));
    }
    assert!(trace.args("prefill").any(|args| args["rows"] == 40), "the prompt's rows");
    let kinds: BTreeSet<&str> = trace.args("flight").filter_map(|args| args["kind"].as_str()).collect();
    assert!(kinds.contains("prefill") && kinds.len() > 1, "{kinds:?}");

    // From the miss over its completion to the resume, and from the decision to the upload.
    let arrows = trace.arrows();
    let misses = arrows.iter().filter(|names| names[..] == ["miss", "complete", "resume"]).count() as f64;
    let seen = |names: &[&str]| arrows.iter().any(|arrow| arrow.iter().map(String::as_str).eq(names.iter().copied()));
    assert!(
        misses > 0.0 && misses <= trace.last("misses total"),
        "{misses} arrows of {} misses",
        trace.last("misses total")
    );
    assert!(seen(&["admit", "admitted"]), "{arrows:?}");

    // The counters say what the run's own report says.
    for (counter, at) in [
        ("tokens total", "/tokens"),
        ("misses total", "/bank/misses"),
        ("completions total", "/bank/completed"),
        ("admissions total", "/bank/admitted"),
        ("drafts offered", "/drafts/offered"),
        ("drafts kept", "/drafts/kept"),
    ] {
        let values = &trace.counters[counter];
        assert!(values.windows(2).all(|pair| pair[0] <= pair[1]), "{counter} fell: {values:?}");
        let told = line.pointer(at).and_then(Value::as_f64).unwrap();
        assert!(told > 0.0 && values.last() == Some(&told), "{counter}: {values:?}, reported {told}");
    }
    assert!(trace.last("flights total") > 0.0 && trace.last("bytes uploaded") > 0.0);
    for queue in ["requests", "facts", "answers", "admits", "advice", "awaits", "completions"] {
        assert!(trace.counters.contains_key(&format!("queue {queue}")), "{queue}: {:?}", trace.counters.keys());
    }
    assert!(trace.counters["flights live"].iter().all(|live| *live <= 2.0));
}

#[test]
fn a_recording_is_encoded_on_the_encoders_track() {
    let (model, wav) = (model(), recording());
    let (_, trace) = traced("recording", &["transcribe", model.to_str().unwrap(), wav.to_str().unwrap()]);
    assert!(trace.on("encoder").contains("encode"));
    let device = trace.args("load").find_map(|args| args["device"].as_str());
    assert!(device.is_some_and(|device| !device.is_empty()), "load says which device decodes");
}

#[test]
fn every_command_takes_a_trace() {
    let (model, wav) = (model(), recording());
    let (model, wav) = (model.to_str().unwrap(), wav.to_str().unwrap());
    let at = |name: &str| scratch().join(name).to_str().unwrap().to_owned();
    let (made, counted) = (at("of-trace.cmf"), at("of-trace.hot.json"));
    let (checkpoint, converted) = (checkpoint().to_str().unwrap(), at("of-trace-converted.cmf"));
    for (command, arguments) in [
        ("convert", vec![checkpoint, &converted, "--quant", "q8_2f"]),
        ("info", vec![model]),
        ("verify", vec![model]),
        ("doctor", vec![]),
        ("synth", vec![&made, "--geometry", "tiny", "--mtp"]),
        ("bench", vec![&made, "--prompt-len", "8", "--tokens", "8", "--warmup", "0", "--repeats", "1"]),
        ("tune", vec![&made]),
        ("generate", vec![&made, "--ids", "1,2,3", "--max-new-tokens", "4"]),
        ("calibrate", vec![model, wav, "--out", &counted]),
    ] {
        let (_, trace) = traced(command, &[&[command], &arguments[..]].concat());
        assert!(trace.on("main").contains("command"), "{command}");
        // What takes long has its parts on the threads that do them.
        if let Some(part) =
            [("convert", "convert"), ("verify", "hash"), ("synth", "write")].iter().find(|(of, _)| *of == command)
        {
            assert!(trace.args(part.1).count() > 10, "{command} draws no {}", part.1);
        }
    }
    run(["doctor", "--trace", "/nowhere/trace.json"]).refused(1, &["/nowhere/trace.json"]);
}
