//! The loader: the model file, from opening it to the bytes of one expert.
//!
//! - **Owns** the file and its checks, the residency plan's order, and which experts' hashes it has compared already.
//! - **Takes** [`Message::Open`], [`Message::Warm`] from the runtime's builder; [`Fetch`] from the admission manager.
//! - **Gives** progress in bytes, the ready model, and a [`Fetched`] for every [`Fetch`], failed ones too.
//! - **May block on** the disk: page-in happens here, so that the submitter never waits for a page. It never waits
//!   for a channel.
//! - **Stops** on [`Message::Shutdown`] or when all its senders are gone.
//!
//! Never does: compute, or decide what to load; the plan says where experts lie, the admission manager who moves.

use std::collections::HashSet;
use std::fmt;
use std::hint::black_box;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use crossbeam_channel::{Receiver, Sender, bounded, select_biased};
use tokio::sync::oneshot;
use tracing::{Span, debug, debug_span, info_span, trace_span};

use super::alive::{Alive, Watch, alive};
use super::payload::{FETCHES_MAX, Fetch, Fetched};
use crate::device::Payload;
use crate::ids::{ExpertIx, LayerIx};
use crate::model::container::Tensor;
use crate::model::hash::hash64;
use crate::model::mmap::{Access, Changed};
use crate::model::tensors::Matrix;
use crate::model::weights::{Mixer, MlpWeights};
use crate::model::{self, Model, ModelError, OpenOptions};
use crate::plan::residency::Residency;

/// Room for an open, a warm-up and a shutdown: the builder sends each once.
const CONTROL_MAX: usize = 4;

/// Bytes paged in between two looks at the inbox: a few milliseconds of a slow disk.
const STRIDE: usize = 1 << 20;

/// Smallest page of the systems we run on: touching one byte of each is enough.
const PAGE: usize = 4096;

/// How far a load is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadProgress {
    /// Bytes that are there.
    pub done_bytes: u64,
    /// Bytes that will be.
    pub total_bytes: u64,
}

/// Who wants to know how far a load is. Called from the loader's thread.
pub type OnProgress = Box<dyn FnMut(LoadProgress) + Send>;

/// What the loader is asked by the runtime's builder.
pub enum Message {
    /// Open and check a model; it becomes the one whose experts are fetched.
    Open {
        /// The file.
        path: PathBuf,
        /// Mapped or read whole.
        access: Access,
        /// The span it happens in.
        span: Span,
        /// The model, or why it cannot be used.
        reply: oneshot::Sender<Result<Arc<Model>, ModelError>>,
    },
    /// Page in what a host device reads from the start: all but routed experts, and those that are resident.
    Warm {
        /// Who is resident.
        residency: Residency,
        /// Told after every stride.
        progress: OnProgress,
        /// Answered when all is there.
        reply: oneshot::Sender<()>,
    },
    /// Stop now.
    Shutdown,
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Open { path, access, .. } => write!(f, "Open({}, {access:?})", path.display()),
            Self::Warm { .. } => f.write_str("Warm"),
            Self::Shutdown => f.write_str("Shutdown"),
        }
    }
}

/// Why an expert's bytes cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// Nothing is open.
    #[error("no model is open")]
    NotOpen,
    /// The model has no such expert.
    #[error("there is no {expert:?} in {layer:?}")]
    NoExpert {
        /// The layer asked for.
        layer: LayerIx,
        /// The expert asked for.
        expert: ExpertIx,
    },
    /// The file changed under the mapping.
    #[error("{path}: {why}")]
    Changed {
        /// The file.
        path: String,
        /// How it changed.
        why: String,
    },
    /// The payload is not what the directory recorded.
    #[error("tensor {tensor} has hash {seen:016x}, the directory records {want:016x}")]
    Hash {
        /// The tensor.
        tensor: String,
        /// Of the bytes read.
        seen: u64,
        /// Recorded.
        want: u64,
    },
}

/// A sender to the loader. When the last one goes, the loader stops.
#[derive(Clone, Debug)]
pub struct Handle {
    control: Sender<Message>,
    fetches: Sender<Fetch>,
    watch: Watch,
}

impl Handle {
    /// Opens a model; `None` when the loader has ended.
    pub async fn open(&self, path: PathBuf, access: Access) -> Option<Result<Arc<Model>, ModelError>> {
        let (reply, answer) = oneshot::channel();
        let span = info_span!(target: "riparian::loader", "open", path = %path.display());
        // What is not sent drops its reply, which says the same as an end.
        let _ = self.control.try_send(Message::Open { path, access, span, reply });
        self.watch.or_gone(answer).await?.ok()
    }

    /// Pages in what a host device will read; `None` when the loader has ended. Dropping the future gives it up.
    pub async fn warm(&self, residency: Residency, progress: OnProgress) -> Option<()> {
        let (reply, answer) = oneshot::channel();
        let _ = self.control.try_send(Message::Warm { residency, progress, reply });
        self.watch.or_gone(answer).await?.ok()
    }

    /// Where [`Fetch`]es go. Bounded by [`FETCHES_MAX`], which is as many as may be under way.
    #[must_use]
    pub fn fetches(&self) -> Sender<Fetch> {
        self.fetches.clone()
    }

    /// Stops the loader.
    pub fn shutdown(&self) {
        // A loader that is gone needs no telling, and one with a full inbox holds one of these already.
        let _ = self.control.try_send(Message::Shutdown);
    }
}

/// Starts the loader on its own thread.
///
/// # Errors
///
/// When the system refuses the thread.
pub fn spawn() -> std::io::Result<(Handle, JoinHandle<()>)> {
    let (control, control_inbox) = bounded(CONTROL_MAX);
    let (fetches, fetch_inbox) = bounded(FETCHES_MAX);
    let (alive, watch) = alive();
    let loader = Loader { model: None, intact: HashSet::new(), warming: None, _alive: alive };
    let body = move || loader.run(&control_inbox, &fetch_inbox);
    let thread = thread::Builder::new().name("loader".into()).spawn(body)?;
    Ok((Handle { control, fetches, watch }, thread))
}

/// The actor.
struct Loader {
    /// Set by the first successful open.
    model: Option<Arc<Model>>,
    /// Experts whose payload agreed with its hash once: a file's bytes do not change while it stays intact.
    intact: HashSet<(LayerIx, ExpertIx)>,
    /// The page-in under way.
    warming: Option<Warming>,
    _alive: Alive,
}

/// A page-in, a stride at a time.
struct Warming {
    /// What is left, last first.
    left: Vec<Matrix>,
    /// Bytes of the last one that are there.
    offset: usize,
    seen: LoadProgress,
    progress: OnProgress,
    reply: oneshot::Sender<()>,
}

/// Whether the actor goes on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Next {
    Continue,
    Stop,
}

impl Loader {
    fn run(mut self, control: &Receiver<Message>, fetches: &Receiver<Fetch>) {
        loop {
            let next = if self.warming.is_some() {
                // Work of its own: look, but do not wait.
                select_biased! {
                    recv(control) -> message => message.map_or(Next::Stop, |message| self.handle(message)),
                    recv(fetches) -> fetch => { fetch.into_iter().for_each(|fetch| self.fetch(fetch)); Next::Continue }
                    default => { self.warm_on(); Next::Continue }
                }
            } else {
                select_biased! {
                    recv(control) -> message => message.map_or(Next::Stop, |message| self.handle(message)),
                    recv(fetches) -> fetch => match fetch {
                        Ok(fetch) => { self.fetch(fetch); Next::Continue }
                        // The handles hold both senders, so control is gone as well.
                        Err(_) => Next::Stop,
                    },
                }
            };
            if next == Next::Stop {
                return;
            }
        }
    }

    fn handle(&mut self, message: Message) -> Next {
        match message {
            Message::Open { path, access, span, reply } => {
                let opened = span.in_scope(|| model::open(&path, &OpenOptions { access }));
                self.model = opened.as_ref().ok().cloned();
                self.intact.clear();
                let _ = reply.send(opened);
            }
            Message::Warm { residency, progress, reply } => {
                let left = self.model.as_ref().map_or_else(Vec::new, |model| read_from_the_start(model, &residency));
                let total_bytes = left.iter().map(|matrix| matrix.payload().len() as u64).sum();
                let seen = LoadProgress { done_bytes: 0, total_bytes };
                self.warming = Some(Warming { left, offset: 0, seen, progress, reply });
            }
            Message::Shutdown => return Next::Stop,
        }
        Next::Continue
    }

    /// One stride of the page-in.
    fn warm_on(&mut self) {
        let Some(mut warming) = self.warming.take() else { return };
        let Some(matrix) = warming.left.last() else {
            (warming.progress)(warming.seen);
            let _ = warming.reply.send(());
            return;
        };
        if self.model.as_ref().is_some_and(|model| model.container.still_readable().is_err()) {
            // Nothing of it may be touched any more; the builder asks the file next, and says what happened.
            let _ = warming.reply.send(());
            return;
        }
        let payload = matrix.payload();
        let end = payload.len().min(warming.offset + STRIDE);
        let span = trace_span!(target: "riparian::loader", "page in", bytes = end - warming.offset);
        span.in_scope(|| touch(&payload[warming.offset..end]));
        warming.seen.done_bytes += (end - warming.offset) as u64;
        warming.offset = end;
        if end == payload.len() {
            warming.left.pop();
            warming.offset = 0;
        }
        // Nobody waits any more: the load was given up.
        if !warming.reply.is_closed() {
            (warming.progress)(warming.seen);
            self.warming = Some(warming);
        }
    }

    fn fetch(&mut self, Fetch { layer, expert, reply }: Fetch) {
        let _span = debug_span!(target: "riparian::loader", "fetch", layer = layer.0, expert = expert.0).entered();
        let payload = self.read(layer, expert).map_err(|error| error.to_string());
        if let Err(error) = &payload {
            debug!(error, "fetch failed");
        }
        // There is room by the channel's promise; whoever is gone needs no bytes.
        let _ = reply.try_send(Fetched { layer, expert, payload });
    }

    /// An expert's bytes, compared with their hashes the first time.
    fn read(&mut self, layer: LayerIx, expert: ExpertIx) -> Result<Arc<Payload>, FetchError> {
        let model = self.model.as_ref().ok_or(FetchError::NotOpen)?;
        let weights = expert_of(model, layer, expert).ok_or(FetchError::NoExpert { layer, expert })?;
        let changed = |(path, why): (PathBuf, Changed)| FetchError::Changed {
            path: path.display().to_string(),
            why: why.to_string(),
        };
        model.container.still_intact().map_err(changed)?;
        let matrices = [&weights.up, &weights.down];
        let mut bytes = Vec::with_capacity(matrices.iter().map(|matrix| matrix.payload().len()).sum());
        matrices.iter().for_each(|matrix| bytes.extend_from_slice(matrix.payload()));
        if !self.intact.contains(&(layer, expert)) {
            let mut rest = &bytes[..];
            for matrix in matrices {
                let (payload, behind) = rest.split_at(matrix.payload().len());
                rest = behind;
                compare(model, matrix.name(), payload)?;
            }
            self.intact.insert((layer, expert));
        }
        Ok(Arc::new(Payload::new(layer, expert, bytes)))
    }
}

/// Compares a payload with the hash its directory records.
fn compare(model: &Model, tensor: &str, payload: &[u8]) -> Result<(), FetchError> {
    // 0 says that none was recorded.
    let Some(want) = model.container.tensor(tensor).map(Tensor::hash).filter(|hash| *hash != 0) else {
        return Ok(());
    };
    let seen = hash64(payload);
    if seen == want { Ok(()) } else { Err(FetchError::Hash { tensor: tensor.into(), seen, want }) }
}

/// The weights of one expert; the draft layer's bank comes behind the decoder's.
fn expert_of(model: &Model, layer: LayerIx, expert: ExpertIx) -> Option<&MlpWeights> {
    let decoder = model.decoder.blocks.iter().filter_map(|block| match &block.mixer {
        Mixer::Moe(moe) => Some(moe),
        _ => None,
    });
    let draft = model.decoder.draft.iter().map(|draft| &draft.moe);
    decoder.chain(draft).nth(layer.index())?.experts.get(expert.index())
}

/// Matrices a host device reads from the start, in reverse of the file's order.
fn read_from_the_start(model: &Model, residency: &Residency) -> Vec<Matrix> {
    let mut wanted = Vec::new();
    let decoder = &model.decoder;
    wanted.push(decoder.embedding.clone());
    wanted.push(decoder.head.clone());
    for block in &decoder.blocks {
        match &block.mixer {
            Mixer::Mamba(mamba) => wanted.extend([mamba.in_proj.clone(), mamba.out_proj.clone()]),
            Mixer::Attention(attention) => {
                wanted.extend([&attention.q, &attention.k, &attention.v, &attention.o].map(Matrix::clone));
            }
            Mixer::Moe(moe) => {
                wanted.extend([moe.shared.up.clone(), moe.shared.down.clone()]);
                wanted.extend(moe.latent.iter().flatten().cloned());
            }
            Mixer::Mlp(mlp) => wanted.extend([mlp.up.clone(), mlp.down.clone()]),
        }
    }
    if let Some(draft) = &decoder.draft {
        let attention = &draft.attention;
        wanted.extend([&draft.eh_proj, &attention.q, &attention.k, &attention.v, &attention.o].map(Matrix::clone));
        wanted.extend([draft.moe.shared.up.clone(), draft.moe.shared.down.clone()]);
        wanted.extend(draft.moe.latent.iter().flatten().cloned());
    }
    for (layer, expert, _) in residency.upload_order() {
        if let Some(weights) = expert_of(model, layer, expert) {
            wanted.extend([weights.up.clone(), weights.down.clone()]);
        }
    }
    // A disk reads best in the order things lie on it.
    wanted.sort_by_key(|matrix| std::cmp::Reverse(matrix.payload().as_ptr().addr()));
    wanted
}

/// Reads one byte of each page.
fn touch(bytes: &[u8]) {
    let sum = bytes.iter().step_by(PAGE).fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
    black_box(sum.wrapping_add(bytes.last().copied().unwrap_or(0)));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use std::time::Duration;

    fn bundled() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tiny-transcribe.cmf")
    }

    /// Asks for an expert and waits for the answer.
    fn fetch(handle: &Handle, layer: u16, expert: u16) -> Fetched {
        let (reply, answer) = bounded(1);
        handle.fetches().send(Fetch { layer: LayerIx(layer), expert: ExpertIx(expert), reply }).unwrap();
        answer.recv_timeout(Duration::from_secs(10)).expect("every fetch is answered")
    }

    #[tokio::test]
    async fn an_experts_bytes_are_those_of_its_matrices() {
        let (handle, thread) = spawn().unwrap();
        assert!(fetch(&handle, 0, 0).payload.unwrap_err().contains("no model"));
        let model = handle.open(bundled(), Access::Mapped).await.unwrap().unwrap();
        // The last layer is the draft layer's.
        for layer in 0..model.geometry.layers() as u16 {
            let payload = fetch(&handle, layer, 3).payload.unwrap();
            let expert = expert_of(&model, LayerIx(layer), ExpertIx(3)).unwrap();
            assert_eq!(payload.bytes, [expert.up.payload(), expert.down.payload()].concat());
            assert!(payload.is_intact());
        }
        for (layer, expert) in [(0, 32), (model.geometry.layers() as u16, 0)] {
            assert!(fetch(&handle, layer, expert).payload.unwrap_err().contains("there is no"));
        }
        handle.shutdown();
        thread.join().unwrap();
        assert!(handle.open(bundled(), Access::Mapped).await.is_none(), "nobody answers, nobody waits");
    }

    #[tokio::test]
    async fn bytes_that_changed_are_named_and_not_given() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("changed.cmf");
        let mut bytes = std::fs::read(bundled()).unwrap();
        // Where an expert's matrix lies, found by its content.
        let sound = model::open(&bundled(), &OpenOptions::default()).unwrap();
        let up = &expert_of(&sound, LayerIx(1), ExpertIx(5)).unwrap().up;
        let at = bytes.windows(up.payload().len()).position(|window| window == up.payload()).unwrap();
        bytes[at + 100] ^= 4;
        std::fs::write(&path, &bytes).unwrap();

        let (handle, _thread) = spawn().unwrap();
        handle.open(path.clone(), Access::Mapped).await.unwrap().expect("payloads are not looked at on opening");
        let error = fetch(&handle, 1, 5).payload.unwrap_err();
        assert!(error.contains(up.name()) && error.contains("hash"), "{error}");
        assert!(fetch(&handle, 1, 6).payload.is_ok(), "the others are as they were");

        let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.set_len(bytes.len() as u64 - 1).unwrap();
        let error = fetch(&handle, 1, 7).payload.unwrap_err();
        assert!(error.contains("changed.cmf") && error.contains("bytes"), "{error}");
    }

    #[tokio::test]
    async fn a_file_that_is_cut_is_not_paged_in_any_further() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cut.cmf");
        std::fs::copy(bundled(), &path).unwrap();
        let (handle, _thread) = spawn().unwrap();
        let model = handle.open(path.clone(), Access::Mapped).await.unwrap().unwrap();
        // Cut by its own reader, between two strides.
        let mut strides = 0;
        let progress: OnProgress = Box::new(move |_| {
            strides += 1;
            if strides == 2 {
                std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(4096).unwrap();
            }
            assert!(strides < 3, "it goes on in a file that was cut");
        });
        handle.warm(Residency::default(), progress).await.expect("an answer");
        assert!(model.still_intact().is_err_and(|error| error.to_string().contains("4096 bytes")));
    }

    #[tokio::test]
    async fn a_panic_is_told_to_whoever_waits() {
        let (handle, thread) = spawn().unwrap();
        handle.open(bundled(), Access::Mapped).await.unwrap().unwrap();
        let warmed = handle.warm(Residency::default(), Box::new(|_| panic!("a test kills the loader"))).await;
        assert!(warmed.is_none() && handle.open(bundled(), Access::Mapped).await.is_none());
        assert!(thread.join().is_err());
    }

    #[tokio::test]
    async fn warming_tells_every_byte_and_can_be_given_up() {
        let (handle, _thread) = spawn().unwrap();
        let model = handle.open(bundled(), Access::Memory).await.unwrap().unwrap();
        let (told, seen) = bounded(1 << 16);
        let progress: OnProgress = Box::new(move |progress| told.send(progress).unwrap());
        handle.warm(Residency::default(), progress).await.unwrap();
        let seen: Vec<LoadProgress> = seen.iter().collect();
        let fixed: usize = read_from_the_start(&model, &Residency::default()).iter().map(|m| m.payload().len()).sum();
        assert_eq!(seen.last().unwrap(), &LoadProgress { done_bytes: fixed as u64, total_bytes: fixed as u64 });
        assert!(seen.is_sorted_by_key(|progress| progress.done_bytes));

        // Given up half-way: it stops, and what comes next is served.
        let (told, seen) = bounded(1 << 16);
        let slow: OnProgress = Box::new(move |progress| {
            thread::sleep(Duration::from_millis(20));
            told.send(progress).unwrap();
        });
        let given_up = handle.warm(Residency::default(), slow);
        assert!(tokio::time::timeout(Duration::from_millis(50), given_up).await.is_err());
        assert!(fetch(&handle, 0, 0).payload.is_ok());
        let last = seen.iter().last().expect("it had begun");
        assert!(last.done_bytes < last.total_bytes, "{last:?}");
    }
}
