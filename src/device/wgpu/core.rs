//! What both halves of the device are made from: weights, plans, slots; and the encoding of plans.

use std::collections::HashMap;
use std::sync::Arc;

use tracing::info;

use super::super::kernels::{Choice, Encoding, Format, TAKE_ROWS};
use super::super::params;
use super::super::times::ClassTimes;
use super::adapter::Context;
use super::decode::{Frame, key, record};
use super::layout::padded;
use super::partial;
use super::pipelines::{Key, Pipeline, Pipelines};
use super::prefill::{self, PassFrame};
use super::rounds::{self, DraftSetup, Rounds, RoundsBound};
use super::slot::{Sizes, Slot};
use super::stream::{Streamed, StreamedBound, Streaming};
use super::upload::buffer;
use super::weights::Weights;
use crate::device::DeviceError;
use crate::ids::ExpertIx;
use crate::knobs::{Activations, DispatchClass};
use crate::model::geometry::Geometry;
use crate::model::weights::DecoderWeights;
use crate::plan::record::{Dispatch, Grid, Name, Plan, Section};

/// A plan with its pipelines and uniform structs on the device.
#[derive(Debug)]
pub struct Ready {
    /// The record.
    pub plan: Plan<Key>,
    /// As the plan numbers them.
    pub pipelines: Vec<Arc<Pipeline>>,
    /// The plan's uniform structs.
    pub uniforms: wgpu::Buffer,
}

impl Ready {
    /// Builds what a plan needs.
    ///
    /// # Errors
    ///
    /// [`DeviceError`] where the driver refuses a pipeline or a buffer.
    pub fn new(context: &Context, pipelines: &mut Pipelines, plan: Plan<Key>) -> Result<Self, DeviceError> {
        pipelines.prepare(context, &plan.pipelines)?;
        let made = plan.pipelines.iter().map(|key| pipelines.get(context, key)).collect::<Result<_, _>>()?;
        let usage = wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST;
        let uniforms = buffer(context, "params", plan.uniforms.len() as u64, usage)?;
        if !plan.uniforms.is_empty() {
            context.queue.write_buffer(&uniforms, 0, &plan.uniforms);
        }
        Ok(Self { plan, pipelines: made, uniforms })
    }

    /// Encodes the dispatches of which `wanted` holds, in order, into one pass. `stamp` is called before each and after
    /// the last.
    pub fn encode(
        &self,
        pass: &mut wgpu::ComputePass<'_>,
        groups: &[wgpu::BindGroup],
        rows: u32,
        wanted: impl Fn(&Dispatch) -> bool,
        mut stamp: impl FnMut(&mut wgpu::ComputePass<'_>, Option<DispatchClass>),
    ) {
        let mut bound = usize::MAX;
        for (dispatch, group) in self.plan.dispatches.iter().zip(groups) {
            if !wanted(dispatch) {
                continue;
            }
            stamp(pass, Some(dispatch.class));
            if bound != dispatch.pipeline {
                pass.set_pipeline(&self.pipelines[dispatch.pipeline].pipeline);
                bound = dispatch.pipeline;
            }
            pass.set_bind_group(0, group, &[]);
            let [x, y, z] = dispatch.grid.groups(rows);
            pass.dispatch_workgroups(x, y, z);
        }
        stamp(pass, None);
    }
}

/// A slot with its bind groups.
#[derive(Debug)]
pub struct Bound {
    /// The buffers.
    pub slot: Slot,
    /// For [`Core::step`].
    pub step: Vec<wgpu::BindGroup>,
    /// For [`Core::take`].
    pub take: Vec<wgpu::BindGroup>,
    /// For [`Core::step`], over the last row of a pass.
    pub last: Vec<wgpu::BindGroup>,
    /// For [`Core::pass`].
    pub pass: [Vec<wgpu::BindGroup>; 2],
    /// For [`Core::mend`].
    pub mend: Vec<wgpu::BindGroup>,
    /// For [`Core::rounds`].
    pub rounds: Option<RoundsBound>,
    /// For [`Core::streamed`].
    pub streamed: Option<StreamedBound>,
}

/// Everything on the device.
#[derive(Debug)]
pub struct Core {
    /// The device.
    pub context: Arc<Context>,
    /// The model's shapes.
    pub geometry: Geometry,
    /// Its weights.
    pub weights: Weights,
    /// A step of one row.
    pub step: Ready,
    /// Row `i` of the given ones becomes the residual's only row: dispatch `i`.
    pub take: Ready,
    /// A pass of many rows, as [`prefill::SPLITS`] has them.
    pub pass: [Ready; 2],
    /// Cures and fills, with partial banks.
    pub mend: Option<Ready>,
    /// Passes that bring what a partial bank lacks, where there are such.
    pub streamed: Option<Arc<Streamed>>,
    /// Drafts, where they are made.
    pub rounds: Option<Rounds>,
    /// Sessions.
    pub slots: Vec<Bound>,
    /// What they are sized by.
    pub sizes: Sizes,
    /// Arithmetic.
    pub activations: Activations,
    /// Device time by dispatch class, where it is measured.
    pub times: Option<Arc<ClassTimes>>,
    pipelines: usize,
}

/// How the device is opened.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Arithmetic.
    pub activations: Activations,
    /// KV positions of a slot.
    pub positions: usize,
    /// Sessions at a time.
    pub slots: usize,
    /// Rows of a prefill pass at most.
    pub pass_rows: usize,
    /// Staging of the upload.
    pub window_bytes: u64,
    /// Whether logits are kept for reading.
    pub keep_logits: bool,
    /// Classes that are left out, to see what they cost (`CMF_NEMO_SKIP`); the ids are then wrong.
    pub skip: Vec<DispatchClass>,
    /// How drafts are made; `None` makes none.
    pub drafts: Option<DraftSetup>,
}

impl Core {
    /// Uploads a model and builds its plans.
    ///
    /// # Errors
    ///
    /// [`DeviceError`].
    pub fn new(
        context: Arc<Context>,
        geometry: &Geometry,
        decoder: &DecoderWeights,
        setup: &Setup,
        residents: Option<&[Vec<ExpertIx>]>,
        progress: super::weights::Progress<'_>,
    ) -> Result<Self, DeviceError> {
        super::contract::check(geometry, &context)?;
        let experts = geometry.moe.map_or(0, |moe| moe.experts);
        let all = || (0..experts).map(ExpertIx::from).collect();
        let residents: Vec<Vec<_>> = match residents {
            Some(residents) => residents.iter().take(geometry.decoder_layers()).cloned().collect(),
            None => (0..geometry.decoder_layers()).map(|_| all()).collect(),
        };
        let drafts = setup.drafts.as_ref().and_then(|drafts| {
            match rounds::rows_of(&context, geometry, decoder, setup.activations) {
                Ok(rows) => Some((drafts, rows)),
                Err(why) => {
                    info!(why, "no drafts on the device");
                    None
                }
            }
        });
        let (window, wanted) = (setup.window_bytes, drafts.is_some());
        let weights = Weights::upload(&context, window, geometry, decoder, &residents, wanted, progress)?;
        let snapshots = drafts.map_or(1, |(_, rows)| rows);
        let full = !weights.is_partial();
        let pass_rows = prefill::rows_that_fit(&context, geometry, &weights, setup.pass_rows);
        let mut pipelines = Pipelines::new(&context);
        let frame = Frame {
            geometry,
            weights: &weights,
            team: context.team,
            bank_rep: context.bank_rep,
            activations: setup.activations,
            rows: 1,
            snapshots,
            full,
            keep_logits: setup.keep_logits,
            drafts: drafts.map(|(drafts, _)| drafts.conventions),
        };
        let step = left_in(record(frame), &setup.skip);
        let take = take_plan(&context, padded(geometry.hidden), pass_rows);
        let sizes = Sizes { positions: setup.positions, snapshots, given: pass_rows };
        let one = frame;
        let frame = Frame { rows: pass_rows, ..frame };
        let pass = prefill::SPLITS.map(|splits| {
            let pass = PassFrame { frame, cooperative: context.cooperative, splits, streamed: None };
            left_in(prefill::record(pass), &setup.skip)
        });
        let streaming = context.streaming.clone().filter(|_| !full && geometry.moe.is_some()).map(|streaming| {
            let rows = prefill::rows_that_fit(&context, geometry, &weights, streaming.rows);
            let places = streaming.places.clamp(1, prefill::STREAM_PLACES_MAX);
            // a pass that does not stream has to fit the others
            let from = streaming.from.min(pass_rows + 1);
            Streaming { rows, from, places, ring: streaming.ring.max(places), ..streaming }
        });
        let streaming = streaming.filter(|streaming| streaming.from <= streaming.rows);
        let streams = streaming.as_ref().map(|streaming| {
            let frame = Frame { rows: streaming.rows, ..frame };
            let (splits, streamed) = (prefill::SPLITS[0], Some(streaming.places));
            let pass = PassFrame { frame, cooperative: context.cooperative, splits, streamed };
            // what is left out leaves gaps that the runs of experts do not know of
            [left_in(prefill::record(pass), &setup.skip), prefill::record_stream(pass)]
        });
        let partial = geometry.moe.as_ref().filter(|_| !full);
        let mend = partial.map(|moe| partial::plan(&context, geometry, moe));
        let plans = [&step, &take, &pass[0], &pass[1]].into_iter().chain(&mend).chain(streams.iter().flatten());
        pipelines.prepare(&context, plans.flat_map(|plan| &plan.pipelines))?;
        let step = Ready::new(&context, &mut pipelines, step)?;
        let take = Ready::new(&context, &mut pipelines, take)?;
        let [whole, split] = pass;
        let pass = [Ready::new(&context, &mut pipelines, whole)?, Ready::new(&context, &mut pipelines, split)?];
        let mend = mend.map(|mend| Ready::new(&context, &mut pipelines, mend)).transpose()?;
        let rounds = match drafts {
            Some((drafts, _)) => {
                let pass = PassFrame { frame, cooperative: context.cooperative, splits: 1, streamed: None };
                let finish = |plan| left_in(plan, &setup.skip);
                Some(Rounds::new(&context, &mut pipelines, one, pass, drafts, finish)?)
            }
            None => None,
        };
        let mut streams = match streams {
            Some([pass, experts]) => {
                let pass = Ready::new(&context, &mut pipelines, pass)?;
                Some([pass, Ready::new(&context, &mut pipelines, experts)?])
            }
            None => None,
        };
        pipelines.keep();
        // no pass that streams is halted: all slots share what it works with, and narrower passes what need not survive
        let wide = match &streaming {
            Some(streaming) => Some(wide_buffers(&context, geometry, &weights, streaming)?),
            None => None,
        };
        let mut shared = match &wide {
            Some(wide) => {
                let scratch = prefill::scratch(wide);
                scratch.map(|(name, buffer)| (*name, buffer.clone())).collect()
            }
            None => prefill::buffers(&context, geometry, &weights, pass_rows, |name| full || !prefill::survives(name))?,
        };
        let streamed = match (streaming, &wide, streams.take()) {
            (Some(streaming), Some(wide), Some(plans)) => {
                let places: Vec<_> = weights.banks.iter().map(|bank| bank.place).collect();
                Some(Arc::new(Streamed::new(streaming, decoder, &places, wide, plans)))
            }
            _ => None,
        };
        if let Some((drafts, _)) = drafts {
            let given: Vec<u32> = drafts.given.iter().flat_map(|ids| ids.iter().map(|id| id.0)).collect();
            let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST;
            let made = buffer(&context, "drafts given", 4 * given.len() as u64, usage)?;
            context.queue.write_buffer(&made, 0, bytemuck::cast_slice(&given));
            shared.insert(Name::DraftsGiven, made);
        }
        let mut slots = Vec::new();
        for _ in 0..setup.slots {
            let mut buffers = shared.clone();
            buffers.extend(prefill::buffers(&context, geometry, &weights, pass_rows, |name| {
                !full && prefill::survives(name)
            })?);
            let slot = Slot::new(&context, geometry, &weights, sizes, &buffers)?;
            let last = slot.bind(&context, &weights, &step.plan, &step.pipelines, &step.uniforms, Name::FlightLast);
            let step = slot.bind(&context, &weights, &step.plan, &step.pipelines, &step.uniforms, Name::Flight);
            let take = slot.bind(&context, &weights, &take.plan, &take.pipelines, &take.uniforms, Name::Flight);
            let pass = [&pass[0], &pass[1]].map(|ready| {
                slot.bind(&context, &weights, &ready.plan, &ready.pipelines, &ready.uniforms, Name::Flight)
            });
            let mend = mend.as_ref().map_or_else(Vec::new, |mend| {
                slot.bind(&context, &weights, &mend.plan, &mend.pipelines, &mend.uniforms, Name::FlightCure)
            });
            let streamed = streamed.as_ref().zip(wide.as_ref()).map(|(streamed, wide)| {
                let wide = slot.with(wide);
                let bind = |ready: &Ready| {
                    wide.bind(&context, &weights, &ready.plan, &ready.pipelines, &ready.uniforms, Name::Flight)
                };
                StreamedBound {
                    pass: bind(&streamed.pass),
                    experts: bind(&streamed.experts),
                    rounds: rounds.as_ref().map_or_else(Vec::new, |rounds| bind(&rounds.pass)),
                }
            });
            let rounds = rounds.as_ref().map(|rounds| rounds.bind(&context, &weights, &slot));
            slots.push(Bound { slot, step, take, last, pass, mend, rounds, streamed });
        }
        Ok(Self {
            geometry: geometry.clone(),
            weights,
            step,
            take,
            pass,
            mend,
            streamed,
            rounds,
            slots,
            sizes,
            activations: setup.activations,
            times: (context.stamps && context.timestamps).then(Arc::default),
            context,
            pipelines: pipelines.len(),
        })
    }

    /// How many pipelines its plans have.
    #[must_use]
    pub fn pipelines(&self) -> usize {
        self.pipelines
    }
}

/// Buffers of passes that stream, the slots' own aside.
fn wide_buffers(
    context: &Context,
    geometry: &Geometry,
    weights: &Weights,
    streaming: &Streaming,
) -> Result<HashMap<Name, wgpu::Buffer>, DeviceError> {
    let mut wide = prefill::buffers(context, geometry, weights, streaming.rows, |_| true)?;
    let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST;
    let place = weights.banks.iter().map(|bank| bank.place.bytes).max().unwrap_or(0);
    let experts = geometry.moe.map_or(0, |moe| moe.experts);
    let words = |words: usize| 4 * words as u64;
    for (name, what, bytes) in [
        (Name::Given, "given", words(streaming.rows * padded(geometry.hidden))),
        (Name::Stream, "streaming places", place * streaming.places as u64),
        (Name::StreamMap, "stream map", words(weights.banks.len() * experts)),
    ] {
        wide.insert(name, buffer(context, what, bytes, usage)?);
    }
    Ok(wide)
}

/// The plan without the classes to skip.
fn left_in(mut plan: Plan<Key>, skip: &[DispatchClass]) -> Plan<Key> {
    plan.dispatches.retain(|dispatch| !skip.contains(&dispatch.class));
    plan
}

fn take_plan(context: &Context, cols: usize, rows: usize) -> Plan<Key> {
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
    let mut plan = Plan::default();
    for first in 0..rows as u32 {
        let params = params::TakeRows { first, ..params::TakeRows::default() };
        plan.push(
            key(&TAKE_ROWS, &choice, &[("COLS", cols)], &[]),
            DispatchClass::Final,
            (Section::Accept, None),
            bytemuck::bytes_of(&params),
            &[Name::Control, Name::Given, Name::X],
            Grid::Fixed([1, 1, 1]),
        );
    }
    plan
}
