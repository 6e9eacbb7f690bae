//! From a path and knobs to a runtime: open, choose a device, load, start the actors.

use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tracing::{field, info, info_span, warn};

use super::{Error, Hearing, LoadProgress, Runtime, Shared, Threads};
use crate::actors::clock::Clock;
use crate::actors::payload::SessionError;
use crate::actors::submitter::Fallback;
use crate::actors::{Graph, GraphOptions, Setup, encoder, loader};
use crate::audio::perception::Perception;
use crate::device::host::{HostCompanion, HostDevice, HostOptions};
use crate::device::{Companion, Device, DeviceError};
use crate::host::{Decoder, DraftConventions, Pool, default_threads};
use crate::knobs::{DeviceChoice, Knobs};
use crate::model::Model;
use crate::model::mmap::Access;
use crate::model::weights::{Mixer, MoeWeights};
use crate::plan::residency::{Bank, LayerFacts, Residency};
use crate::text::prompt::Prompter;
use crate::text::tokenizer::Tokenizer;

/// What tests ask to go wrong on an adapter.
#[cfg(feature = "gpu")]
use crate::device::wgpu::faults::Faults;
#[cfg(not(feature = "gpu"))]
type Faults = ();

/// Builds a [`Runtime`]; see [`Runtime::builder`].
#[must_use]
pub struct Builder {
    path: PathBuf,
    knobs: Knobs,
    on_progress: loader::OnProgress,
    faults: Faults,
}

impl Builder {
    pub(super) fn new(path: PathBuf) -> Self {
        Self { path, knobs: Knobs::default(), on_progress: Box::new(|_| {}), faults: Faults::default() }
    }

    /// What goes wrong on an adapter; for tests.
    #[cfg(feature = "gpu")]
    #[doc(hidden)]
    pub fn faults(mut self, faults: Faults) -> Self {
        self.faults = faults;
        self
    }

    /// The knobs; their defaults otherwise, whatever the environment says.
    pub fn knobs(mut self, knobs: Knobs) -> Self {
        self.knobs = knobs;
        self
    }

    /// Who wants to know how far the load is. Called from threads of the runtime.
    pub fn on_progress(mut self, progress: impl FnMut(LoadProgress) + Send + 'static) -> Self {
        self.on_progress = Box::new(progress);
        self
    }

    /// Opens the model, loads what the device needs and starts the actors.
    ///
    /// # Errors
    ///
    /// A model that is refused, a device that was named and cannot be had, or
    /// a system that refuses threads. Without a named device, an adapter that
    /// does not fit leads to the host, and a log line says why.
    pub async fn build(self) -> Result<Runtime, Error> {
        let Self { path, knobs, on_progress, faults } = self;
        // Never entered: open from here until the runtime stands.
        let load = info_span!(target: "riparian::load", "load", path = %path.display(), device = field::Empty);
        shared_pool()?;
        let (loader, loader_thread) = loader::spawn().map_err(|e| Error::thread("loader", &e))?;
        // From here on everything started is stopped again if something fails.
        let mut threads = Threads { running: None, loader: loader.clone(), encoder: None, rest: vec![loader_thread] };
        let access = if knobs.mmap { Access::Mapped } else { Access::Memory };
        let model = loader.open(path, access).await.ok_or(GONE)??;

        let (opened, options) = (Arc::clone(&model), knobs.clone());
        let parts = offload("start", move || Parts::make(&opened, &options, &faults, on_progress)).await??;
        let Parts { device, companion, fallback, warm, prompter, perception, aligner } = parts;
        if let Some((residency, on_progress)) = warm {
            loader.warm(residency, on_progress).await.ok_or(GONE)?;
        }

        // A file that changed under the load may have given anything.
        model.still_intact()?;
        let facts = device.facts().clone();
        load.record("device", &*facts.name);
        info!(device = facts.name, positions = facts.kv_positions, full = facts.is_full(), "ready");
        let graph = Graph::assemble(Setup {
            device,
            companion: Arc::clone(&companion),
            fallback,
            fetches: Some(loader.fetches()),
            drafter: None,
            options: GraphOptions::from(&knobs),
            clock: Clock::machine(),
        });
        let running = graph.start().map_err(|e| Error::thread("graph", &e))?;
        let sessions = running.handle().clone();
        threads.running = Some(running);
        let hearing = match perception {
            None => None,
            Some(perception) => {
                let started = encoder::spawn(Arc::clone(&perception), threads_of(&knobs));
                let (encoder, thread) = started.map_err(|e| Error::thread("audio encoder", &e))?;
                threads.encoder = Some(encoder.clone());
                threads.rest.push(thread);
                Some(Hearing { perception, encoder, aligner })
            }
        };
        let threads = Mutex::new(Some(threads));
        let draft_depth = knobs.mtp_depth.map(|depth| depth as usize);
        let shared = Shared { model, facts, sessions, companion, draft_depth, prompter, hearing, threads };
        Ok(Runtime { shared: Arc::new(shared) })
    }
}

const GONE: SessionError = SessionError::Gone { actor: "loader" };

/// Starts rayon's own pool, which it would start by itself, but with a panic where the system refuses a thread.
fn shared_pool() -> Result<(), Error> {
    match rayon::ThreadPoolBuilder::new().build_global() {
        // The other reason is that it runs already.
        Err(error) if format!("{error:?}").contains("IOError") => {
            Err(Error::thread("shared pool", &std::io::Error::other(error)))
        }
        _ => Ok(()),
    }
}

fn threads_of(knobs: &Knobs) -> usize {
    knobs.threads.map_or_else(default_threads, |threads| threads as usize)
}

/// Runs `work` on a thread of its own: opening devices and converting towers takes too long for an executor.
async fn offload<T: Send + 'static>(name: &'static str, work: impl FnOnce() -> T + Send + 'static) -> Result<T, Error> {
    let (reply, answer) = oneshot::channel();
    let body = move || drop(reply.send(work()));
    std::thread::Builder::new().name(name.into()).spawn(body).map_err(|e| Error::thread(name, &e))?;
    answer.await.map_err(|_| SessionError::Gone { actor: name }.into())
}

/// What a runtime is put together from, once the model is open.
struct Parts {
    device: Box<dyn Device>,
    companion: Arc<dyn Companion>,
    fallback: Option<Fallback>,
    /// What to page in, and who wants to know how far that is, where the host decodes.
    warm: Option<(Residency, loader::OnProgress)>,
    prompter: Option<Prompter>,
    perception: Option<Arc<Perception>>,
    aligner: Option<Tokenizer>,
}

impl Parts {
    fn make(
        model: &Arc<Model>,
        knobs: &Knobs,
        faults: &Faults,
        mut on_progress: loader::OnProgress,
    ) -> Result<Self, Error> {
        let tokenizer = model.tokenizer().map(Tokenizer::from_bytes).transpose()?;
        let prompter = tokenizer.map(|tokenizer| Prompter::new(tokenizer, &model.provenance));
        let aligner = model.alignment_tokenizer().map(|text| Tokenizer::from_bytes(text.as_bytes())).transpose()?;
        let perception = Perception::open(model)?.map(Arc::new);
        let (host, residency) = (Host::new(model, knobs)?, residency(model, asked_bytes(knobs), expert_bytes));
        let mut companion = host.companion();
        let (device, fallback, warm) = match gpu(model, knobs, faults, &mut on_progress)? {
            Some(gpu) => {
                if !gpu.facts().is_full() && knobs.threads.is_none() {
                    companion = Host::beside_device(model, knobs)?.companion();
                }
                (gpu, Some(host.fallback()), None)
            }
            None => {
                warn_of_unheeded(knobs);
                (host.open(&residency)?, None, Some((residency, on_progress)))
            }
        };
        Ok(Self { device, companion, fallback, warm, prompter, perception, aligner })
    }
}

/// The host, as the device or beside one.
struct Host {
    decoder: Arc<Decoder>,
    options: HostOptions,
}

impl Host {
    fn new(model: &Arc<Model>, knobs: &Knobs) -> Result<Self, Error> {
        let pool = Pool::try_new(threads_of(knobs)).map_err(|e| Error::thread("host pool", &e))?;
        Ok(Self::with_pool(model, knobs, pool))
    }

    /// Beside a device with a partial bank: it has an expert to make every few hundred microseconds, and the actors and
    /// the driver need cores too.
    fn beside_device(model: &Arc<Model>, knobs: &Knobs) -> Result<Self, Error> {
        let pool = Pool::beside_device(threads_of(knobs)).map_err(|e| Error::thread("host pool", &e))?;
        Ok(Self::with_pool(model, knobs, pool))
    }

    fn with_pool(model: &Arc<Model>, knobs: &Knobs, pool: Pool) -> Self {
        let decoder = Decoder::new(Arc::clone(model), knobs.act, pool);
        let decoder = Arc::new(decoder.with_draft_conventions(conventions(knobs)));
        let defaults = HostOptions::for_decoder(&decoder);
        let options = HostOptions {
            kv_positions: knobs.ctx.map_or(defaults.kv_positions, |ctx| ctx as usize),
            drafts: defaults.drafts && knobs.mtp,
            ..defaults
        };
        Self { decoder, options }
    }

    /// The device, its banks as full as the plan says.
    fn open(&self, residency: &Residency) -> Result<Box<dyn Device>, DeviceError> {
        let places = |bank: &Bank| bank.residents.iter().copied().map(Some).collect();
        let residents = residency.banks.iter().map(places).collect();
        let options = HostOptions { residents, ..self.options.clone() };
        Ok(Box::new(HostDevice::new(Arc::clone(&self.decoder), options)?))
    }

    fn companion(&self) -> Arc<dyn Companion> {
        Arc::new(HostCompanion::new(Arc::clone(&self.decoder)))
    }

    /// The host with all experts, for sessions whose device was lost.
    fn fallback(&self) -> Fallback {
        let (decoder, options) = (Arc::clone(&self.decoder), self.options.clone());
        Box::new(move || Ok(Box::new(HostDevice::new(decoder, options)?)))
    }
}

/// Who is resident in the banks of the decoder, a place of a layer taking `bytes`. The draft layer's bank is always full.
fn residency(model: &Model, budget_bytes: Option<u64>, bytes: impl Fn(&MoeWeights) -> u64) -> Residency {
    let decoder = model.decoder.blocks.iter().filter_map(|block| match &block.mixer {
        Mixer::Moe(moe) => Some(&**moe),
        _ => None,
    });
    let layers: Vec<LayerFacts<'_>> = (decoder.enumerate())
        .map(|(layer, moe)| LayerFacts {
            experts: moe.experts.len(),
            top_k: model.geometry.moe.map_or(0, |moe| moe.top_k),
            expert_bytes: bytes(moe),
            hot: model.expert_hot.get(layer).map_or(&[], Vec::as_slice),
        })
        .collect();
    Residency::new(&layers, budget_bytes)
}

/// How drafts are made, where sources differ.
fn conventions(knobs: &Knobs) -> DraftConventions {
    DraftConventions { pre_norm: knobs.mtp_pre, layer_norm: knobs.mtp_ln, hidden_first: knobs.mtp_hfirst }
}

/// Bytes of the draft layer's bank, all its experts, where an adapter is to make drafts: where the budget holds it beside
/// all the decoder's. What it takes from a partial bank is missed by every token, and prefill misses it too: measured, a
/// budget of 12 of 17 GB decodes no faster with drafts and prefills a quarter slower.
#[cfg(feature = "gpu")]
fn draft_bank_bytes(
    model: &Model,
    knobs: &Knobs,
    budget_bytes: Option<u64>,
    bytes: impl Fn(&MoeWeights) -> u64,
) -> Option<u64> {
    let draft = model.decoder.draft.as_deref().filter(|_| knobs.mtp)?;
    let own = bytes(&draft.moe) * draft.moe.experts.len() as u64;
    let decoders = residency(model, None, bytes).bytes();
    budget_bytes.is_none_or(|budget| budget >= own + decoders).then_some(own)
}

/// `CMF_NEMO_EXPERT_GB` in bytes.
fn asked_bytes(knobs: &Knobs) -> Option<u64> {
    knobs.expert_gb.map(|gb| (gb * 1e9).round() as u64)
}

/// Bytes of the largest expert of a layer.
fn expert_bytes(moe: &MoeWeights) -> u64 {
    let bytes = moe.experts.iter().map(|expert| expert.up.payload().len() + expert.down.payload().len());
    bytes.max().unwrap_or(0) as u64
}

/// Knobs that only a GPU heeds and that would silently do nothing on the host.
fn warn_of_unheeded(knobs: &Knobs) {
    let timestamps = ("CMF_NEMO_TS", knobs.ts);
    let row_blocks = ("CMF_NEMO_BANK_REP", knobs.bank_rep.is_some());
    let skip = ("CMF_NEMO_SKIP", !knobs.skip.is_empty());
    let submission = ("CMF_NEMO_SUBMIT_MS", knobs.submit_ms != Knobs::default().submit_ms);
    let unheeded = [timestamps, row_blocks, skip, submission];
    for (name, _) in unheeded.into_iter().filter(|(_, given)| *given) {
        warn!(name, "this knob has no effect on the host");
    }
}

/// The adapter the knobs ask for, loaded; `None` where the host is to decode.
///
/// An adapter that was named has to do; the best one there is may be refused, which is logged.
#[cfg(feature = "gpu")]
fn gpu(
    model: &Arc<Model>,
    knobs: &Knobs,
    faults: &Faults,
    on_progress: &mut loader::OnProgress,
) -> Result<Option<Box<dyn Device>>, DeviceError> {
    if !knobs.frame || knobs.device == DeviceChoice::Cpu {
        return Ok(None);
    }
    match open_gpu(model, knobs, faults, on_progress) {
        Ok(device) => Ok(Some(device)),
        Err(why) if knobs.device == DeviceChoice::Auto => {
            info!(%why, "the host decodes");
            Ok(None)
        }
        Err(why) => Err(why),
    }
}

/// Sessions on an adapter at a time.
#[cfg(feature = "gpu")]
const GPU_SLOTS: usize = 2;

/// Rows of a prefill pass on an adapter: of one that cannot miss, as all experts are resident or stream through, and of
/// one that stops at the layers that miss and keeps its scratch for each slot. The device takes fewer where a binding
/// cannot hold them.
#[cfg(feature = "gpu")]
const GPU_PASS_ROWS: [usize; 2] = [2048, 512];

/// Bytes of a place: an expert takes a little more than in the file. What an adapter cannot lay out, opening refuses with
/// its reason.
#[cfg(feature = "gpu")]
fn place_bytes(moe: &MoeWeights) -> u64 {
    crate::device::wgpu::weights::place_of(moe).map_or_else(|_| expert_bytes(moe), |place| place.bytes)
}

/// The first adapter that takes the model; the error of the first one where none does.
#[cfg(feature = "gpu")]
fn open_gpu(
    model: &Arc<Model>,
    knobs: &Knobs,
    faults: &Faults,
    on_progress: &mut loader::OnProgress,
) -> Result<Box<dyn Device>, DeviceError> {
    let candidates = crate::device::wgpu::candidates(&knobs.device, faults.takes_software())?;
    first_that_opens(candidates, |found| open_fitting(found, model, knobs, faults, on_progress))
}

/// Opens one candidate after the other until one opens.
#[cfg(feature = "gpu")]
fn first_that_opens<C, T>(
    candidates: Vec<C>,
    mut open: impl FnMut(&C) -> Result<T, DeviceError>,
) -> Result<T, DeviceError> {
    let mut first = None;
    for candidate in candidates {
        match open(&candidate) {
            Ok(opened) => return Ok(opened),
            Err(error) => {
                // whoever has an adapter expects it to be used
                warn!(%error, "an adapter was refused");
                first.get_or_insert(error);
            }
        }
    }
    Err(first.expect("there is a candidate"))
}

/// Opens an adapter with all that was planned; where it has no room for that, with a single session, and then with ever
/// fewer experts.
#[cfg(feature = "gpu")]
fn open_fitting(
    found: &crate::device::wgpu::Found,
    model: &Arc<Model>,
    knobs: &Knobs,
    faults: &Faults,
    on_progress: &mut loader::OnProgress,
) -> Result<Box<dyn Device>, DeviceError> {
    let (mut slots, mut knobs) = (GPU_SLOTS, knobs.clone());
    loop {
        let (error, residency) = match open_on(found, model, &knobs, slots, faults, on_progress) {
            Ok(device) => return Ok(device),
            Err((error @ DeviceError::OutOfMemory { .. }, Some(residency))) => (error, residency),
            Err((error, _)) => return Err(error),
        };
        if slots > 1 {
            slots = 1;
        } else {
            // A quarter less, and at least a place of each layer.
            let round: u64 = residency.banks.iter().map(|bank| bank.place_bytes).sum();
            let less = residency.bytes() - round.max(residency.bytes() / 4).min(residency.bytes());
            knobs.expert_gb = Some(less as f64 / 1e9);
            let fewer = self::residency(model, asked_bytes(&knobs), place_bytes);
            if fewer.places() >= residency.places() {
                return Err(error);
            }
        }
        warn!(%error, slots, expert_gb = knobs.expert_gb, "the adapter has no room: again with less");
    }
}

/// Opens an adapter; beside an error stands what was to be resident, if it came so far.
#[cfg(feature = "gpu")]
fn open_on(
    found: &crate::device::wgpu::Found,
    model: &Arc<Model>,
    knobs: &Knobs,
    slots: usize,
    faults: &Faults,
    on_progress: &mut loader::OnProgress,
) -> Result<Box<dyn Device>, (DeviceError, Option<Residency>)> {
    use crate::device::wgpu::stream::Streaming;
    use crate::device::wgpu::{DraftSetup, Gpu, Setup, memory, selftest};
    let found_name = found.info().name;
    let mut context = found.open_with(None, knobs.coop, faults.clone()).map_err(|error| (error, None))?;
    context.cache_folder = crate::knobs::cache_folder();
    context.stamps = knobs.ts;
    context.submission_most = std::time::Duration::from_millis(u64::from(knobs.submit_ms));
    context.bank_rep = knobs.bank_rep.map_or(1, |rep| rep as usize);
    if knobs.ts && !context.timestamps {
        warn!(device = found_name, "the adapter has no timestamps: CMF_NEMO_TS has no effect");
    }
    let asked = memory::Asked { expert_bytes: asked_bytes(knobs), positions: knobs.ctx.map(|ctx| ctx as usize) };
    let staging_bytes = u64::from(knobs.staging_mb) * 1_000_000;
    let (geometry, decoder) = (&model.geometry, &model.decoder);
    let fixed = memory::Fixed::new(geometry, decoder, slots, GPU_PASS_ROWS[0], staging_bytes, knobs.mtp);
    let draft_bytes = draft_bank_bytes(model, knobs, None, place_bytes).unwrap_or(0);
    let all_bytes = residency(model, None, place_bytes).bytes() + draft_bytes;
    let budget = memory::budget(&context, &fixed, asked, all_bytes, geometry.max_positions);
    let draft_bytes = draft_bank_bytes(model, knobs, budget.expert_bytes, place_bytes);
    let decoders = budget.expert_bytes.map(|budget| budget - draft_bytes.unwrap_or(0));
    let planned = residency(model, decoders, place_bytes);
    let bank_bytes = context.limits.max_buffer_size.min(context.limits.max_storage_buffer_binding_size);
    let residency = planned.clone().capped(bank_bytes);
    if residency != planned {
        let (places, planned) = (residency.places(), planned.places());
        warn!(
            bank_bytes,
            places, planned, "a layer's experts are more than one buffer of the adapter holds: fewer of them"
        );
    }
    let experts: usize = residency.banks.iter().map(|bank| bank.experts).sum();
    let setup = Setup {
        activations: knobs.act,
        positions: budget.positions,
        slots,
        pass_rows: GPU_PASS_ROWS[usize::from(residency.places() < experts)],
        window_bytes: staging_bytes,
        keep_logits: false,
        skip: knobs.skip.clone(),
        drafts: draft_bytes.map(|_| DraftSetup { conventions: conventions(knobs), given: None }),
    };
    // a software rasteriser runs only where it is named, and would take longer for this than for the model
    if !context.is_software() {
        let kinds = selftest::Kinds::of(&model.geometry, &model.decoder);
        let full = residency.places() == experts;
        let wanted = selftest::Wanted { activations: knobs.act, full, skip: &[] };
        selftest::run(&mut context, &kinds, &wanted).map_err(|error| (error, None))?;
    }
    let file = model.clone();
    let largest = residency.banks.iter().map(|bank| bank.place_bytes).max().unwrap_or(0);
    context.streaming = Some(Streaming {
        readable: Some(Arc::new(move || {
            let changed = file.container.still_readable();
            changed.map_err(|(path, changed)| format!("{}: {changed}", path.display()))
        })),
        ..Streaming::new(GPU_PASS_ROWS[0], largest, staging_bytes)
    });
    info!(
        device = found_name,
        experts_on_device = residency.places(),
        experts,
        gigabytes = residency.bytes() as f64 / 1e9,
        budget = budget.why,
        "the device decodes; the host completes what its banks lack"
    );
    let residents: Vec<_> = residency.banks.iter().map(|bank| bank.residents.clone()).collect();
    let mut progress = |done_bytes, total_bytes| on_progress(LoadProgress { done_bytes, total_bytes });
    match Gpu::open_partial(context, geometry, decoder, &setup, Some(&residents), &mut progress) {
        Ok(gpu) => Ok(Box::new(gpu)),
        Err(error) => Err((error, Some(residency))),
    }
}

/// Without the `gpu` feature there is the host alone.
#[cfg(not(feature = "gpu"))]
fn gpu(
    _model: &Arc<Model>,
    knobs: &Knobs,
    _faults: &Faults,
    _on_progress: &mut loader::OnProgress,
) -> Result<Option<Box<dyn Device>>, DeviceError> {
    match &knobs.device {
        DeviceChoice::Adapter(name) if knobs.frame => {
            Err(DeviceError::Unfit { why: format!("no adapter {name:?}: built without the gpu feature") })
        }
        _ => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::knobs::Origin;

    #[test]
    fn draft_conventions_reach_the_decoder() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/tiny-transcribe.cmf");
        let model = crate::model::open(path.as_ref(), &crate::model::OpenOptions::default()).unwrap();
        let with = |name: &str| {
            let mut knobs = Knobs::default();
            knobs.set(name, "1", Origin::Code).unwrap();
            Host::new(&model, &knobs).unwrap().decoder.draft_conventions()
        };
        let none = DraftConventions::default();
        assert_eq!(with("CMF_NEMO_MTP_PRE"), DraftConventions { pre_norm: true, ..none });
        assert_eq!(with("CMF_NEMO_MTP_LN"), DraftConventions { layer_norm: true, ..none });
        assert_eq!(with("CMF_NEMO_MTP_HFIRST"), DraftConventions { hidden_first: true, ..none });
    }

    #[cfg(feature = "gpu")]
    #[test]
    fn an_adapter_that_refuses_is_followed_by_the_next() {
        let refuse = |name: &str| DeviceError::Unfit { why: format!("{name} refused a device") };
        let backends = vec!["vulkan", "dx12", "metal"];
        let mut asked = Vec::new();
        let opened = first_that_opens(backends.clone(), |name| {
            asked.push(*name);
            if *name == "dx12" { Ok(*name) } else { Err(refuse(name)) }
        });
        assert_eq!((opened, asked), (Ok("dx12"), vec!["vulkan", "dx12"]));
        let none = first_that_opens(backends, |name| Err::<(), _>(refuse(name)));
        assert_eq!(none, Err(refuse("vulkan")), "the best one's reason is told");
    }
}
