//! Uniform structs of the kernels, field by field as the shaders name them.
//!
//! Offsets into weights count vec4s (`base`, `norm`, `field`) or 32-bit words
//! (`side`); [`NONE`] is an absent one. The tests compare every offset with
//! what naga reports of the shader.

use bytemuck::{Pod, Zeroable};

/// No such vector, no such place.
pub const NONE: u32 = u32::MAX;

/// A uniform struct and the names and offsets of its fields.
pub trait Params: Pod {
    /// The WGSL file it belongs to; common files have no dash and no kernel.
    const KERNEL: &'static str;
    /// The struct's name there.
    const STRUCT: &'static str;
    /// Fields and their offsets in bytes.
    const FIELDS: &'static [(&'static str, usize)];
}

macro_rules! params {
    ($(#[doc = $doc:literal])* $name:ident: $kernel:literal $wgsl:literal { $($(#[doc = $fdoc:literal])* $field:ident: $ty:ty,)* }) => {
        $(#[doc = $doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
        pub struct $name { $($(#[doc = $fdoc])* pub $field: $ty,)* }

        impl Params for $name {
            const KERNEL: &'static str = $kernel;
            const STRUCT: &'static str = $wgsl;
            const FIELDS: &'static [(&'static str, usize)] =
                &[$((stringify!($field), std::mem::offset_of!($name, $field))),*];
        }
    };
}

params! {
    /// What the queue writes before each flight.
    Flight: "norm_proj" "Flight" {
        /// The turn its dispatches are for.
        turn: u32,
        /// Rows of the batch.
        rows: u32,
        /// Low and high word of the flight's number.
        flight: [u32; 2],
        /// An accept that has consumed this many rows ends the session.
        limit: u32,
        /// Whether the last row's argmax is wanted.
        accept: u32,
        /// Rows the batch consumes.
        advance: u32,
        /// 1: the batch ends with these rows.
        ends: u32,
    }
}

params! {
    /// A slot's own words.
    Control: "norm_proj" "Control" {
        /// Its turn.
        turn: u32,
        /// 0, or why it halted.
        stop: u32,
        /// Low and high word of the flight that met the stop.
        stop_flight: [u32; 2],
        /// Batch, layer * 2 + phase.
        stop_point: [u32; 2],
        /// Rows consumed.
        position: u32,
        /// Which snapshot holds the scan state.
        scan_at: u32,
        /// The id whose embedding is the next row.
        id: u32,
        /// Ids in the out record.
        out_count: u32,
        /// The flight that the out record belongs to.
        out_flight: [u32; 2],
        /// Block whose output was not finite.
        bad_block: u32,
        /// End ids.
        eos_count: u32,
        /// Batches done since the start.
        batch: u32,
        /// Rows of the last batch that stand.
        kept: u32,
        /// Rounds in the out record.
        round_count: u32,
        /// Unused.
        pad_a: u32,
        /// Unused.
        pad_b: u32,
        /// Unused.
        pad_c: u32,
        /// End ids.
        eos: [u32; 16],
    }
}

params! {
    /// One matrix of a [`NormProj`].
    Segment: "norm_proj" "Segment" {
        /// First workgroup.
        first_group: u32,
        /// Rows.
        rows: u32,
        /// vec4.
        base: u32,
        /// Word.
        side: u32,
        /// vec4 or [`NONE`].
        field: u32,
        /// 1: keys and values at the row's position.
        kept: u32,
        /// Float in a row of outputs.
        offset: u32,
        /// Floats from row to row.
        stride: u32,
    }
}

params! {
    /// `norm_proj.wgsl`
    NormProj: "norm_proj" "Params" {
        /// vec4.
        norm: u32,
        /// How many segments.
        segments: u32,
        /// 1: relu² on the way out.
        relu2: u32,
        /// Unused.
        pad: u32,
        /// Matrices.
        segment: [Segment; 3],
    }
}

params! {
    /// `moe_in.wgsl`
    MoeIn: "moe_in" "Params" {
        /// vec4.
        norm: u32,
        /// vec4.
        gate: u32,
        /// Workgroups of the router.
        router_groups: u32,
        /// Rows of the shared up.
        rows: u32,
        /// vec4.
        base: u32,
        /// Word.
        side: u32,
        /// vec4 or [`NONE`].
        field: u32,
        /// vec4 or [`NONE`].
        next_field: u32,
        /// Float in `routing`.
        logits: u32,
        /// Unused.
        pad_a: u32,
        /// Unused.
        pad_b: u32,
        /// Unused.
        pad_c: u32,
    }
}

params! {
    /// `route.wgsl`
    Route: "route" "Params" {
        /// Float in `routing`.
        logits: u32,
        /// Word.
        bias: u32,
        /// Word in `map`.
        map: u32,
        /// The layer.
        layer: u32,
        /// Word in `routes`.
        weights_at: u32,
        /// 1: weights are normalised.
        norm_topk: u32,
        /// Routed scale.
        scale: f32,
        /// Word in `routes` where the layer's counts begin.
        counts: u32,
    }
}

params! {
    /// `experts_up.wgsl`
    ExpertsUp: "experts_up" "Params" {
        /// The layer.
        layer: u32,
        /// vec4s of a place.
        place: u32,
        /// vec4 in the place.
        base: u32,
        /// Word in the place.
        side: u32,
        /// vec4 in the place or [`NONE`].
        field: u32,
        /// Rows.
        rows: u32,
        /// vec4 in the place or [`NONE`].
        next_field: u32,
        /// Unused.
        pad: u32,
    }
}

params! {
    /// `experts_down.wgsl`
    ExpertsDown: "experts_down" "Params" {
        /// The layer.
        layer: u32,
        /// vec4s of a place.
        place: u32,
        /// vec4 in the place.
        base: u32,
        /// Word in the place.
        side: u32,
        /// Rows.
        rows: u32,
        /// Floats from row to row of x.
        stride: u32,
        /// Word in `routes`.
        weights_at: u32,
        /// Unused.
        pad: u32,
    }
}

params! {
    /// `proj_act.wgsl`
    ProjAct: "proj_act" "Params" {
        /// The layer.
        layer: u32,
        /// Rows.
        rows: u32,
        /// vec4.
        base: u32,
        /// Word.
        side: u32,
        /// Floats from row to row of the output.
        stride: u32,
        /// Unused.
        pad_a: u32,
        /// Unused.
        pad_b: u32,
        /// Unused.
        pad_c: u32,
    }
}

params! {
    /// `ssm_step.wgsl`
    SsmStep: "ssm_step" "Params" {
        /// Word of the taps.
        conv: u32,
        /// Word.
        conv_bias: u32,
        /// Word.
        a_log: u32,
        /// Word.
        d_skip: u32,
        /// Word.
        dt_bias: u32,
        /// vec4s from snapshot to snapshot; 0 where there is one.
        snapshot: u32,
        /// Lower limit of the step size.
        dt_min: f32,
        /// Upper limit of the step size.
        dt_max: f32,
    }
}

params! {
    /// `close_proj.wgsl`
    CloseProj: "close_proj" "Params" {
        /// vec4 of the group norm's weight.
        norm: u32,
        /// Rows.
        rows: u32,
        /// vec4.
        base: u32,
        /// Word.
        side: u32,
        /// vec4 or [`NONE`].
        field: u32,
        /// Floats from row to row of x.
        stride: u32,
        /// Unused.
        pad: [u32; 2],
    }
}

params! {
    /// `attn_split.wgsl`
    AttnSplit: "attn_split" "Params" {
        /// Floats from row to row of q.
        stride: u32,
        /// Where q begins in its row.
        offset: u32,
        /// `1 / sqrt(head_dim)`
        scale: f32,
        /// Unused.
        pad: u32,
    }
}

params! {
    /// `head.wgsl`
    Head: "head" "Params" {
        /// vec4.
        norm: u32,
        /// Rows of this part.
        rows: u32,
        /// Id of its first row.
        first_id: u32,
        /// vec4.
        base: u32,
        /// Word.
        side: u32,
        /// vec4 or [`NONE`].
        field: u32,
        /// Workgroups of all parts.
        groups: u32,
        /// First workgroup of this part.
        first_group: u32,
        /// Rows of all parts.
        vocab: u32,
        /// 1: logits are kept.
        keep_logits: u32,
        /// Unused.
        pad: [u32; 2],
    }
}

params! {
    /// `pick_embed.wgsl`
    PickEmbed: "pick_embed" "Params" {
        /// Workgroups of the head.
        groups: u32,
        /// Rows of this part of the embedding.
        rows: u32,
        /// Id of its first row.
        first_id: u32,
        /// vec4.
        base: u32,
        /// Word.
        side: u32,
        /// vec4 or [`NONE`].
        field: u32,
        /// 1 for the last part.
        last: u32,
        /// Ids that the out record has room for.
        room: u32,
    }
}

params! {
    /// `accept.wgsl`
    Accept: "accept" "Params" {
        /// Workgroups of the head.
        groups: u32,
        /// Rows of this part of the embedding.
        rows: u32,
        /// Id of its first row.
        first_id: u32,
        /// vec4.
        base: u32,
        /// Word.
        side: u32,
        /// vec4 or [`NONE`].
        field: u32,
        /// 1 for the last part.
        last: u32,
        /// Ids that the out record has room for; its rounds lie behind them.
        room: u32,
        /// Rounds that it has room for.
        rounds: u32,
        /// Unused.
        pad_a: u32,
        /// Unused.
        pad_b: u32,
        /// Unused.
        pad_c: u32,
    }
}

params! {
    /// `draft_pick.wgsl`
    DraftPick: "draft_pick" "Params" {
        /// Workgroups of the head.
        groups: u32,
        /// Rows of this part of the embedding.
        rows: u32,
        /// Id of its first row.
        first_id: u32,
        /// vec4.
        base: u32,
        /// Word.
        side: u32,
        /// vec4 or [`NONE`].
        field: u32,
        /// 1 for the last part.
        last: u32,
        /// Which draft of the round.
        at: u32,
        /// Positions whose drafts are given, from the first on.
        given: u32,
        /// Unused.
        pad_a: u32,
        /// Unused.
        pad_b: u32,
        /// Unused.
        pad_c: u32,
    }
}

params! {
    /// `draft_rows.wgsl`
    DraftRows: "draft_rows" "Params" {
        /// vec4.
        norm: u32,
        /// 0 as they are, 1 normed, 2 less their mean.
        how: u32,
        /// 1: a row kept from before comes first.
        before: u32,
        /// Unused.
        pad: u32,
    }
}

params! {
    /// `draft_fuse.wgsl`
    DraftFuse: "draft_fuse" "Params" {
        /// vec4: the norm of the following rows.
        enorm: u32,
        /// vec4: the norm of the hidden rows.
        hnorm: u32,
        /// Rows of the matrix.
        rows: u32,
        /// vec4.
        base: u32,
        /// Word.
        side: u32,
        /// vec4 or [`NONE`].
        field: u32,
        /// 1: the hidden half first.
        hidden_first: u32,
        /// The first of the following rows.
        start: u32,
        /// 1: the last row that stands goes to `tail` too.
        tail: u32,
        /// Unused.
        pad_a: u32,
        /// Unused.
        pad_b: u32,
        /// Unused.
        pad_c: u32,
    }
}

params! {
    /// `take_rows.wgsl`
    TakeRows: "take_rows" "Params" {
        /// The first of the given rows.
        first: u32,
        /// Unused.
        pad_a: u32,
        /// Unused.
        pad_b: u32,
        /// Unused.
        pad_c: u32,
    }
}

params! {
    /// `encode_rows_params.wgsl`
    EncodeRows: "prefill_encode" "Params" {
        /// vec4 or [`NONE`].
        norm: u32,
        /// vec4, inside the place where experts are, or [`NONE`].
        field: u32,
        /// vec4s of a place.
        place: u32,
        /// vec4s from row to row of the source.
        stride: u32,
        /// vec4 where its columns begin.
        offset: u32,
        /// Columns that count.
        width: u32,
        /// Of the norm.
        eps: f32,
        /// MoE layer whose own miss does not halt it, or [`NONE`].
        layer: u32,
        /// 0 the pass's rows; 1 sorted by expert, from the rows that picked it; 2 sorted already.
        listed: u32,
        /// Word where sorted rows begin.
        order: u32,
        /// Unused.
        pad: [u32; 2],
    }
}

params! {
    /// `encode_fuse_params.wgsl`
    EncodeFuse: "prefill_encode" "Params" {
        /// vec4: the norm of the following rows.
        norm: u32,
        /// vec4: the norm of the hidden rows.
        other_norm: u32,
        /// vec4 or [`NONE`].
        field: u32,
        /// vec4s from row to row of both sources.
        stride: u32,
        /// Columns of each half.
        width: u32,
        /// Of the norms.
        eps: f32,
        /// 1: the hidden half first.
        hidden_first: u32,
        /// MoE layer, or [`NONE`].
        layer: u32,
    }
}

params! {
    /// `encode_gate_params.wgsl`
    EncodeGate: "prefill_encode" "Params" {
        /// vec4.
        norm: u32,
        /// vec4 or [`NONE`].
        field: u32,
        /// Floats from row to row of the gate.
        gate_stride: u32,
        /// Channels.
        width: u32,
        /// Of the norm.
        eps: f32,
        /// MoE layer, or [`NONE`].
        layer: u32,
        /// Unused.
        pad: [u32; 2],
    }
}

params! {
    /// `matmat.wgsl`
    Matmat: "prefill_matmat_f32" "Params" {
        /// Rows of the matrix.
        rows: u32,
        /// vec4.
        base: u32,
        /// Word.
        side: u32,
        /// vec4s of a place.
        place: u32,
        /// Floats from row to row of the output.
        stride: u32,
        /// The first float of a row.
        offset: u32,
        /// Where a value goes: 0 its row, 1 added to it, 2 the row's position, 3 the one before, 4 its pick.
        to: u32,
        /// 1: relu² on the way out.
        relu2: u32,
        /// MoE layer whose own miss does not halt it, or [`NONE`].
        layer: u32,
        /// Word where sorted rows begin.
        order: u32,
        /// Unused.
        pad: [u32; 2],
    }
}

params! {
    /// `prefill_route.wgsl`
    PassRoute: "prefill_route" "Params" {
        /// Where logits begin.
        logits: u32,
        /// Word.
        bias: u32,
        /// Where the layer begins in the map.
        map: u32,
        /// 1: weights are normalised.
        norm_topk: u32,
        /// Factor on the weights.
        scale: f32,
        /// Unused.
        pad_a: u32,
        /// Unused.
        pad_b: u32,
        /// Unused.
        pad_c: u32,
    }
}

params! {
    /// `prefill_count.wgsl`
    PassCount: "prefill_count" "Params" {
        /// Word in `counts`.
        at: u32,
        /// Unused.
        pad_a: u32,
        /// Unused.
        pad_b: u32,
        /// Unused.
        pad_c: u32,
    }
}

params! {
    /// `prefill_sort.wgsl`
    PassSort: "prefill_sort" "Params" {
        /// MoE layer.
        layer: u32,
        /// Word where sorted rows begin.
        order: u32,
        /// The first of the places.
        first: u32,
        /// 1: picks that lie elsewhere halt nothing.
        others: u32,
    }
}

params! {
    /// `prefill_sum.wgsl`
    PassSum: "prefill_sum" "Params" {
        /// Floats from row to row.
        stride: u32,
        /// Floats that count.
        width: u32,
        /// 1: nothing is added to the routed sum.
        alone: u32,
        /// 0: every weight is one.
        weighted: u32,
    }
}

params! {
    /// `prefill_conv.wgsl`
    PassConv: "prefill_conv" "Params" {
        /// Word of the taps.
        conv: u32,
        /// Word.
        conv_bias: u32,
        /// Unused.
        pad: [u32; 2],
    }
}

params! {
    /// `prefill_ssd_steps.wgsl`
    SsdSteps: "prefill_ssd_steps" "Params" {
        /// Word.
        a_log: u32,
        /// Word.
        dt_bias: u32,
        /// Lower limit of the step size.
        dt_min: f32,
        /// Upper limit of the step size.
        dt_max: f32,
    }
}

params! {
    /// `prefill_ssd_pass.wgsl`
    SsdPass: "prefill_ssd_pass" "Params" {
        /// vec4s from snapshot to snapshot; 0 where there is one.
        snapshot: u32,
        /// Unused.
        pad_a: u32,
        /// Unused.
        pad_b: u32,
        /// Unused.
        pad_c: u32,
    }
}

params! {
    /// `prefill_ssd_out.wgsl`
    SsdOut: "prefill_ssd_out" "Params" {
        /// Word.
        d_skip: u32,
        /// Unused.
        pad_a: u32,
        /// Unused.
        pad_b: u32,
        /// Unused.
        pad_c: u32,
    }
}

params! {
    /// `prefill_attention.wgsl`
    PassAttention: "prefill_attention" "Params" {
        /// vec4s from row to row of q.
        stride: u32,
        /// vec4 where q begins in its row.
        offset: u32,
        /// `1 / sqrt(head_dim)`
        scale: f32,
        /// Unused.
        pad: u32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::kernels::{Choice, Encoding, Format, KERNELS, Team};
    use crate::device::pass::{Form, PassChoice, Source};

    fn compare<P: Params>() {
        let kernel = KERNELS.iter().find(|k| k.name == P::KERNEL).expect("a kernel");
        let choice = Choice {
            team: Team::Subgroup,
            format: Format::Q8,
            int8: true,
            out: Encoding::Linear,
            rows: 1,
            wide: 1,
            group_norm: true,
            full: false,
            pass: false,
        };
        compare_text::<P>(&kernel.variant(&choice).source());
    }

    fn compare_text<P: Params>(text: &str) {
        let module = naga::front::wgsl::parse_str(text).expect("parses");
        let (_, ty) = module
            .types
            .iter()
            .find(|(_, ty)| ty.name.as_deref() == Some(P::STRUCT))
            .unwrap_or_else(|| panic!("{} has no {}", P::KERNEL, P::STRUCT));
        let naga::TypeInner::Struct { members, span } = &ty.inner else { panic!("{} is no struct", P::STRUCT) };
        let seen: Vec<_> = members.iter().map(|m| (m.name.as_deref().expect("a name"), m.offset as usize)).collect();
        assert_eq!(seen, P::FIELDS, "{} {}", P::KERNEL, P::STRUCT);
        assert_eq!(*span as usize, size_of::<P>(), "{} {}", P::KERNEL, P::STRUCT);
    }

    fn compare_pass<P: Params>(source: Source) {
        let kernel = KERNELS.iter().find(|k| k.name == P::KERNEL).expect("a kernel");
        let choice = PassChoice { format: Format::Q8, form: Form::F32, experts: true, source };
        compare_text::<P>(&kernel.pass_variant(&choice).source());
    }

    #[test]
    fn every_struct_of_a_pass_is_laid_out_as_naga_says() {
        compare_pass::<EncodeRows>(Source::Rows);
        compare_pass::<EncodeGate>(Source::Gate);
        compare_pass::<EncodeFuse>(Source::Fuse);
        compare_pass::<Matmat>(Source::Rows);
        compare_pass::<PassRoute>(Source::Rows);
        compare_pass::<PassCount>(Source::Rows);
        compare_pass::<PassSort>(Source::Rows);
        compare_pass::<PassSum>(Source::Rows);
        compare_pass::<PassConv>(Source::Rows);
        compare_pass::<SsdSteps>(Source::Rows);
        compare_pass::<SsdPass>(Source::Rows);
        compare_pass::<SsdOut>(Source::Rows);
        compare_pass::<PassAttention>(Source::Rows);
    }

    #[test]
    fn every_struct_is_laid_out_as_naga_says() {
        compare::<Flight>();
        compare::<Control>();
        compare::<Segment>();
        compare::<NormProj>();
        compare::<MoeIn>();
        compare::<Route>();
        compare::<ExpertsUp>();
        compare::<ExpertsDown>();
        compare::<ProjAct>();
        compare::<SsmStep>();
        compare::<CloseProj>();
        compare::<AttnSplit>();
        compare::<Head>();
        compare::<PickEmbed>();
        compare::<TakeRows>();
        compare::<Accept>();
        compare::<DraftPick>();
        compare::<DraftRows>();
        compare::<DraftFuse>();
    }
}
