//! Wide passes over a partial bank: experts without a place stream through a few, and nothing misses.
//!
//! A pass of many rows wants nearly all experts of each layer, so what the bank
//! lacks is brought without asking: threads lay the missing experts out in a
//! ring of buffers that the device copies from, in the order of the layers and
//! ahead of them, and the queue copies a run of them into the streaming places,
//! sorts the picks that want them and computes them, run after run, before the
//! layer's sum. There is no stop, no completion and no readback in such a pass.
//!
//! The ring has to be waited for, which the submitter must not. So the [`Line`]
//! stands between both: what holds such a pass, and what is appended behind it,
//! goes to a thread of its own; everything else goes straight to the queue.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, unbounded};
use parking_lot::{Condvar, Mutex};
use tracing::{debug_span, trace_span};

use super::super::params::NONE;
use super::adapter::Context;
use super::core::Ready;
use super::landing::Shared;
use super::layout::{codes, field, rows_padded, side};
use super::partial::{Form, Held};
use super::prefill::{EXPERT_DISPATCHES, chunks_of};
use super::queue::GpuQueue;
use super::stamps::stamp;
use super::weights::PlaceLaid;
use crate::device::times::WorkKind;
use crate::device::{DeviceError, Item, Pass, Queue, Run, Staging, Wait, panic_text};
use crate::ids::{ExpertIx, LayerIx, SlotIx};
use crate::model::weights::{DecoderWeights, Mixer, MlpWeights};
use crate::plan::record::Name;

/// Whether the model's file is as it was, before it is read again.
type Readable = Arc<dyn Fn() -> Result<(), String> + Send + Sync>;

/// How wide passes over a partial bank are run.
#[derive(Clone)]
pub struct Streaming {
    /// Rows of a pass at most.
    pub rows: usize,
    /// Rows from which a pass brings all experts that the bank lacks; shorter ones halt where they miss.
    pub from: usize,
    /// Experts that are computed at once, 1 to [`super::prefill::STREAM_PLACES_MAX`].
    pub places: usize,
    /// Buffers of the ring, at least as many.
    pub ring: usize,
    /// Threads that fill it.
    pub threads: usize,
    /// Asked before each layer's experts are read.
    pub readable: Option<Readable>,
}

impl Streaming {
    /// Passes of up to `rows` rows, over places of `place_bytes`, within a staging window.
    #[must_use]
    pub fn new(rows: usize, place_bytes: u64, window_bytes: u64) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let ring = (window_bytes / 2 / place_bytes.max(1)).min(3 * PLACES as u64) as usize;
        Self {
            rows,
            from: ROWS_MIN,
            places: PLACES.min(ring.max(1)),
            ring,
            threads: (cores / 2).clamp(1, 8),
            readable: None,
        }
    }
}

impl fmt::Debug for Streaming {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rows, from, places, ring, threads, .. } = self;
        write!(f, "passes of {from} to {rows} rows, {places} places, a ring of {ring}, {threads} threads")
    }
}

/// Rows from which bringing all that is lacking is faster than halting at each layer.
const ROWS_MIN: usize = 256;

/// Experts that are computed at once. One run is on its way to the device while another is filled and a third computed.
const PLACES: usize = 8;

/// A thread waits so long before it looks whether the pass is over.
const PATIENCE: Duration = Duration::from_millis(5);

/// Experts that have not come after so long never will.
const DEADLINE: Duration = Duration::from_secs(30);

/// What a device needs for it.
#[derive(Debug)]
pub struct Streamed {
    /// The pass, but for experts that stream.
    pub pass: Ready,
    /// Those, as `record_stream` has them.
    pub experts: Ready,
    /// Rows of such a pass, first and last.
    pub rows: [usize; 2],
    options: Streaming,
    /// The streaming places.
    bank: wgpu::Buffer,
    map: wgpu::Buffer,
    given: wgpu::Buffer,
    source: Arc<Source>,
    ring: Arc<Ring>,
}

/// Bind groups over a slot.
#[derive(Debug)]
pub struct StreamedBound {
    /// For [`Streamed::pass`].
    pub pass: Vec<wgpu::BindGroup>,
    /// For [`Streamed::experts`].
    pub experts: Vec<wgpu::BindGroup>,
    /// For the draft layer's rows of such a pass.
    pub rounds: Vec<wgpu::BindGroup>,
}

/// Every expert of every layer as the file holds it, and how it lies in a place.
#[derive(Debug)]
struct Source {
    layers: Vec<(PlaceLaid, Vec<MlpWeights>)>,
}

/// Buffers that are mapped and free. Made as they are first needed, kept until the device goes.
#[derive(Debug)]
struct Ring {
    free: Receiver<wgpu::Buffer>,
    give: Sender<wgpu::Buffer>,
    made: AtomicUsize,
    /// As many are made; fewer where memory ran out.
    most: AtomicUsize,
    /// So many have to be there.
    least: usize,
    bytes: u64,
}

impl Streamed {
    /// For banks of `places`, with the buffers `wide` that the plans are bound to.
    #[must_use]
    pub fn new(
        options: Streaming,
        decoder: &DecoderWeights,
        places: &[PlaceLaid],
        wide: &std::collections::HashMap<Name, wgpu::Buffer>,
        [pass, experts]: [Ready; 2],
    ) -> Self {
        let moes = decoder.blocks.iter().filter_map(|block| match &block.mixer {
            Mixer::Moe(moe) => Some(moe),
            _ => None,
        });
        let copy = |expert: &MlpWeights| MlpWeights { up: expert.up.clone(), down: expert.down.clone() };
        let layers = places.iter().zip(moes).map(|(place, moe)| (*place, moe.experts.iter().map(copy).collect()));
        let (give, free) = unbounded();
        let bytes = places.iter().map(|place| place.bytes).max().unwrap_or(0);
        Self {
            pass,
            experts,
            rows: [options.from, options.rows],
            bank: wide[&Name::Stream].clone(),
            map: wide[&Name::StreamMap].clone(),
            given: wide[&Name::Given].clone(),
            source: Arc::new(Source { layers: layers.collect() }),
            ring: Arc::new(Ring {
                free,
                give,
                made: AtomicUsize::new(0),
                most: AtomicUsize::new(options.ring),
                least: options.places,
                bytes,
            }),
            options,
        }
    }

    /// Whether a run goes this way: a whole pass of enough rows.
    #[must_use]
    pub fn takes(&self, run: &Run, rows: usize) -> bool {
        let [first, last] = self.rows;
        let whole = run.from.is_batch_start() && run.to.is_batch_start() && run.to.batch == run.from.batch + 1;
        whole && (first..=last).contains(&rows)
    }
}

impl Ring {
    /// A free buffer, a new one while there may be more; none where none came free in a while.
    fn take(&self, context: &Context) -> Result<Option<wgpu::Buffer>, DeviceError> {
        if let Ok(free) = self.free.try_recv() {
            return Ok(Some(free));
        }
        let more = |made| (made < self.most.load(Ordering::Relaxed)).then_some(made + 1);
        if self.made.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_err() {
            return Ok(self.free.recv_timeout(PATIENCE).ok());
        }
        let refused = || {
            let made = self.made.fetch_sub(1, Ordering::Relaxed) - 1;
            self.most.fetch_min(made, Ordering::Relaxed);
            if made >= self.least {
                return Ok(None);
            }
            Err(DeviceError::OutOfMemory { what: "experts on their way".into(), bytes: self.bytes })
        };
        if context.faults.refuses_buffer(&context.device) {
            return refused();
        }
        let scope = context.device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let made = context.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("streamed"),
            size: self.bytes,
            usage: wgpu::BufferUsages::MAP_WRITE | wgpu::BufferUsages::COPY_SRC,
            // as a used one comes back
            mapped_at_creation: true,
        });
        match pollster::block_on(scope.pop()) {
            Some(_) => refused(),
            None => Ok(Some(made)),
        }
    }

    /// Takes back a buffer that the device was told to copy from: it is free when that is done.
    fn give_back(self: &Arc<Self>, buffer: wgpu::Buffer) {
        let (ring, mapped) = (self.clone(), buffer.clone());
        buffer.map_async(wgpu::MapMode::Write, .., move |done| {
            if done.is_ok() {
                let _ = ring.give.send(mapped);
            }
        });
    }
}

/// Lays an expert out as a place holds it, in a mapped buffer, and unmaps it.
pub(super) fn lay_out(buffer: &wgpu::Buffer, place: &PlaceLaid, expert: &MlpWeights) -> Result<(), DeviceError> {
    {
        let mapped = buffer.get_mapped_range_mut(..);
        let mut view = mapped.map_err(|e| DeviceError::Lost { why: e.to_string() })?;
        let mut put = |at: usize, bytes: &[u8]| view.slice(at..at + bytes.len()).copy_from_slice(bytes);
        for (matrix, laid) in [(&expert.up, &place.mlp[0]), (&expert.down, &place.mlp[1])] {
            put(16 * laid.base as usize, &codes(matrix, 0, laid.rows));
            put(4 * laid.side as usize, &side(matrix, 0, laid.rows));
            if laid.field != NONE {
                put(16 * laid.field as usize, &field(matrix));
            }
        }
    }
    buffer.unmap();
    Ok(())
}

/// What the filling threads of a pass share.
struct Filling<'p> {
    context: &'p Context,
    source: &'p Source,
    ring: &'p Ring,
    /// What to bring, in order.
    wanted: &'p [(LayerIx, ExpertIx)],
    /// The next of them that nobody brings yet.
    next: AtomicUsize,
    over: AtomicBool,
}

impl Filling<'_> {
    /// One thread's work. A buffer comes before a number, so that whatever has a number gets done.
    fn fill(&self, filled: &Sender<(usize, Result<wgpu::Buffer, DeviceError>)>) {
        while !self.over.load(Ordering::Relaxed) && self.next.load(Ordering::Relaxed) < self.wanted.len() {
            let buffer = match self.ring.take(self.context) {
                Ok(Some(buffer)) => buffer,
                Ok(None) => continue,
                Err(error) => return drop(filled.send((usize::MAX, Err(error)))),
            };
            let at = self.next.fetch_add(1, Ordering::Relaxed);
            let Some((layer, expert)) = self.wanted.get(at) else {
                let _ = self.ring.give.send(buffer);
                return;
            };
            let (place, experts) = &self.source.layers[layer.index()];
            let laid = {
                let _span = trace_span!(target: "riparian::wgpu", "fill", layer = layer.0, expert = expert.0).entered();
                lay_out(&buffer, place, &experts[expert.index()])
            };
            if filled.send((at, laid.map(|()| buffer))).is_err() {
                return;
            }
        }
    }
}

/// Experts as they come, in the order in which they are asked for.
struct Arriving<'p> {
    context: &'p Context,
    filled: Receiver<(usize, Result<wgpu::Buffer, DeviceError>)>,
    early: BTreeMap<usize, wgpu::Buffer>,
}

impl Arriving<'_> {
    /// The experts numbered so, laid out.
    fn take(&mut self, numbers: std::ops::Range<usize>) -> Result<Vec<wgpu::Buffer>, DeviceError> {
        let begun = Instant::now();
        while !numbers.clone().all(|number| self.early.contains_key(&number)) {
            if let Some(why) = self.context.lost.get() {
                return Err(DeviceError::Lost { why: why.clone() });
            }
            match self.filled.recv_timeout(Duration::from_micros(100)) {
                Ok((at, buffer)) => {
                    self.early.insert(at, buffer?);
                }
                // buffers come free only where somebody asks the device
                Err(RecvTimeoutError::Timeout) => {
                    let polled = self.context.device.poll(wgpu::PollType::Poll);
                    polled.map_err(|e| DeviceError::Lost { why: e.to_string() })?;
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(DeviceError::Lost { why: "nobody brings experts any more".into() });
                }
            }
            if begun.elapsed() > DEADLINE {
                return Err(DeviceError::Lost { why: "experts on their way do not arrive".into() });
            }
        }
        Ok(numbers.filter_map(|number| self.early.remove(&number)).collect())
    }
}

impl Held {
    /// Experts of each layer that lie in no place.
    fn lacking(&self) -> Vec<Vec<ExpertIx>> {
        (self.places().iter())
            .map(|held| (0..self.experts()).map(ExpertIx::from).filter(|e| !held.contains(&Some(*e))).collect())
            .collect()
    }

    /// Where every expert lies, with numbers behind the places for those that stream, in order: `[layers, experts]`.
    fn stream_map(&self, lacking: &[Vec<ExpertIx>]) -> Vec<u32> {
        let mut map = vec![NONE; self.places().len() * self.experts()];
        let layers = self.places().iter().zip(lacking).zip(map.chunks_exact_mut(self.experts().max(1)));
        for ((held, lacking), map) in layers {
            for (place, expert) in held.iter().enumerate().filter_map(|(place, held)| Some((place, (*held)?))) {
                map[expert.index()] = place as u32;
            }
            for (i, expert) in lacking.iter().enumerate() {
                map[expert.index()] = (held.len() + i) as u32;
            }
        }
        map
    }
}

impl GpuQueue {
    /// A wide pass that brings the experts which the bank lacks.
    pub(super) fn prefill_streamed(&mut self, run: &Run, pass: &Pass, n: usize) -> Result<(), DeviceError> {
        let slot = run.stamp.slot;
        let streamed = self.core.streamed.clone().expect("a pass that streams");
        let lacking = self.held.lacking();
        self.submit_ready();
        let queue = &self.core.context.queue;
        queue.write_buffer(&streamed.given, 0, &rows_padded(&pass.rows, self.core.geometry.hidden));
        queue.write_buffer(&streamed.map, 0, bytemuck::cast_slice(&self.held.stream_map(&lacking)));
        self.begin_pass(run, pass, n);
        self.forms[slot.index()] = Form::Streamed;

        let wanted: Vec<(LayerIx, ExpertIx)> = (lacking.iter().enumerate())
            .flat_map(|(layer, experts)| experts.iter().map(move |expert| (LayerIx::from(layer), *expert)))
            .collect();
        let _span = debug_span!(target: "riparian::wgpu", "stream", rows = n, experts = wanted.len()).entered();
        let context = self.core.context.clone();
        let filling = Filling {
            context: &context,
            source: &streamed.source,
            ring: &streamed.ring,
            wanted: &wanted,
            next: AtomicUsize::new(0),
            over: AtomicBool::new(false),
        };
        let (filled, arrived) = unbounded();
        std::thread::scope(|scope| {
            for _ in 0..streamed.options.threads.clamp(1, wanted.len().max(1)) {
                let (filling, filled) = (&filling, filled.clone());
                scope.spawn(move || filling.fill(&filled));
            }
            drop(filled);
            let mut arriving = Arriving { context: &context, filled: arrived, early: BTreeMap::new() };
            let done = catch_unwind(AssertUnwindSafe(|| self.layers(run, n, &streamed, &lacking, &mut arriving)));
            filling.over.store(true, Ordering::Relaxed);
            // What was filled for nothing is free again once it is mapped again.
            let Arriving { filled, early, .. } = arriving;
            early.into_values().for_each(|buffer| streamed.ring.give_back(buffer));
            filled.into_iter().filter_map(|(_, buffer)| buffer.ok()).for_each(|b| streamed.ring.give_back(b));
            done.unwrap_or_else(|panic| Err(DeviceError::Lost { why: panic_text(panic.as_ref()) }))
        })
    }

    /// The pass layer by layer, each one's experts in runs as they come.
    fn layers(
        &mut self,
        run: &Run,
        n: usize,
        streamed: &Streamed,
        lacking: &[Vec<ExpertIx>],
        arriving: &mut Arriving<'_>,
    ) -> Result<(), DeviceError> {
        let slot = run.stamp.slot;
        let places = streamed.options.places;
        let (mut brought, mut at) = (0, 0);
        for (layer, experts) in lacking.iter().enumerate() {
            if self.is_given_up(slot) {
                return Ok(());
            }
            // up to the sum
            self.blocks(slot, None, n, at..3 * layer + 2);
            at = 3 * layer + 2;
            if let Some(readable) = streamed.options.readable.as_ref().filter(|_| !experts.is_empty()) {
                readable().map_err(|why| DeviceError::Lost { why })?;
            }
            for (i, some) in experts.chunks(places).enumerate() {
                let buffers = arriving.take(brought..brought + some.len())?;
                brought += some.len();
                self.run_of_experts(slot, n, streamed, LayerIx::from(layer), i, &buffers);
                buffers.into_iter().for_each(|buffer| streamed.ring.give_back(buffer));
            }
        }
        self.blocks(slot, None, n, at..3 * lacking.len() + 1);
        Ok(())
    }

    /// Copies a run of experts into the streaming places and computes them.
    fn run_of_experts(
        &mut self,
        slot: SlotIx,
        n: usize,
        streamed: &Streamed,
        layer: LayerIx,
        run: usize,
        buffers: &[wgpu::Buffer],
    ) {
        let (place, experts) = &streamed.source.layers[layer.index()];
        let sorts = chunks_of(experts.len(), streamed.options.places);
        let first = layer.index() * (sorts + EXPERT_DISPATCHES);
        let mut encoder = self.encoder();
        for (i, buffer) in buffers.iter().enumerate() {
            encoder.copy_buffer_to_buffer(buffer, 0, &streamed.bank, i as u64 * place.bytes, place.bytes);
        }
        let mut stamps = self.stamped(WorkKind::Prefill);
        {
            let bound = self.core.slots[slot.index()].streamed.as_ref().expect("a slot of a device that streams");
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
            for at in [first + run].into_iter().chain(first + sorts..first + sorts + EXPERT_DISPATCHES) {
                let dispatch = &streamed.experts.plan.dispatches[at];
                stamp(&mut stamps, &mut pass, Some(dispatch.class));
                pass.set_pipeline(&streamed.experts.pipelines[dispatch.pipeline].pipeline);
                pass.set_bind_group(0, &bound.experts[at], &[]);
                let [x, y, z] = dispatch.grid.groups(n as u32);
                pass.dispatch_workgroups(x, y, z);
            }
            stamp(&mut stamps, &mut pass, None);
        }
        self.end_stamps(stamps, &mut encoder);
        self.ready.push(encoder.finish());
        self.submit();
    }

    /// Whether a slot's session has ended behind what runs.
    fn is_given_up(&self, slot: SlotIx) -> bool {
        self.behind.as_ref().and_then(std::sync::Weak::upgrade).is_some_and(|desk| desk.ends(slot))
    }

    /// Whether an append holds a pass that has to wait for experts.
    fn waits(&self, items: &[Item]) -> bool {
        let Some(streamed) = &self.core.streamed else { return false };
        items.iter().any(|item| match item {
            Item::Run(run) => self.pass_rows(run).is_some_and(|rows| streamed.takes(run, rows)),
            _ => false,
        })
    }
}

// ------------------------------------------------------------------ the line

/// The submitter's half of a device that streams.
#[derive(Debug)]
pub struct Line {
    desk: Arc<Desk>,
    thread: Option<JoinHandle<()>>,
}

/// What the submitter and the thread share.
#[derive(Debug)]
pub(super) struct Desk {
    state: Mutex<State>,
    more: Condvar,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct State {
    /// The queue, unless the thread has it.
    queue: Option<Box<GpuQueue>>,
    /// Appends that wait, in order.
    behind: VecDeque<Vec<Item>>,
    closed: bool,
}

impl Desk {
    /// Whether something that waits ends the slot's session, or nobody is there any more.
    fn ends(&self, slot: SlotIx) -> bool {
        let state = self.state.lock();
        let retires = |item: &Item| matches!(item, Item::Retire { slot: retired, .. } if *retired == slot);
        state.closed || state.behind.iter().flatten().any(retires)
    }

    fn work(&self) {
        loop {
            let mut state = self.state.lock();
            while state.behind.is_empty() && !state.closed {
                self.more.wait(&mut state);
            }
            if state.closed {
                return;
            }
            let (Some(items), Some(mut queue)) = (state.behind.pop_front(), state.queue.take()) else { return };
            drop(state);
            let appended = catch_unwind(AssertUnwindSafe(|| queue.append(items)))
                .unwrap_or_else(|panic| Err(DeviceError::Lost { why: panic_text(panic.as_ref()) }));
            if let Err(error) = appended {
                // the submitter has gone on: whoever waits for a landing is told
                self.shared.lose(&error);
            }
            self.state.lock().queue = Some(queue);
        }
    }
}

impl Line {
    /// Starts the thread behind `queue`.
    ///
    /// # Errors
    ///
    /// [`DeviceError::Lost`] where the system gives no thread.
    pub fn new(mut queue: GpuQueue, shared: Arc<Shared>) -> Result<Self, DeviceError> {
        let state = State { queue: None, behind: VecDeque::new(), closed: false };
        let desk = Arc::new(Desk { state: Mutex::new(state), more: Condvar::new(), shared });
        queue.behind = Some(Arc::downgrade(&desk));
        desk.state.lock().queue = Some(Box::new(queue));
        let own = desk.clone();
        let spawned = std::thread::Builder::new().name("stream".into()).spawn(move || own.work());
        let thread = spawned.map_err(|error| DeviceError::Lost { why: format!("no thread for it: {error}") })?;
        Ok(Self { desk, thread: Some(thread) })
    }
}

impl Queue for Line {
    fn append(&mut self, items: Vec<Item>) -> Result<(), DeviceError> {
        let shared = &self.desk.shared;
        let mut state = self.desk.state.lock();
        let free = state.behind.is_empty();
        match state.queue.as_mut().filter(|_| free) {
            Some(queue) if !queue.waits(&items) => queue.append(items),
            _ => {
                if let Some(lost) = shared.lost() {
                    return Err(lost);
                }
                for item in &items {
                    match item {
                        Item::Run(run) => {
                            run.peeks.iter().for_each(|(_, staging)| shared.owe(Wait::Peek(*staging)));
                        }
                        Item::Land { staging, .. } => shared.owe(Wait::Land(*staging)),
                        Item::Read { staging, .. } => shared.owe(Wait::Read(*staging)),
                        Item::Upload { staging, .. } => shared.owe(Wait::Upload(*staging)),
                        _ => {}
                    }
                }
                state.behind.push_back(items);
                self.desk.more.notify_one();
                Ok(())
            }
        }
    }

    fn prepare(&mut self, run: &Run, landing: Staging) {
        let mut state = self.desk.state.lock();
        let free = state.behind.is_empty();
        if let Some(queue) = state.queue.as_mut().filter(|_| free) {
            queue.prepare(run, landing);
        }
    }
}

/// The submitter's half where there is no thread for the [`Line`].
#[derive(Debug)]
pub struct Gone(pub DeviceError);

impl Queue for Gone {
    fn append(&mut self, _: Vec<Item>) -> Result<(), DeviceError> {
        Err(self.0.clone())
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.desk.state.lock().closed = true;
        self.desk.more.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
