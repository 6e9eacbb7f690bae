//! Every knob of the table takes effect, as far as this machine can show it: on the host, and on an adapter (lavapipe in
//! CI; `RIPARIAN_TEST_ADAPTER` names another). Each test is named after its variable. `CMF_NEMO_PROF`, `CMF_NEMO_TS`,
//! `CMF_NEMO_BANK_REP` and `CMF_NEMO_SUBMIT_MS` have their tests beside what they set; that the conventions of
//! `CMF_NEMO_MTP_PRE` and `CMF_NEMO_MTP_LN` reach the decoder is tested in `runtime/builder.rs`, what they do there in
//! `tests/host`.

#![allow(clippy::print_stdout, reason = "a test that cannot show something says so")]

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use riparian::device::DeviceKind;
use riparian::ids::TokenId;
use riparian::knobs::{Activations, Knobs, Origin, TABLE};
use riparian::model::geometry::Geometry;
use riparian::model::synth::{SynthOptions, preset, synth};
use riparian::model::tensors::Codec;
use riparian::model::{OpenOptions, Summary};
use riparian::runtime::{Counters, Error, Finished, Options, Runtime};

/// Rows of the prompt and ids behind it; fewer where a software rasteriser makes them.
const PROMPT: u32 = 40;
const IDS: usize = 64;
const FEW: usize = 6;

/// A synthetic model with a draft layer, a folder of its own around it.
fn model() -> &'static Path {
    static MODEL: OnceLock<(tempfile::TempDir, std::path::PathBuf)> = OnceLock::new();
    let (_, path) = MODEL.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("knobs.cmf");
        let geometry = Geometry { draft: true, ..preset("kernel").unwrap() };
        let (name, experts) = ("kernel".into(), Codec::Q4tp);
        let options = SynthOptions { name, geometry, experts, seed: 3, zipf: 0.8, accept: 0.75, hot: true };
        synth(&path, &options, &|_, _| {}).unwrap();
        (dir, path)
    });
    path
}

/// GB of all routed experts of the decoder, as the budget counts them.
fn expert_gb() -> f64 {
    let model = riparian::model::open(model(), &OpenOptions::default()).unwrap();
    let all = Summary::of(&model.container).unwrap().expert_bytes() as f64 / 1e9;
    // The draft layer's are not the budget's.
    all * model.geometry.decoder_layers() as f64 / model.geometry.layers() as f64
}

fn knobs(set: &[(&str, &str)]) -> Knobs {
    let mut knobs = Knobs::default();
    knobs.set("CMF_NEMO_DEVICE", "cpu", Origin::Code).unwrap();
    knobs.set("CMF_NEMO_THREADS", "2", Origin::Code).unwrap();
    // lavapipe binds 128 MiB: the KV of 65536 positions and a draft's rows is a little more.
    knobs.set("CMF_NEMO_CTX", "4096", Origin::Code).unwrap();
    for (name, value) in set {
        knobs.set(&format!("CMF_NEMO_{name}"), value, Origin::Code).unwrap();
    }
    knobs
}

fn wait<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

/// How a run went.
struct Ran {
    device: String,
    kind: DeviceKind,
    act: Activations,
    context: usize,
    progress: usize,
    finished: Finished,
    counters: Counters,
}

impl Ran {
    /// Ids that are the known answer.
    fn right(&self) -> usize {
        self.finished.ids.iter().zip(PROMPT..).filter(|(id, want)| id.0 == *want).count()
    }
}

/// Decodes `ids` ids behind a prompt of consecutive ones: all answers are known.
fn try_run(ids: usize, set: &[(&str, &str)]) -> Result<Ran, Error> {
    wait(async {
        let seen = Arc::new(AtomicUsize::new(0));
        let counted = seen.clone();
        let progress = move |_| _ = counted.fetch_add(1, Ordering::Relaxed);
        let runtime = Runtime::builder(model()).knobs(knobs(set)).on_progress(progress).build().await?;
        let options = Options { max_new_tokens: Some(ids), eos: Some(Vec::new()), ..Options::default() };
        let mut session = runtime.session(options).await?;
        session.feed_ids(&(0..PROMPT).map(TokenId).collect::<Vec<_>>()).await?;
        let finished = session.decode().finish().await?;
        let (device, kind) = (runtime.device().to_owned(), runtime.device_kind());
        let (act, context) = (runtime.facts().activations, runtime.context());
        let counters = runtime.counters().await?;
        let progress = seen.load(Ordering::Relaxed);
        runtime.shutdown().await;
        Ok(Ran { device, kind, act, context, progress, finished, counters })
    })
}

/// As [`try_run`], with every id right.
fn right_of(ids: usize, set: &[(&str, &str)]) -> Ran {
    let ran = try_run(ids, set).unwrap();
    assert_eq!((ran.right(), ran.finished.ids.len()), (ids, ids), "{set:?}: {:?}", ran.finished.ids);
    ran
}

fn right(set: &[(&str, &str)]) -> Ran {
    right_of(IDS, set)
}

fn quarter() -> String {
    format!("{}", expert_gb() / 4.0)
}

#[test]
fn every_knob_has_a_test() {
    let elsewhere = ["PROF", "TS", "BANK_REP", "SUBMIT_MS", "MTP_PRE", "MTP_LN"];
    let source = include_str!("knobs.rs");
    for knob in &TABLE {
        let name = knob.name.strip_prefix("CMF_NEMO_").unwrap();
        let test = format!("fn {}", name.to_lowercase());
        assert!(elsewhere.contains(&name) || source.contains(&test), "{} has no test here", knob.name);
    }
}

#[test]
fn ctx_bounds_the_context() {
    assert_eq!(right(&[("CTX", "128")]).context, 128);
    match try_run(IDS, &[("CTX", "64")]) {
        Err(Error::ContextUsedUp { positions: 64, ids }) => assert_eq!(ids.len(), 64 - PROMPT as usize + 1),
        other => panic!("{:?}", other.map(|ran| ran.finished)),
    }
}

#[test]
fn expert_gb_bounds_the_places() {
    let (all, few) = (right(&[]), right(&[("EXPERT_GB", &quarter())]));
    let (all, few) = (all.finished.stats.bank, few.finished.stats.bank);
    assert_eq!((all.misses, all.slots > few.slots), (0, true), "{all:?} {few:?}");
    assert!(few.misses > 0 && few.completed > 0, "{few:?}");
}

#[test]
fn admit_sets_how_often_experts_move() {
    let quarter = quarter();
    let admitted = |every: &str| right(&[("EXPERT_GB", &quarter), ("ADMIT", every), ("MTP", "0")]).counters.admitted;
    let (often, seldom) = (admitted("1"), admitted("1000000"));
    assert!(often > seldom, "{often} admitted one a position, {seldom} one in a million");
}

#[test]
fn batch_0_prefills_position_by_position() {
    let flights = |batch: &str| right_of(1, &[("BATCH", batch)]).counters.flights;
    let (batched, single) = (flights("1"), flights("0"));
    assert!(batched < 8 && single >= u64::from(PROMPT), "{batched} flights with passes, {single} without");
}

#[test]
fn steps_bounds_a_flight() {
    let flights = |steps: &str| right(&[("STEPS", steps), ("MTP", "0")]).counters.flights;
    let (long, single) = (flights("16"), flights("1"));
    assert!(single >= IDS as u64 && long <= single / 2, "{long} flights of 16 steps, {single} of one");
}

#[test]
fn mtp_0_turns_drafts_off() {
    let offered = |mtp: &str| right(&[("MTP", mtp)]).finished.stats.drafts.offered;
    assert!(offered("1") > 0);
    assert_eq!(offered("0"), 0);
}

/// Drafts offered and kept, with every id right whatever the drafts were.
fn drafts(set: &[(&str, &str)]) -> (u64, u64) {
    let drafts = right(set).finished.stats.drafts;
    assert!(drafts.offered > 0, "{set:?}");
    (drafts.offered, drafts.kept)
}

#[test]
fn mtp_hfirst_reads_the_fusion_the_other_way_round() {
    let (usual, swapped) = (drafts(&[]), drafts(&[("MTP_HFIRST", "1")]));
    assert!(usual.1 * swapped.0 > swapped.1 * usual.0, "kept of offered: {usual:?} as written, {swapped:?} swapped");
}

#[test]
fn mtp_depth_sets_how_many_drafts_a_round_has() {
    let of = |depth: &str| {
        let ran = right(&[("MTP_DEPTH", depth)]);
        ran.counters.drafts_offered as f64 / ran.counters.verifies as f64
    };
    for depth in [1, 3] {
        let offered = of(&depth.to_string());
        // The last rounds are cut where the text ends.
        assert!(offered <= f64::from(depth) && offered > f64::from(depth) - 1.0, "{offered} a round of {depth}");
    }
    let auto = right(&[("MTP_DEPTH", "auto")]);
    assert!(auto.finished.stats.drafts.offered > 0);
}

#[test]
fn act_chooses_the_arithmetic() {
    assert_eq!(right(&[("ACT", "f32")]).act, Activations::F32);
    assert_eq!(right(&[("ACT", "int8")]).act, Activations::Int8);
}

#[test]
fn threads_bounds_the_hosts_threads() {
    for threads in ["1", "3"] {
        let device = right(&[("THREADS", threads)]).device;
        assert!(device.contains(&format!("{threads} thread")), "{device}");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn mmap_0_reads_the_model_into_memory() {
    // A file of its own: other tests map theirs meanwhile.
    let dir = tempfile::tempdir().unwrap();
    for (mmap, mapped) in [("1", true), ("0", false)] {
        let path = dir.path().join(format!("mapped-{mmap}.cmf"));
        std::fs::copy(model(), &path).unwrap();
        wait(async {
            let runtime = Runtime::builder(&path).knobs(knobs(&[("MMAP", mmap)])).build().await.unwrap();
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            assert_eq!(maps.contains(path.to_str().unwrap()), mapped, "MMAP={mmap}");
            runtime.shutdown().await;
        });
    }
}

#[cfg(feature = "gpu")]
mod gpu {
    use super::*;
    use riparian::device::wgpu::find;
    use riparian::knobs::DeviceChoice;

    fn adapter() -> String {
        std::env::var("RIPARIAN_TEST_ADAPTER").unwrap_or_else(|_| "llvmpipe".into())
    }

    #[test]
    fn device_names_what_decodes() {
        let name = adapter();
        let there = right_of(FEW, &[("DEVICE", &name)]);
        assert_eq!(there.kind, DeviceKind::Gpu);
        assert!(there.device.to_lowercase().contains(&name.to_lowercase()), "{}", there.device);
        assert_eq!(right_of(FEW, &[("DEVICE", "cpu")]).kind, DeviceKind::Host);
        assert!(matches!(try_run(FEW, &[("DEVICE", "no such adapter")]), Err(Error::Device(_))));
    }

    #[test]
    fn frame_0_decodes_on_the_host_whatever_device_says() {
        let name = adapter();
        assert_eq!(right_of(FEW, &[("DEVICE", &name), ("FRAME", "0")]).kind, DeviceKind::Host);
        assert_eq!(right_of(FEW, &[("DEVICE", &name), ("FRAME", "1")]).kind, DeviceKind::Gpu);
    }

    #[test]
    fn prefill_host_seeds_the_device() {
        let (name, quarter) = (adapter(), quarter());
        // Row by row, so that the device's flights tell who prefilled.
        let on =
            |prefill| right_of(FEW, &[("DEVICE", &*name), ("BATCH", "0"), ("PREFILL", prefill), ("MTP_DEPTH", "2")]);
        let (host, device) = (on("host"), on("device"));
        assert_eq!((host.kind, device.kind), (DeviceKind::Gpu, DeviceKind::Gpu));
        assert_eq!(host.finished.stats.prompt_rows, PROMPT as usize);
        let spared = device.counters.flights.saturating_sub(host.counters.flights);
        assert!(spared >= u64::from(PROMPT) - 2, "{:?} and {:?}", host.counters, device.counters);
        // The draft layer's state came along.
        let drafts = |ran: &Ran| (ran.finished.stats.drafts.offered, ran.finished.stats.drafts.kept);
        assert!(drafts(&host).0 > 0 && drafts(&host) == drafts(&device), "{:?} {:?}", drafts(&host), drafts(&device));
        let partial = right_of(FEW, &[("DEVICE", &*name), ("PREFILL", "host"), ("EXPERT_GB", &*quarter)]);
        assert!(partial.finished.stats.bank.misses > 0);
        // A device that is lost behind its seed: the host goes on from the same one.
        let lost = right_of(FEW, &[("DEVICE", &*name), ("PREFILL", "host"), ("MTP", "0"), ("SKIP", "final")]);
        assert!(lost.finished.stats.recovered);
    }

    #[test]
    fn prefill_host_serves_prompts_in_pieces_sessions_that_leave_and_prompts_of_one_row() {
        wait(async {
            let set = [("DEVICE", &*adapter()), ("PREFILL", "host"), ("MTP", "0")];
            let runtime = Runtime::builder(model()).knobs(knobs(&set)).build().await.unwrap();
            let options = || Options { max_new_tokens: Some(2), eos: Some(Vec::new()), ..Options::default() };
            let id = |n: u32| TokenId(n);
            let mut sessions = Vec::new();
            for _ in 0..4 {
                sessions.push(runtime.session(options()).await.unwrap());
            }
            for part in 0..3 {
                for (n, session) in sessions.iter_mut().enumerate() {
                    let from = 10 * n as u32 + 5 * part;
                    session.feed_ids(&(from..from + 5).map(id).collect::<Vec<_>>()).await.unwrap();
                }
            }
            drop(sessions.pop());
            for (n, session) in sessions.into_iter().enumerate() {
                let first = 10 * n as u32 + 15;
                assert_eq!(session.decode().finish().await.unwrap().ids, [id(first), id(first + 1)]);
            }
            let mut session = runtime.session(options()).await.unwrap();
            session.feed_ids(&[id(7)]).await.unwrap();
            assert_eq!(session.decode().finish().await.unwrap().ids, [id(8), id(9)]);
            let empty = runtime.session(options()).await.unwrap().decode().finish().await;
            assert!(empty.unwrap_err().to_string().contains("nothing was fed"));
            assert_eq!(runtime.counters().await.unwrap().violations, 0);
            runtime.shutdown().await;
        });
    }

    #[test]
    fn act_is_the_same_on_an_adapter() {
        let name = adapter();
        assert_eq!(right_of(FEW, &[("DEVICE", &name), ("ACT", "f32")]).act, Activations::F32);
        assert_eq!(right_of(FEW, &[("DEVICE", &name), ("ACT", "int8")]).act, Activations::Int8);
    }

    #[test]
    fn staging_mb_cuts_the_upload() {
        let name = adapter();
        let batches = |mb: &str| right_of(FEW, &[("DEVICE", &name), ("STAGING_MB", mb)]).progress;
        let (small, large) = (batches("1"), batches("256"));
        assert!(small > large, "{small} batches of half a megabyte, {large} of 128");
    }

    #[test]
    fn skip_leaves_classes_out() {
        let name = adapter();
        let whole = right_of(FEW, &[("DEVICE", &name), ("MTP", "0")]);
        // What the head leaves out shows in the ids, or in that no logit is a number.
        match try_run(FEW, &[("DEVICE", &name), ("MTP", "0"), ("SKIP", "head")]) {
            Ok(less) => assert!(less.right() < whole.right(), "{} ids are right without a head", less.right()),
            Err(error) => assert!(error.to_string().contains("not finite"), "{error}"),
        }
    }

    /// Nothing would ever be accepted: the session goes on elsewhere and does not wait for ever.
    #[test]
    fn skip_final_stalls_the_device_and_not_the_session() {
        let run = try_run(FEW, &[("DEVICE", &adapter()), ("MTP", "0"), ("SKIP", "final")]);
        assert!(
            run.is_err() || run.is_ok_and(|run| run.finished.stats.recovered),
            "ids came from a device that accepts none"
        );
    }

    #[test]
    fn coop_0_turns_matrix_units_off() {
        let open = |coop| find(&DeviceChoice::Adapter(adapter())).unwrap().open(None, coop).unwrap().cooperative;
        assert!(!open(false));
        // Software has none; an adapter that has them uses them unless told not to.
        println!("{} has matrix units: {}", adapter(), open(true));
    }
}
