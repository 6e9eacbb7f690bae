//! Spans and counters as a file that Perfetto opens (`runtime.md` §8).
//!
//! [`TraceLayer`] writes the JSON array form of Chrome's trace events. Every
//! thread is a track under its own name, and as each actor runs on a named
//! thread, every actor is a track. What the layer reads:
//!
//! | in the code | in the file |
//! |---|---|
//! | a span that is entered | a slice on the thread's track, one per time it is entered |
//! | a span that is never entered, only closed | an asynchronous slice: work that hops between actors, such as a flight |
//! | an event | an instant on the thread's track |
//! | an event with target [`COUNTER`] | a counter for each of its numbers, written when it changes; `a_b` is series `b` of counter `a` |
//! | an event with target [`DEVICE`] | a slice on the device's track: `class` (its name), `age_us` (how long before the event it began; `dur_us` if left out), `dur_us` |
//! | a field [`FLOW_START`], [`FLOW_STEP`] or [`FLOW_END`] | an arrow between the slices that name the same number |
//!
//! Needs the `cli` feature, because it builds on `tracing-subscriber`.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::Arc;
use std::thread::ThreadId;
use std::time::Instant;

use parking_lot::Mutex;
use serde_json::{Map, Value, json};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

/// Target of events whose fields are counters.
pub const COUNTER: &str = "riparian::counter";
/// Target of events that stand for work on the device, measured by its timestamps.
pub const DEVICE: &str = "riparian::device";
/// Field that begins an arrow.
pub const FLOW_START: &str = "flow_start";
/// Field that carries an arrow on.
pub const FLOW_STEP: &str = "flow_step";
/// Field that ends an arrow.
pub const FLOW_END: &str = "flow_end";

/// The process the host's tracks stand under.
const HOST_PID: u32 = 1;
/// The process the device's track stands under.
const DEVICE_PID: u32 = 2;
/// The device's track.
const DEVICE_TID: u32 = 1;
/// Length given to an event that carries an arrow: arrows bind to slices, not to instants. Less than the clock's step
/// between two events, so that it lies within the slice around it.
const FLOW_SLICE_US: f64 = 0.01;

/// A [`tracing_subscriber`] layer that writes a trace; see the module.
#[derive(Debug)]
pub struct TraceLayer {
    sink: Arc<Sink>,
}

/// Ends the file when it is dropped, or with [`TraceGuard::finish`].
#[derive(Debug)]
#[must_use = "the trace ends when its guard is dropped"]
pub struct TraceGuard {
    sink: Arc<Sink>,
}

/// Begins a trace in a new file; an existing one is replaced.
///
/// # Errors
///
/// When the file cannot be created.
pub fn to_file(path: &Path) -> io::Result<(TraceLayer, TraceGuard)> {
    let file = BufWriter::with_capacity(1 << 18, File::create(path)?);
    Ok(to_writer(Box::new(file)))
}

/// Begins a trace in any writer.
pub fn to_writer(out: Box<dyn Write + Send>) -> (TraceLayer, TraceGuard) {
    let writer = Writer {
        out,
        first: true,
        threads: HashMap::new(),
        arrows: HashMap::new(),
        arrows_begun: 0,
        counters: HashMap::new(),
        device_until_us: f64::NEG_INFINITY,
        error: None,
    };
    let sink = Arc::new(Sink { begun: Instant::now(), writer: Mutex::new(Some(writer)) });
    for (pid, name) in [(HOST_PID, "riparian"), (DEVICE_PID, "device")] {
        sink.put(&json!({ "ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": { "name": name } }));
    }
    let track = json!({ "name": "device" });
    sink.put(&json!({ "ph": "M", "name": "thread_name", "pid": DEVICE_PID, "tid": DEVICE_TID, "args": track }));
    (TraceLayer { sink: Arc::clone(&sink) }, TraceGuard { sink })
}

impl TraceGuard {
    /// Closes the file and reports the first error of all its writes.
    ///
    /// # Errors
    ///
    /// When any write failed; the file then holds what came before.
    pub fn finish(self) -> io::Result<()> {
        self.sink.close()
    }
}

impl Drop for TraceGuard {
    fn drop(&mut self) {
        // After `finish` there is nothing left to close.
        if let Err(error) = self.sink.close() {
            tracing::warn!(%error, "the trace is incomplete");
        }
    }
}

#[derive(Debug)]
struct Sink {
    begun: Instant,
    writer: Mutex<Option<Writer>>,
}

struct Writer {
    out: Box<dyn Write + Send>,
    first: bool,
    /// Track number of each thread seen so far.
    threads: HashMap<ThreadId, u32>,
    /// The number in the file of each arrow that was begun and not ended. Numbers in the code come again, and viewers take
    /// each for one arrow.
    arrows: HashMap<u64, u64>,
    /// Arrows begun so far.
    arrows_begun: u64,
    /// Last value written of each counter.
    counters: HashMap<String, f64>,
    /// End of the last slice on the device's track.
    device_until_us: f64,
    error: Option<io::Error>,
}

impl std::fmt::Debug for Writer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Writer").field("threads", &self.threads.len()).field("error", &self.error).finish()
    }
}

impl Writer {
    fn put(&mut self, event: &Value) {
        if self.error.is_some() {
            return;
        }
        let lead = if std::mem::take(&mut self.first) { "[\n" } else { ",\n" };
        let written = self
            .out
            .write_all(lead.as_bytes())
            .and_then(|()| serde_json::to_writer(&mut self.out, event).map_err(io::Error::from));
        self.error = written.err();
    }

    /// A counter's value, unless it has it already: a viewer holds a value until the next. Viewers name a counter and
    /// its series, so `drafts_kept` is the series `kept` of `drafts`.
    fn count(&mut self, at_us: f64, name: &str, value: f64) {
        if self.counters.get(name) == Some(&value) {
            return;
        }
        self.counters.insert(name.to_owned(), value);
        let (name, series) = name.split_once('_').unwrap_or((name, "total"));
        self.put(&json!({
            "ph": "C", "name": name, "pid": HOST_PID, "tid": 0, "ts": at_us, "args": { series: value },
        }));
    }

    /// A slice on the device's track. The device's clock and ours drift apart: what would overlap the slice before it is
    /// cut, as slices of a track must not.
    fn on_device(&mut self, start_us: f64, dur_us: f64, fields: &Fields) {
        let end_us = (start_us + dur_us).max(self.device_until_us);
        let start_us = start_us.max(self.device_until_us).max(0.0);
        self.device_until_us = end_us.max(start_us);
        let name = fields.args.get("class").and_then(Value::as_str).unwrap_or("work");
        self.put(&json!({
            "ph": "X", "name": name, "cat": DEVICE, "pid": DEVICE_PID, "tid": DEVICE_TID,
            "ts": start_us, "dur": self.device_until_us - start_us, "args": fields.args,
        }));
    }

    /// The calling thread's track, named the first time it is seen.
    fn track(&mut self) -> u32 {
        let thread = std::thread::current();
        if let Some(&track) = self.threads.get(&thread.id()) {
            return track;
        }
        // A thread of the process's own number would pass for its main thread.
        let track = u32::try_from(self.threads.len()).expect("fewer threads than that") + HOST_PID + 1;
        self.threads.insert(thread.id(), track);
        let name = thread.name().map_or_else(|| format!("thread {track}"), str::to_owned);
        self.put(&json!({ "ph": "M", "name": "thread_name", "pid": HOST_PID, "tid": track, "args": { "name": name } }));
        track
    }
}

impl Sink {
    fn now_us(&self) -> f64 {
        self.begun.elapsed().as_secs_f64() * 1e6
    }

    fn put(&self, event: &Value) {
        if let Some(writer) = self.writer.lock().as_mut() {
            writer.put(event);
        }
    }

    /// Writes an event on the calling thread's track.
    fn put_here(&self, mut event: Map<String, Value>) {
        if let Some(writer) = self.writer.lock().as_mut() {
            let track = writer.track();
            event.insert("pid".into(), HOST_PID.into());
            event.insert("tid".into(), track.into());
            writer.put(&Value::Object(event));
        }
    }

    /// Gives arrows their numbers in the file; those that never began are left out. To be called in the order in which
    /// things begin, not in which they are written: a slice is written when it ends.
    fn number_arrows(&self, fields: &mut Fields) {
        if fields.flows.is_empty() {
            return;
        }
        let mut writer = self.writer.lock();
        let Some(writer) = writer.as_mut() else { return };
        for (phase, id) in fields.flows.split_off(fields.numbered) {
            let number = match phase {
                "s" => {
                    writer.arrows_begun += 1;
                    writer.arrows.insert(id, writer.arrows_begun);
                    Some(writer.arrows_begun)
                }
                "t" => writer.arrows.get(&id).copied(),
                _ => writer.arrows.remove(&id),
            };
            fields.flows.extend(number.map(|number| (phase, number)));
        }
        fields.numbered = fields.flows.len();
    }

    fn slice(&self, name: &str, target: &str, start_us: f64, dur_us: f64, fields: &Fields) {
        self.put_here(object(json!({
            "ph": "X", "name": name, "cat": target, "ts": start_us, "dur": dur_us, "args": fields.args,
        })));
        self.flows(start_us, fields);
    }

    fn flows(&self, at_us: f64, fields: &Fields) {
        for &(phase, id) in &fields.flows {
            let mut event = object(json!({ "ph": phase, "name": "flow", "cat": "flow", "id": id, "ts": at_us }));
            if phase == "f" {
                // Bind to the slice that encloses this moment, as the other two phases do.
                event.insert("bp".into(), "e".into());
            }
            self.put_here(event);
        }
    }

    fn close(&self) -> io::Result<()> {
        let Some(mut writer) = self.writer.lock().take() else { return Ok(()) };
        match writer.error.take() {
            Some(error) => Err(error),
            None => writer.out.write_all(b"\n]\n").and_then(|()| writer.out.flush()),
        }
    }
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => unreachable!("called with object literals"),
    }
}

/// Fields of a span or event, sorted by what becomes of them.
#[derive(Debug, Default)]
struct Fields {
    message: Option<String>,
    args: Map<String, Value>,
    /// Phase of the arrow and its number.
    flows: Vec<(&'static str, u64)>,
    /// Of `flows`, how many have their number in the file.
    numbered: usize,
}

impl Fields {
    fn number(&self, name: &str) -> Option<f64> {
        self.args.get(name).and_then(Value::as_f64)
    }
}

impl Visit for Fields {
    fn record_u64(&mut self, field: &Field, value: u64) {
        match field.name() {
            FLOW_START => self.flows.push(("s", value)),
            FLOW_STEP => self.flows.push(("t", value)),
            FLOW_END => self.flows.push(("f", value)),
            name => _ = self.args.insert(name.into(), value.into()),
        }
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        match u64::try_from(value) {
            Ok(value) => self.record_u64(field, value),
            Err(_) => _ = self.args.insert(field.name().into(), value.into()),
        }
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.args.insert(field.name().into(), value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.args.insert(field.name().into(), value.into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => self.message = Some(value.to_owned()),
            name => _ = self.args.insert(name.into(), value.into()),
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = write!(text, "{value:?}");
        self.record_str(field, &text);
    }
}

/// What a span keeps between its callbacks.
#[derive(Debug)]
struct Open {
    fields: Fields,
    begun_us: f64,
    /// Starts of the entries not yet left; one per thread that is inside.
    entered: Vec<(ThreadId, f64)>,
    was_entered: bool,
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for TraceLayer {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        self.sink.number_arrows(&mut fields);
        let open = Open { fields, begun_us: self.sink.now_us(), entered: Vec::new(), was_entered: false };
        if let Some(span) = context.span(id) {
            span.extensions_mut().insert(open);
        }
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        if let Some(open) = span.extensions_mut().get_mut::<Open>() {
            values.record(&mut open.fields);
            self.sink.number_arrows(&mut open.fields);
        }
    }

    fn on_enter(&self, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        if let Some(open) = span.extensions_mut().get_mut::<Open>() {
            open.was_entered = true;
            open.entered.push((std::thread::current().id(), self.sink.now_us()));
        }
    }

    fn on_exit(&self, id: &Id, context: Context<'_, S>) {
        let now_us = self.sink.now_us();
        let Some(span) = context.span(id) else { return };
        let mut extensions = span.extensions_mut();
        let Some(open) = extensions.get_mut::<Open>() else { return };
        let here = std::thread::current().id();
        let Some(entry) = open.entered.iter().rposition(|(thread, _)| *thread == here) else { return };
        let (_, start_us) = open.entered.remove(entry);
        let metadata = span.metadata();
        self.sink.slice(metadata.name(), metadata.target(), start_us, now_us - start_us, &open.fields);
        // An arrow belongs to the first slice alone.
        open.fields.flows.clear();
        open.fields.numbered = 0;
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let now_us = self.sink.now_us();
        let Some(span) = context.span(&id) else { return };
        let extensions = span.extensions();
        let Some(open) = extensions.get::<Open>().filter(|open| !open.was_entered) else { return };
        let metadata = span.metadata();
        let (name, cat, number) = (metadata.name(), metadata.target(), id.into_u64());
        for (phase, at_us) in [("b", open.begun_us), ("e", now_us)] {
            self.sink.put_here(object(json!({
                "ph": phase, "name": name, "cat": cat, "id2": { "local": format!("{number:#x}") }, "ts": at_us,
                "args": open.fields.args,
            })));
        }
    }

    fn on_event(&self, event: &Event<'_>, _context: Context<'_, S>) {
        let now_us = self.sink.now_us();
        let mut fields = Fields::default();
        event.record(&mut fields);
        self.sink.number_arrows(&mut fields);
        let metadata = event.metadata();
        match metadata.target() {
            COUNTER => {
                if let Some(writer) = self.sink.writer.lock().as_mut() {
                    let numbers = fields.args.iter().filter_map(|(name, value)| Some((name, value.as_f64()?)));
                    numbers.for_each(|(name, value)| writer.count(now_us, name, value));
                }
            }
            DEVICE => {
                let dur_us = fields.number("dur_us").unwrap_or(0.0).max(0.0);
                let age_us = fields.number("age_us").unwrap_or(dur_us);
                if let Some(writer) = self.sink.writer.lock().as_mut() {
                    writer.on_device(now_us - age_us, dur_us, &fields);
                }
            }
            target => {
                let name = fields.message.clone().unwrap_or_else(|| metadata.name().to_owned());
                if fields.flows.is_empty() {
                    self.sink.put_here(object(json!({
                        "ph": "i", "s": "t", "name": name, "cat": target, "ts": now_us, "args": fields.args,
                    })));
                } else {
                    self.sink.slice(&name, target, now_us, FLOW_SLICE_US, &fields);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing_subscriber::layer::SubscriberExt;

    /// A writer that can be read while the trace still holds it.
    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Runs `work` under the layer and reads the finished file.
    fn traced(work: impl FnOnce()) -> Vec<Value> {
        let out = Shared::default();
        let (layer, guard) = to_writer(Box::new(out.clone()));
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), work);
        guard.finish().unwrap();
        let bytes = out.0.lock().clone();
        serde_json::from_slice(&bytes).expect("a whole JSON array")
    }

    fn phase<'a>(events: &'a [Value], phase: &str) -> Vec<&'a Value> {
        events.iter().filter(|event| event["ph"] == phase).collect()
    }

    #[test]
    fn entered_spans_are_slices_that_nest() {
        let events = traced(|| {
            let _outer = tracing::info_span!("outer", session = 3_u64).entered();
            let _inner = tracing::info_span!("inner").entered();
        });
        let slices = phase(&events, "X");
        let [inner, outer] = slices[..] else { panic!("two slices, not {}", slices.len()) };
        assert_eq!((&inner["name"], &outer["name"]), (&json!("inner"), &json!("outer")));
        assert_eq!(outer["args"]["session"], 3);
        assert_eq!(inner["tid"], outer["tid"]);
        let end = |slice: &Value| slice["ts"].as_f64().unwrap() + slice["dur"].as_f64().unwrap();
        assert!(outer["ts"].as_f64() <= inner["ts"].as_f64() && end(inner) <= end(outer));
    }

    #[test]
    fn a_span_that_is_never_entered_is_asynchronous() {
        let events = traced(|| {
            let flight = tracing::debug_span!("flight", flight = 7_u64, ids = tracing::field::Empty);
            flight.record("ids", 16_u64);
            drop(flight);
        });
        let (begins, ends) = (phase(&events, "b"), phase(&events, "e"));
        assert_eq!((begins.len(), ends.len()), (1, 1));
        assert_eq!(begins[0]["id2"], ends[0]["id2"]);
        assert!(begins[0]["id2"]["local"].is_string(), "of this process, not of the whole trace");
        assert_eq!(begins[0]["args"], json!({ "flight": 7, "ids": 16 }));
        assert!(phase(&events, "X").is_empty());
    }

    #[test]
    fn each_thread_is_a_track_with_its_name() {
        let out = Shared::default();
        let (layer, guard) = to_writer(Box::new(out.clone()));
        let dispatch = tracing::Dispatch::new(tracing_subscriber::registry().with(layer));
        for name in ["submitter", "readback"] {
            let dispatch = dispatch.clone();
            let body = move || tracing::dispatcher::with_default(&dispatch, || tracing::info!("ready"));
            std::thread::Builder::new().name(name.into()).spawn(body).unwrap().join().unwrap();
        }
        guard.finish().unwrap();
        let events: Vec<Value> = serde_json::from_slice(&out.0.lock()).unwrap();
        let names = events.iter().filter(|event| event["name"] == "thread_name" && event["pid"] == HOST_PID);
        let names: Vec<_> = names.map(|event| event["args"]["name"].as_str().unwrap().to_owned()).collect();
        assert_eq!(names, ["submitter", "readback"]);
        let instants = phase(&events, "i");
        assert_ne!(instants[0]["tid"], instants[1]["tid"]);
    }

    #[test]
    fn arrows_counters_and_device_work() {
        let events = traced(|| {
            tracing::info!(flow_start = 5_u64, layer = 1_u64, "missed");
            {
                let _complete = tracing::info_span!("complete", flow_step = 5_u64).entered();
            }
            tracing::info!(flow_end = 5_u64, "resumed");
            tracing::info!(target: COUNTER, tokens = 12_u64, drafts_kept = 3_u64, note = "no number");
            tracing::info!(target: COUNTER, tokens = 12_u64);
            // what began before the trace is cut off at its start
            std::thread::sleep(std::time::Duration::from_millis(1));
            tracing::info!(target: DEVICE, class = "experts", age_us = 50.0, dur_us = 20.0);
        });
        let flows: Vec<_> = ["s", "t", "f"].iter().flat_map(|p| phase(&events, p)).collect();
        assert_eq!(flows.len(), 3);
        assert!(flows.iter().all(|flow| flow["id"] == 1 && flow["cat"] == "flow"));
        let counters = phase(&events, "C");
        let named: Vec<_> = counters.iter().map(|c| (c["name"].as_str().unwrap(), &c["args"])).collect();
        assert_eq!(named, [("tokens", &json!({ "total": 12.0 })), ("drafts", &json!({ "kept": 3.0 }))]);
        let device: Vec<_> = events.iter().filter(|event| event["cat"] == DEVICE).collect();
        assert_eq!((device.len(), &device[0]["name"]), (1, &json!("experts")));
        assert!((device[0]["dur"].as_f64().unwrap() - 20.0).abs() < 1e-6, "{}", device[0]);
        // Every arrow lies inside a slice of its own thread, or a viewer drops it.
        for flow in flows {
            let at = flow["ts"].as_f64().unwrap();
            let inside = phase(&events, "X").into_iter().any(|slice| {
                let start = slice["ts"].as_f64().unwrap();
                slice["tid"] == flow["tid"] && start <= at && at <= start + slice["dur"].as_f64().unwrap()
            });
            assert!(inside, "{flow}");
        }
    }

    #[test]
    fn numbers_that_come_again_are_other_arrows() {
        let events = traced(|| {
            tracing::info!(flow_end = 7_u64, "of an arrow that never began");
            for _ in 0..2 {
                tracing::info!(flow_start = 7_u64, "missed");
                tracing::info!(flow_end = 7_u64, "resumed");
            }
        });
        let ids = |wanted: &str| phase(&events, wanted).iter().map(|e| e["id"].as_u64().unwrap()).collect::<Vec<_>>();
        assert_eq!((ids("s"), ids("f")), (vec![1, 2], vec![1, 2]));
    }

    #[test]
    fn slices_of_the_device_never_overlap() {
        let events = traced(|| {
            tracing::info!(target: DEVICE, class = "a", dur_us = 40.0, age_us = 50.0);
            tracing::info!(target: DEVICE, class = "b", dur_us = 1e9, age_us = 1e9);
        });
        let slices = phase(&events, "X");
        let [a, b] = slices[..] else { panic!("two slices, not {}", slices.len()) };
        let at = |event: &Value, field: &str| event[field].as_f64().unwrap();
        assert!(at(a, "ts") >= 0.0 && at(b, "ts") >= at(a, "ts") + at(a, "dur") && at(b, "dur") >= 0.0, "{a} {b}");
    }

    #[test]
    fn a_failed_write_is_reported() {
        struct Full;
        impl Write for Full {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::Error::other("disk full"))
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let (layer, guard) = to_writer(Box::new(Full));
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || tracing::info!("lost"));
        assert_eq!(guard.finish().unwrap_err().to_string(), "disk full");
    }
}
