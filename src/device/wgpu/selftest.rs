//! The start-up self-test: every kernel variant that a model will use, against the plain decoder.
//!
//! A driver may report one number of lanes and run another, or compile a kernel
//! wrongly. So before a model is decoded on an adapter, a small one of the same
//! kinds of blocks, the same codecs and the same variants runs there: a pass of
//! some rows, then steps. Its logits must be the plain decoder's. An adapter
//! that differs is refused; one whose matrix units differ goes without them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::kernels::{Choice, Encoding, Format, LANES};
use super::adapter::Context;
use super::decode::{WG, key};
use super::pipelines::Pipelines;
use super::upload::buffer;
use super::{Gpu, Setup};
use crate::device::{
    DeviceError, Item, Landing, Landings as _, Pass, Point, Queue as _, Read, Run, Staging, Stamp, Wait, Work,
};
use crate::ids::{ExpertIx, FlightId, Position, SessionId, SlotIx, TokenId, Turn};
use crate::knobs::{Activations, DispatchClass};
use crate::model::geometry::{AttentionGeometry, BlockKind, Geometry, MambaGeometry, MoeGeometry};
use crate::model::state::SequenceState;
use crate::model::tensors::{Codec, Matrix};
use crate::model::weights::{AttentionWeights, Block, DecoderWeights, MambaWeights, Mixer, MlpWeights, MoeWeights};
use crate::reference::decoder::{Capture, PlainDecoder};
use crate::reference::lanes::{Seen, lanes};

/// Rows of the pass: more than one chunk of the scan and one tile of rows.
const ROWS: usize = 70;

/// Steps after it.
const STEPS: usize = 3;

/// How far logits may be from the plain decoder's, as a mean square relative to theirs. Codes and halves that round
/// another way stay a hundred times below; lanes that are summed wrongly or twice are at one.
const TOLERANCE: f64 = 1e-2;

const HIDDEN: usize = 96;
const VOCAB: usize = 64;
const SLOT: SlotIx = SlotIx(0);

/// What was tested and how long it took.
#[derive(Clone, Debug)]
pub struct Report {
    /// Pipelines that ran.
    pub pipelines: usize,
    /// From the first upload to the last comparison.
    pub took: Duration,
    /// Why matrix units are not used, where the adapter has them and they differ.
    pub without_matrix_units: Option<String>,
}

/// What decides which kernels a model uses.
#[derive(Clone, Debug)]
pub struct Kinds {
    mixers: Vec<MixerKind>,
    embedding: Codec,
    head: Codec,
    mamba: Option<MambaGeometry>,
    attention: Option<AttentionGeometry>,
    moe: Option<MoeGeometry>,
}

/// A block's kind with the codecs of its matrices.
#[derive(Clone, Copy, Debug, PartialEq)]
enum MixerKind {
    /// in, out
    Mamba([Codec; 2]),
    /// q, k, v, o
    Attention([Codec; 4]),
    /// Up and down of the routed experts and of the shared one.
    Moe([Codec; 4]),
    /// Up, down.
    Mlp([Codec; 2]),
}

impl Kinds {
    /// What a model's blocks use, each kind once.
    #[must_use]
    pub fn of(geometry: &Geometry, weights: &DecoderWeights) -> Self {
        let mut mixers = Vec::new();
        for block in &weights.blocks {
            let kind = match &block.mixer {
                Mixer::Mamba(m) => MixerKind::Mamba([m.in_proj.codec(), m.out_proj.codec()]),
                Mixer::Attention(a) => MixerKind::Attention([&a.q, &a.k, &a.v, &a.o].map(Matrix::codec)),
                Mixer::Moe(m) => {
                    let Some(expert) = m.experts.first() else { continue };
                    MixerKind::Moe([&expert.up, &expert.down, &m.shared.up, &m.shared.down].map(Matrix::codec))
                }
                Mixer::Mlp(m) => MixerKind::Mlp([&m.up, &m.down].map(Matrix::codec)),
            };
            if !mixers.contains(&kind) {
                mixers.push(kind);
            }
        }
        let (embedding, head) = (weights.embedding.codec(), weights.head.codec());
        Self { mixers, embedding, head, mamba: geometry.mamba, attention: geometry.attention, moe: geometry.moe }
    }

    /// What files of the usual converters use: q4tp experts, q8_2f elsewhere.
    #[must_use]
    pub fn usual() -> Self {
        let q8 = Codec::Q8_2f;
        let mixers = vec![
            MixerKind::Mamba([q8; 2]),
            MixerKind::Moe([Codec::Q4tp, Codec::Q4tp, q8, q8]),
            MixerKind::Attention([q8; 4]),
        ];
        let mamba =
            MambaGeometry { heads: 4, head_dim: 32, groups: 2, d_state: 16, d_conv: 4, dt_limit: [0.0, f32::INFINITY] };
        let attention = AttentionGeometry { heads: 4, kv_heads: 2, head_dim: 32 };
        let moe = MoeGeometry {
            experts: 8,
            top_k: 2,
            inter: 64,
            shared_inter: 96,
            latent: None,
            n_group: 1,
            topk_group: 1,
            scale: 2.5,
            norm_topk: true,
        };
        Self { mixers, embedding: q8, head: q8, mamba: Some(mamba), attention: Some(attention), moe: Some(moe) }
    }
}

/// The small model.
struct Mini {
    geometry: Geometry,
    weights: DecoderWeights,
    rows: Vec<f32>,
    /// Logits after the pass and after each step.
    logits: Vec<Vec<f32>>,
    /// The ids that they name.
    ids: Vec<TokenId>,
}

struct Random(u64);

impl Random {
    fn bits(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32) as u32
    }

    fn unit(&mut self) -> f32 {
        self.bits() as f32 / 4_294_967_296.0
    }

    /// Roughly normal.
    fn normal(&mut self) -> f32 {
        (0..6).map(|_| self.unit() - 0.5).sum::<f32>() * std::f32::consts::SQRT_2
    }

    fn normals(&mut self, n: usize, around: f32, size: f32) -> Vec<f32> {
        (0..n).map(|_| around + size * self.normal()).collect()
    }

    /// A matrix whose rows have a norm near one.
    fn matrix(&mut self, codec: Codec, rows: usize, cols: usize) -> Matrix {
        let half = |v: f32| half::f16::from_f32(v).to_le_bytes();
        let size = 1.0 / (cols as f32).sqrt();
        let payload: Vec<u8> = match codec {
            Codec::F32 => (0..rows * cols).flat_map(|_| (self.normal() * size).to_le_bytes()).collect(),
            Codec::F16 => (0..rows * cols).flat_map(|_| half(self.normal() * size)).collect(),
            Codec::Bf16 => {
                (0..rows * cols).flat_map(|_| half::bf16::from_f32(self.normal() * size).to_le_bytes()).collect()
            }
            Codec::Q8_2f => {
                let mut out: Vec<u8> =
                    (0..rows * cols).map(|_| ((self.normal() * 40.0).clamp(-127.0, 127.0) as i8) as u8).collect();
                out.extend((0..rows).flat_map(|_| half(size * (0.5 + self.unit()) / 40.0)));
                out.extend((0..cols).flat_map(|_| half(0.5 + self.unit())));
                out
            }
            Codec::Q4tp => {
                let groups = cols / Codec::GROUP;
                let mut out: Vec<u8> = (0..rows * groups * 16).map(|_| self.bits() as u8).collect();
                for _ in 0..rows {
                    out.extend(half((size / 4.0).log2() - self.unit()));
                    out.extend(half(0.02 + 0.05 * self.unit()));
                }
                out.extend((0..rows * Codec::code_bytes(groups)).map(|_| self.bits() as u8));
                out
            }
        };
        Matrix::from_payload("self-test", codec, [rows, cols], payload)
    }

    fn mlp(&mut self, [up, down]: [Codec; 2], width: usize) -> MlpWeights {
        MlpWeights { up: self.matrix(up, width, HIDDEN), down: self.matrix(down, HIDDEN, width) }
    }

    fn mixer(&mut self, kind: MixerKind, geometry: &Geometry) -> Mixer {
        match kind {
            MixerKind::Mamba([in_proj, out_proj]) => {
                let g = geometry.mamba.expect("of a model with Mamba blocks");
                let mut mamba = MambaWeights {
                    in_proj: self.matrix(in_proj, g.in_proj_rows(), HIDDEN),
                    out_proj: self.matrix(out_proj, HIDDEN, g.inner()),
                    conv: self.normals(g.conv_channels() * g.d_conv, 0.0, 0.5),
                    conv_bias: self.normals(g.conv_channels(), 0.0, 0.1),
                    a_log: self.normals(g.heads, 0.5, 0.5),
                    d_skip: self.normals(g.heads, 1.0, 0.1),
                    dt_bias: self.normals(g.heads, -1.0, 0.5),
                    norm: self.normals(g.inner(), 1.0, 0.1),
                };
                mamba.a_log.iter_mut().for_each(|a| *a = a.clamp(-1.0, 2.0));
                Mixer::Mamba(Box::new(mamba))
            }
            MixerKind::Attention([q, k, v, o]) => {
                let g = geometry.attention.expect("of a model with attention blocks");
                Mixer::Attention(AttentionWeights {
                    q: self.matrix(q, g.q_width(), HIDDEN),
                    k: self.matrix(k, g.kv_width(), HIDDEN),
                    v: self.matrix(v, g.kv_width(), HIDDEN),
                    o: self.matrix(o, HIDDEN, g.q_width()),
                })
            }
            MixerKind::Moe([up, down, shared_up, shared_down]) => {
                let g = geometry.moe.expect("of a model with experts");
                let mut bias = self.normals(g.experts, 0.0, 0.01);
                // never chosen: with a partial bank it has no place
                bias[g.experts - 1] = -8.0;
                Mixer::Moe(Box::new(MoeWeights {
                    gate: self.normals(g.experts * HIDDEN, 0.0, 0.3),
                    bias,
                    experts: (0..g.experts).map(|_| self.mlp([up, down], g.inter)).collect(),
                    shared: self.mlp([shared_up, shared_down], g.shared_inter),
                    latent: None,
                }))
            }
            MixerKind::Mlp(codecs) => Mixer::Mlp(self.mlp(codecs, geometry.mlp_inter.expect("of a dense model"))),
        }
    }
}

impl Mini {
    /// Blocks of all kinds, and what the plain decoder makes of them. `None` where the choices of this seed are too near.
    fn new(kinds: &Kinds, activations: Activations, seed: u64) -> Option<Self> {
        let mut rng = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        let mamba = kinds.mamba.map(|g| MambaGeometry {
            heads: 4,
            head_dim: 32,
            groups: 2,
            d_state: 16,
            dt_limit: [g.dt_limit[0].min(0.5), g.dt_limit[1]],
            ..g
        });
        let attention = kinds.attention.map(|_| AttentionGeometry { heads: 4, kv_heads: 2, head_dim: 32 });
        let moe = kinds.moe.map(|g| {
            let (n_group, topk_group) = if g.n_group > 1 { (2, 1) } else { (1, 1) };
            MoeGeometry { experts: 8, top_k: 2, inter: 64, shared_inter: 96, latent: None, n_group, topk_group, ..g }
        });
        let kind_of = |mixer: &MixerKind| match mixer {
            MixerKind::Mamba(_) => BlockKind::Mamba,
            MixerKind::Attention(_) => BlockKind::Attention,
            MixerKind::Moe(_) => BlockKind::Moe,
            MixerKind::Mlp(_) => BlockKind::Mlp,
        };
        let geometry = Geometry {
            hidden: HIDDEN,
            vocab: VOCAB,
            norm_eps: 1e-5,
            blocks: kinds.mixers.iter().map(kind_of).collect(),
            attention,
            mamba,
            moe,
            mlp_inter: Some(64),
            draft: false,
            max_positions: 4096,
        };
        let mut blocks = Vec::new();
        for kind in &kinds.mixers {
            blocks.push(Block { norm: rng.normals(HIDDEN, 1.0, 0.1), mixer: rng.mixer(*kind, &geometry) });
        }
        let weights = DecoderWeights {
            embedding: rng.matrix(kinds.embedding, VOCAB, HIDDEN),
            blocks,
            final_norm: rng.normals(HIDDEN, 1.0, 0.1),
            head: rng.matrix(kinds.head, VOCAB, HIDDEN),
            draft: None,
        };
        let rows = rng.normals(ROWS * HIDDEN, 0.0, 1.0);
        let plain = PlainDecoder::new(&geometry, &weights, activations);
        let mut state = SequenceState::new(&geometry);
        let mut capture = Capture::default();
        let (mut next, mut logits, mut ids) = (rows.clone(), Vec::new(), Vec::new());
        for _ in 0..=STEPS {
            let out = plain.forward(&next, &mut state, Some(&mut capture));
            let last = &out.normed[out.normed.len() - HIDDEN..];
            logits.push(plain.logits(last));
            let pick = plain.head(last)[0];
            if pick.margin() < 0.1 {
                return None;
            }
            ids.push(pick.id);
            next = plain.embed(&[pick.id]);
        }
        let near = capture.moe.iter().flat_map(|moe| &moe.gaps).any(|gap| *gap < 3e-3);
        (!near).then_some(Self { geometry, weights, rows, logits, ids })
    }

    /// Runs it on the adapter; how many pipelines it took, or what differs.
    fn run(&self, context: &Context, wanted: &Wanted<'_>) -> Result<usize, DeviceError> {
        let Wanted { activations, full, skip } = *wanted;
        let setup = Setup {
            activations,
            positions: 2 * ROWS,
            slots: 1,
            pass_rows: ROWS,
            window_bytes: 64 << 20,
            drafts: None,
            keep_logits: true,
            skip: skip.to_vec(),
        };
        let experts = self.geometry.moe.map_or(0, |moe| moe.experts);
        let lacking = usize::from(!full);
        let residents: Vec<Vec<ExpertIx>> =
            (0..self.geometry.decoder_layers()).map(|_| (0..experts - lacking).map(ExpertIx::from).collect()).collect();
        let (geometry, weights) = (&self.geometry, &self.weights);
        let mut gpu = Gpu::open_partial(context.clone(), geometry, weights, &setup, Some(&residents), &mut |_, _| {})?;
        let pipelines = gpu.queue().core().pipelines();
        let turn = Turn(1);
        let start = Item::Start { slot: SLOT, turn, session: SessionId(1), eos: Arc::new([]), seed: None };
        gpu.queue().append(vec![start])?;
        for (batch, (logits, id)) in self.logits.iter().zip(&self.ids).enumerate() {
            let stamp = Stamp { flight: FlightId(batch as u64 + 1), slot: SLOT, turn };
            let work = match batch {
                0 => Work::Prefill(Arc::new(Pass { rows: self.rows.clone(), accept: true })),
                _ => Work::Steps,
            };
            let (from, to) = (Point::start_of(batch as u32), Point::start_of(batch as u32 + 1));
            let run = Run { stamp, from, to, work, limit: Position(u32::MAX), peeks: Vec::new() };
            let read = Item::Read { slot: SLOT, what: Read::Logits, staging: Staging(1) };
            gpu.queue().append(vec![Item::Run(run), Item::Land { stamp, staging: Staging(0) }, read])?;
            let deadline = Some(Instant::now() + Duration::from_secs(60));
            let landed = gpu.landings().wait(Wait::Land(Staging(0)), deadline)?;
            let read = gpu.landings().wait(Wait::Read(Staging(1)), deadline)?;
            let (Landing::Record(record), Landing::Logits(got)) = (landed, read) else {
                return Err(DeviceError::Unfit { why: "self-test: something else landed".into() });
            };
            let what = if batch == 0 { "a pass" } else { "a step" };
            let error = apart(&got, logits);
            if error.is_nan() || error > TOLERANCE || record.out.ids != [*id] {
                let (seen, wanted) = (record.out.ids, id);
                return Err(DeviceError::Unfit {
                    why: format!(
                        "self-test: {what} in {} is wrong: ids {seen:?} instead of {wanted:?}, logits off by {error:.1e} \
                         (mean square; at most {TOLERANCE:.0e})",
                        variant(context),
                    ),
                });
            }
        }
        Ok(pipelines)
    }
}

fn variant(context: &Context) -> String {
    format!("{}{}", context.team, if context.cooperative { " with matrix units" } else { "" })
}

/// Mean square of what differs, relative to the mean square wanted.
fn apart(got: &[f32], want: &[f32]) -> f64 {
    let power: f64 = want.iter().map(|v| f64::from(*v).powi(2)).sum();
    let error: f64 = got.iter().zip(want).map(|(g, w)| f64::from(g - w).powi(2)).sum();
    if got.len() == want.len() { error / power.max(1e-30) } else { f64::NAN }
}

/// Whether invocations sum together as the variant believes. In a module with all checks: nothing may be trusted yet.
fn teams(context: &Context) -> Result<(), DeviceError> {
    let lost = |why: String| DeviceError::Lost { why };
    let choice = Choice {
        team: context.team,
        format: Format::F32,
        int8: false,
        out: Encoding::F32,
        rows: 1,
        wide: 1,
        group_norm: false,
        full: true,
        pass: false,
    };
    let pipeline = Pipelines::default().get(context, &key(&LANES, &choice, &[], &[]))?;
    let bytes = u64::from(WG) * size_of::<Seen>() as u64;
    let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC;
    let seen = buffer(context, "lanes", bytes, usage)?;
    let read = buffer(context, "lanes", bytes, wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST)?;
    let group = context.device.create_bind_group(&wgpu::BindGroupDescriptor {
        label: Some(LANES.name),
        layout: &pipeline.layout,
        entries: &[wgpu::BindGroupEntry { binding: 0, resource: seen.as_entire_binding() }],
    });
    let mut encoder = context.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    {
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        pass.set_pipeline(&pipeline.pipeline);
        pass.set_bind_group(0, &group, &[]);
        pass.dispatch_workgroups(1, 1, 1);
    }
    encoder.copy_buffer_to_buffer(&seen, 0, &read, 0, bytes);
    let index = context.queue.submit([encoder.finish()]);
    read.map_async(wgpu::MapMode::Read, .., |_| {});
    let timeout = Some(Duration::from_secs(30));
    let waited = context.device.poll(wgpu::PollType::Wait { submission_index: Some(index), timeout });
    waited.map_err(|e| lost(e.to_string()))?;
    let view = read.get_mapped_range(..).map_err(|e| lost(e.to_string()))?;
    let words: Vec<u32> = bytemuck::pod_collect_to_vec(&view[..bytes as usize]);
    let (seen, _) = words.as_chunks::<6>();
    lanes(seen).map_err(|why| DeviceError::Unfit { why: format!("self-test: {}: {why}", context.team) })
}

/// What is tested.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'s> {
    /// The arithmetic.
    pub activations: Activations,
    /// Whether every expert is resident: other kernels route where one may be missing.
    pub full: bool,
    /// Classes that are left out, so that the result is wrong. For tests of the test.
    pub skip: &'s [DispatchClass],
}

/// Tests what a model of these kinds will use: its steps and passes. Where the matrix units alone are wrong, `context` goes
/// on without them.
///
/// # Errors
///
/// [`DeviceError::Unfit`] with what was wrong; anything that opening the small model meets.
pub fn run(context: &mut Context, kinds: &Kinds, wanted: &Wanted<'_>) -> Result<Report, DeviceError> {
    let begun = Instant::now();
    teams(context)?;
    let mini = (1..256).find_map(|seed| Mini::new(kinds, wanted.activations, seed));
    let Some(mini) = mini else {
        return Err(DeviceError::Unfit { why: "self-test: no seed gives clear choices".into() });
    };
    let mut without_matrix_units = None;
    let pipelines = match mini.run(context, wanted) {
        Err(DeviceError::Unfit { why }) if context.cooperative => {
            context.cooperative = false;
            let pipelines = mini.run(context, wanted)?;
            tracing::warn!(why, "matrix units are left out");
            without_matrix_units = Some(why);
            pipelines
        }
        ran => ran?,
    };
    let report = Report { pipelines, took: begun.elapsed(), without_matrix_units };
    let took_ms = report.took.as_millis() as u64;
    tracing::debug!(pipelines, took_ms, variant = variant(context), "self-test passed");
    Ok(report)
}
