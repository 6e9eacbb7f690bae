//! Arguments, and what every command shares: knobs, tracing, exit codes.
//!
//! Text and results go to stdout, everything else to stderr. Exit codes: 0
//! when all went well, 1 when something failed, 2 when the command could not
//! be understood (clap's own, and knobs that are not accepted).

mod bench;
mod calibrate;
mod convert;
mod doctor;
mod generate;
mod info;
mod progress;
mod record;
mod stream;
mod synth;
mod terminal;
mod transcribe;
mod tune;
mod verify;

use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::builder::BoolishValueParser;
use clap::{Arg, ArgAction, Args, CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use riparian::device::times::ClassTime;
use riparian::knobs::{KnobError, Knobs, Origin};
use riparian::model::mmap::Access;
use riparian::runtime::{LoadProgress, Runtime};
use riparian::trace;
use tracing::{debug, info_span};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer as _};

use terminal::Terminal;

/// Everything went well.
const SUCCESS: u8 = 0;
/// Something failed.
const FAILURE: u8 = 1;
/// The command could not be understood.
const USAGE: u8 = 2;
/// Ended by Ctrl-C, as shells report it: 128 + SIGINT.
const INTERRUPTED: u8 = 130;

const EXAMPLES: &str = "\
Examples:
  riparian transcribe                                    the bundled model and a bundled recording
  riparian transcribe model.cmf talk.wav call.flac       each recording's transcript, as it is made
  riparian transcribe model.cmf *.wav --format json      a JSON line a recording
  riparian generate model.cmf --prompt \"Why is the sky blue?\"
  riparian convert checkpoint/ model.cmf --quant q4tp
  riparian doctor                                        what this machine offers";

/// A streaming runtime for Nemotron-H mixture-of-experts models.
#[derive(Debug, Parser)]
#[command(name = "riparian", version, after_help = EXAMPLES, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    global: Global,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Recordings in, their transcripts out while they are being made
    Transcribe(transcribe::Transcribe),
    /// Text from a prompt, from token ids or from raw embedding rows
    Generate(generate::Generate),
    /// A published checkpoint into a model file
    Convert(convert::Convert),
    /// What a model file holds and what a device would need for it
    Info(info::Info),
    /// Prefill and decode rates of this machine
    Bench(bench::Bench),
    /// What this machine is best run with
    Tune(tune::Tune),
    /// Which experts some recordings use, for partial banks
    Calibrate(calibrate::Calibrate),
    /// A model of any geometry without weights, for benchmarks
    Synth(Box<synth::Synth>),
    /// Every hash of a model file
    Verify(verify::Verify),
    /// What this machine offers, and every knob with its value and source
    Doctor(doctor::Doctor),
}

/// Flags of every command; [`arguments`] gives them their twins in the environment.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Options of every command")]
pub(crate) struct Global {
    /// Where to decode (CMF_NEMO_DEVICE): auto, cpu, backend:index (vulkan:0) or a part of an adapter's name
    #[arg(long, global = true, value_name = "DEVICE")]
    device: Option<String>,
    /// Budget for routed experts on the device, in GB (CMF_NEMO_EXPERT_GB)
    #[arg(long, global = true, value_name = "GB")]
    expert_gb: Option<String>,
    /// Host threads (CMF_NEMO_THREADS)
    #[arg(long, global = true, value_name = "N")]
    threads: Option<String>,
    /// Activations of products with quantised matrices (CMF_NEMO_ACT): f32 or int8
    #[arg(long, global = true, value_name = "MODE")]
    act: Option<String>,
    /// Positions a session can hold (CMF_NEMO_CTX)
    #[arg(long, global = true, value_name = "N")]
    ctx: Option<String>,
    /// Decode without drafts (CMF_NEMO_MTP=0)
    #[arg(long, global = true)]
    no_drafts: bool,
    /// Drafts a round (CMF_NEMO_MTP_DEPTH): 1 to 4, or auto for what pays
    #[arg(long, global = true, value_name = "N")]
    draft_depth: Option<String>,
    /// Any knob, by its variable with or without CMF_NEMO_ (riparian doctor lists them)
    #[arg(long = "knob", global = true, value_name = "NAME=VALUE")]
    knobs: Vec<String>,
    /// Knobs of riparian tune, which the environment and flags override
    #[arg(long, global = true, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// Write a trace that Perfetto opens (https://ui.perfetto.dev)
    #[arg(long, global = true, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// No progress and no notes, only results and errors
    #[arg(long, short, global = true)]
    quiet: bool,
}

/// Flags that are a knob's, which has a variable of its own (`docs/knobs.md`); their help names it.
const OF_KNOBS: [&str; 8] = ["device", "expert-gb", "threads", "act", "ctx", "no-drafts", "draft-depth", "knob"];

/// Flags that say what one command is about, as a model's or a recording's name does, by command.
const INPUTS: [(&str, &str); 5] =
    [("generate", "prompt"), ("generate", "raw"), ("generate", "ids"), ("generate", "rows"), ("calibrate", "routes")];

/// The program's arguments. Every flag but [`INPUTS`] has a twin in the environment, which it overrides: a knob's
/// variable, or `RIPARIAN_` and the flag's name.
fn arguments() -> clap::Command {
    fn twin(arg: Arg) -> Arg {
        let Some(flag) = arg.get_long().filter(|flag| !OF_KNOBS.contains(flag)) else { return arg };
        let variable: &'static str = format!("RIPARIAN_{}", flag.to_ascii_uppercase().replace('-', "_")).leak();
        let arg = match arg.get_action() {
            // Without this the variable would have to be true or false.
            ArgAction::SetTrue => arg.value_parser(BoolishValueParser::new()),
            _ => arg,
        };
        arg.env(variable).hide_env_values(true)
    }
    Cli::command().mut_args(twin).mut_subcommands(|command| {
        let name = command.get_name().to_owned();
        let is_input = move |arg: &Arg| INPUTS.iter().any(|(of, flag)| *of == name && arg.get_long() == Some(flag));
        command.mut_args(|arg| if is_input(&arg) { arg } else { twin(arg) })
    })
}

impl Global {
    /// The profile's knobs, then the environment's, then the flags'.
    fn knobs(&self) -> Result<Knobs, Failure> {
        let profile = match &self.profile {
            Some(path) => std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?,
            None => String::new(),
        };
        let mut knobs = Knobs::from_profile_and_env(&profile)?;
        let mut set = |name: &str, value: &str| knobs.set(name, value, Origin::Flag);
        for (name, value) in [
            ("CMF_NEMO_DEVICE", &self.device),
            ("CMF_NEMO_EXPERT_GB", &self.expert_gb),
            ("CMF_NEMO_THREADS", &self.threads),
            ("CMF_NEMO_ACT", &self.act),
            ("CMF_NEMO_CTX", &self.ctx),
            ("CMF_NEMO_MTP_DEPTH", &self.draft_depth),
        ] {
            if let Some(value) = value {
                set(name, value)?;
            }
        }
        if self.no_drafts {
            set("CMF_NEMO_MTP", "0")?;
        }
        for pair in &self.knobs {
            let Some((name, value)) = pair.split_once('=') else {
                return Err(Failure::usage(format!("--knob {pair:?} is not understood: it takes NAME=VALUE")));
            };
            let name = name.trim().to_ascii_uppercase();
            let name = if name.starts_with("CMF_NEMO_") { name } else { format!("CMF_NEMO_{name}") };
            set(&name, value)?;
        }
        let given = knobs.list().filter(|(.., origin)| *origin != Origin::Default);
        let given: Vec<String> =
            given.map(|(knob, value, origin)| format!("{}={value} ({origin})", knob.name)).collect();
        debug!(given = given.join(" "), "knobs");
        Ok(knobs)
    }
}

/// Why a command ends without success.
#[derive(Debug)]
pub(crate) struct Failure {
    code: u8,
    error: anyhow::Error,
}

impl Failure {
    /// The command could not be understood.
    fn usage(message: impl Into<String>) -> Self {
        Self { code: USAGE, error: anyhow::Error::msg(message.into()) }
    }
}

impl Failure {
    /// Names the file it is about, unless the error does already.
    fn about(self, path: &Path) -> Self {
        let name = path.display().to_string();
        let named = self.error.to_string().contains(&name);
        if named { self } else { Self { error: self.error.context(name), ..self } }
    }
}

impl From<KnobError> for Failure {
    fn from(error: KnobError) -> Self {
        Self { code: USAGE, error: error.into() }
    }
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        Self { code: FAILURE, error }
    }
}

impl From<riparian::Error> for Failure {
    fn from(error: riparian::Error) -> Self {
        // A knob that only the runtime can judge (an adapter's name) is as much a misuse as one that does not parse.
        let code = if matches!(error, riparian::Error::Knob(_)) { USAGE } else { FAILURE };
        Self { code, error: error.into() }
    }
}

/// What a command that ran to its end says: 0, or 1 when a part of it failed.
type Outcome = Result<u8, Failure>;

/// Reads the arguments, runs the command, tells how it went.
pub(crate) fn run() -> ExitCode {
    quiet_readers();
    let parsed = Cli::from_arg_matches(&arguments().get_matches());
    let Cli { command, global } = parsed.unwrap_or_else(|error| error.format(&mut arguments()).exit());
    let mut terminal = Terminal::new(global.quiet);
    let traced = global.trace.as_deref();
    let outcome = watch(traced).map_err(Failure::from).and_then(|guard| {
        debug!(?command, ?global, "arguments");
        let whole = info_span!("command").entered();
        let outcome = match command {
            Command::Transcribe(command) => command.run(&global, &mut terminal),
            Command::Generate(command) => command.run(&global, &mut terminal),
            Command::Convert(command) => command.run(&global, &mut terminal),
            Command::Info(command) => command.run(&global, &mut terminal),
            Command::Bench(command) => command.run(&global, &mut terminal),
            Command::Tune(command) => command.run(&global, &mut terminal),
            Command::Calibrate(command) => command.run(&global, &mut terminal),
            Command::Synth(command) => command.run(&global, &mut terminal),
            Command::Verify(command) => command.run(&global, &mut terminal),
            Command::Doctor(command) => command.run(&global, &mut terminal),
        };
        drop(whole);
        if let Some((guard, path)) = guard.zip(traced) {
            guard.finish().with_context(|| format!("the trace {} is incomplete", path.display()))?;
        }
        outcome
    });
    match outcome {
        Ok(code) => code.into(),
        // Whoever read our output has enough of it; there is nothing to report, and nobody to report to.
        Err(failure) if is_broken_pipe(&failure.error) => SUCCESS.into(),
        Err(failure) => {
            terminal.error(&failure.error);
            failure.code.into()
        }
    }
}

/// Says nothing of panics that a hostile recording causes in its decoder: they become errors, which are told.
fn quiet_readers() {
    let loud = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if !riparian::audio::read::is_reading() {
            loud(panic);
        }
    }));
}

/// Starts logging to stderr (`RUST_LOG`, warnings by default) and the trace, if one is wanted.
fn watch(trace: Option<&Path>) -> anyhow::Result<Option<trace::TraceGuard>> {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("riparian=warn,error"));
    let log = tracing_subscriber::fmt::layer().with_writer(io::stderr).with_target(false).without_time();
    let registry = tracing_subscriber::registry().with(log.with_filter(filter));
    match trace {
        None => {
            registry.init();
            Ok(None)
        }
        Some(path) => {
            let (layer, guard) =
                trace::to_file(path).with_context(|| format!("cannot write the trace {}", path.display()))?;
            registry.with(layer.with_filter(EnvFilter::new("riparian=trace"))).init();
            Ok(Some(guard))
        }
    }
}

/// Runs a command's asynchronous part on this thread.
fn block_on<T>(future: impl Future<Output = T>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    Ok(runtime.block_on(future))
}

/// Threads for work that is no decoding.
fn pool(knobs: &Knobs) -> anyhow::Result<rayon::ThreadPool> {
    let threads = knobs.threads.map_or_else(riparian::host::default_threads, |threads| threads as usize);
    Ok(rayon::ThreadPoolBuilder::new().num_threads(threads).build()?)
}

/// How files are read (`CMF_NEMO_MMAP`).
fn access(knobs: &Knobs) -> Access {
    if knobs.mmap { Access::Mapped } else { Access::Memory }
}

/// Opens a model and starts its actors, drawing how far it is.
async fn load(path: &Path, knobs: Knobs, terminal: &Terminal) -> Result<Runtime, Failure> {
    let bar = progress::bytes(terminal, "load");
    let drawn = bar.clone();
    let progress = move |seen: LoadProgress| {
        drawn.set_length(seen.total_bytes);
        drawn.set_position(seen.done_bytes);
    };
    let built = Runtime::builder(path).knobs(knobs).on_progress(progress).build().await;
    bar.finish_and_clear();
    built.map_err(|error| Failure::from(error).about(path))
}

/// Stops a runtime, and tells where its time went if `CMF_NEMO_PROF` or `CMF_NEMO_TS` asks for it.
async fn end(runtime: Runtime, knobs: &Knobs, terminal: &Terminal) {
    if knobs.prof
        && let Ok(counters) = runtime.counters().await
    {
        terminal.note(format!(
            "{} flights, {} overtaken; {} stops for {} of {} experts, {} completed, {} uploaded; {} admitted, {} refused",
            counters.flights,
            counters.overtaken,
            counters.misses,
            counters.missed_experts,
            counters.routed,
            counters.completed,
            counters.served_by_upload,
            counters.admitted,
            counters.admissions_refused
        ));
        counters.laps.iter().for_each(|lap| terminal.note(lap));
    }
    let times = runtime.facts().class_times.clone();
    runtime.shutdown().await;
    // The last flights' timestamps are here when the device has ended.
    let times = times.map_or_else(Vec::new, |times| times.list());
    for kind in times.chunk_by(|a, b| a.kind == b.kind) {
        let ms = |time: &ClassTime| time.took.as_secs_f64() * 1e3;
        let all_ms: f64 = kind.iter().map(ms).sum();
        let line = |class: &str, dispatches: u64, ms: f64| {
            let (each_us, share) = (1e3 * ms / dispatches.max(1) as f64, 100.0 * ms / all_ms.max(f64::MIN_POSITIVE));
            let kind = kind[0].kind.name();
            format!(
                "{kind:<8} {class:<8} {dispatches:>8} dispatches {ms:>10.3} ms, {each_us:>7.1} us each, {share:>5.1} %"
            )
        };
        for time in kind {
            terminal.note(line(time.class.name(), time.dispatches, ms(time)));
        }
        terminal.note(line("all", kind.iter().map(|time| time.dispatches).sum(), all_ms));
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let kinds = error.chain().filter_map(|cause| cause.downcast_ref::<io::Error>());
    kinds.map(io::Error::kind).any(|kind| kind == io::ErrorKind::BrokenPipe)
}

/// The bundled files, where the program finds them: beside the current
/// directory, beside the program, or in the source tree it was built from.
fn bundled(path: &str) -> anyhow::Result<PathBuf> {
    let beside = std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.to_path_buf()));
    let roots = [Some(PathBuf::new()), beside, Some(env!("CARGO_MANIFEST_DIR").into())];
    let found = roots.into_iter().flatten().map(|root| root.join("assets").join(path)).find(|path| path.exists());
    found.with_context(|| format!("the bundled assets/{path} is not here: name a model and a recording"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_are_consistent() {
        arguments().debug_assert();
    }

    #[test]
    fn flags_override_knobs_and_say_so() {
        let cli = Cli::parse_from([
            "riparian",
            "doctor",
            "--act",
            "f32",
            "--knob",
            "steps=4",
            "--knob",
            "CMF_NEMO_ADMIT=2",
            "--no-drafts",
        ]);
        let knobs = cli.global.knobs().unwrap();
        assert_eq!((knobs.steps, knobs.admit, knobs.mtp), (4, 2, false));
        let flags = knobs.list().filter(|(.., origin)| *origin == Origin::Flag).count();
        assert_eq!(flags, 4);
    }

    #[test]
    fn a_bad_flag_is_a_misuse() {
        for (flag, value, says) in [
            ("--act", "f64", "CMF_NEMO_ACT"),
            ("--threads", "0", "CMF_NEMO_THREADS"),
            ("--knob", "steps", "NAME=VALUE"),
            ("--knob", "stpes=4", "CMF_NEMO_STEPS"),
        ] {
            let failure = Cli::parse_from(["riparian", "doctor", flag, value]).global.knobs().unwrap_err();
            assert_eq!(failure.code, USAGE);
            assert!(failure.error.to_string().contains(says), "{}", failure.error);
        }
    }
}
