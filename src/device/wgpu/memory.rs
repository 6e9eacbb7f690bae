//! How much of a device's memory experts may have, and how many positions of keys and values (`runtime.md` §4, §5).

use super::adapter::{Context, Heap};
use super::decode::RING;
use super::slot::ROWS;
use super::{prefill, weights};
use crate::model::geometry::{BlockKind, Geometry};
use crate::model::weights::DecoderWeights;

const GIB: u64 = 1 << 30;

/// Positions that a session can hold unless somebody says otherwise.
const POSITIONS: usize = 65_536;

/// The same where memory is shared with the processor, and what experts that do not fit leave.
pub const POSITIONS_SHARED: usize = 20_480;

/// What does not depend on the model: ids, records, scratch of a step.
const SMALL_BYTES: u64 = 64 << 20;

/// States that a session keeps where drafts are verified: one a row of the longest round.
const SNAPSHOTS: usize = 5;

/// What is left to everybody else: an eighth of what is free, 2.5 GiB at least and 4 GiB at most.
#[must_use]
pub fn reserve_bytes(free_bytes: u64) -> u64 {
    (free_bytes / 8).clamp(5 * GIB / 2, 4 * GIB)
}

/// What the model's shapes and the session's sizes take, experts aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fixed {
    /// Weights that every token reads, head and embedding.
    pub dense_bytes: u64,
    /// Buffers of a prefill pass.
    pub pass_bytes: u64,
    /// States of all sessions.
    pub state_bytes: u64,
    /// Keys and values of one position in all sessions.
    pub position_bytes: u64,
    /// Keys and values of one position in one block of a session.
    pub row_bytes: u64,
    /// Staging of uploads.
    pub staging_bytes: u64,
}

impl Fixed {
    /// Of a model, for `slots` sessions and passes of `rows`; with drafts, which keep a state for each row of a round and
    /// keys and values of their own.
    #[must_use]
    pub fn new(
        geometry: &Geometry,
        decoder: &DecoderWeights,
        slots: usize,
        rows: usize,
        staging_bytes: u64,
        drafts: bool,
    ) -> Self {
        let drafts = drafts && decoder.draft.is_some();
        let snapshots = if drafts { SNAPSHOTS } else { 1 };
        let count = |kind| geometry.blocks_of(kind).count();
        let state = geometry.mamba.map_or(0, |g| g.ssm_state_len() + RING * g.conv_channels());
        let kv = geometry.attention.map_or(0, |g| 2 * g.kv_width());
        let bytes = |floats: usize| 4 * (slots * floats) as u64;
        let places = geometry.moe.filter(|_| geometry.decoder_layers() > 0).map(|moe| moe.experts);
        Self {
            dense_bytes: weights::dense_bytes(geometry, decoder),
            pass_bytes: prefill::bytes(geometry, places, rows),
            state_bytes: bytes(count(BlockKind::Mamba) * snapshots * state),
            position_bytes: bytes((count(BlockKind::Attention) + usize::from(drafts)) * kv),
            row_bytes: 4 * kv as u64,
            staging_bytes,
        }
    }

    fn bytes(&self, positions: usize) -> u64 {
        let kv = self.position_bytes * positions as u64;
        self.dense_bytes + self.pass_bytes + self.state_bytes + kv + self.staging_bytes + SMALL_BYTES
    }
}

/// What was decided, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Budget {
    /// For experts; `None` is enough for all.
    pub expert_bytes: Option<u64>,
    /// KV positions of a session.
    pub positions: usize,
    /// How that came about, for the log.
    pub why: String,
}

/// What the knobs say of memory.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    /// `CMF_NEMO_EXPERT_GB`, in bytes.
    pub expert_bytes: Option<u64>,
    /// `CMF_NEMO_CTX`
    pub positions: Option<usize>,
}

/// Shares the device's memory out. `all_bytes` is what all experts take, `max_positions` the model's own bound.
#[must_use]
pub fn budget(context: &Context, fixed: &Fixed, asked: Asked, all_bytes: u64, max_positions: usize) -> Budget {
    let limits = &context.limits;
    let holds = bindable(limits.max_buffer_size.min(limits.max_storage_buffer_binding_size), fixed.row_bytes);
    let mut budget = share(
        context.heap.filter(|_| !context.is_software()),
        context.shares_memory(),
        fixed,
        asked,
        all_bytes,
        max_positions.min(holds),
    );
    if asked.positions.is_none() && budget.positions == holds {
        budget.why += "; a binding holds no more positions";
    }
    budget
}

/// KV positions that a binding of `binding_bytes` holds beside the rows of a verify pass that may lie behind them.
fn bindable(binding_bytes: u64, row_bytes: u64) -> usize {
    let rows = binding_bytes.checked_div(row_bytes).unwrap_or(u64::MAX);
    usize::try_from(rows).unwrap_or(usize::MAX).saturating_sub(ROWS)
}

fn share(
    heap: Option<Heap>,
    shared: bool,
    fixed: &Fixed,
    asked: Asked,
    all_bytes: u64,
    max_positions: usize,
) -> Budget {
    let gb = |bytes: u64| bytes as f64 / 1e9;
    let usual = if shared { POSITIONS_SHARED } else { POSITIONS };
    let mut positions = asked.positions.unwrap_or(usual).min(max_positions.max(asked.positions.unwrap_or(0)));
    let mut why = match (asked.positions, shared) {
        (Some(_), _) => "positions as asked for".to_owned(),
        (None, true) => format!("{positions} positions: the memory is the processor's too"),
        (None, false) => format!("{positions} positions"),
    };
    if let Some(bytes) = asked.expert_bytes {
        why += &format!("; {:.1} GB for experts as asked for", gb(bytes));
        return Budget { expert_bytes: Some(bytes), positions, why };
    }
    let Some(heap) = heap else {
        why += "; nothing is known of the device's memory: all experts are taken to fit";
        return Budget { expert_bytes: None, positions, why };
    };
    let free = heap.free_bytes.unwrap_or(heap.bytes);
    let room = free.saturating_sub(reserve_bytes(free));
    if asked.positions.is_none() && room < fixed.bytes(positions) + all_bytes && positions > POSITIONS_SHARED {
        // as many as leave room for all experts, but no fewer than the least
        let over = fixed.bytes(positions) + all_bytes - room;
        let less = over.div_ceil(fixed.position_bytes.max(1)).min(positions as u64) as usize;
        positions = (positions - less).max(POSITIONS_SHARED);
        why = format!("{positions} positions: more would cost places of experts");
    }
    let left = room.saturating_sub(fixed.bytes(positions));
    why += &format!(
        "; {:.1} GB {} less {:.1} kept free and {:.1} for the rest leave {:.1} for experts",
        gb(free),
        if heap.free_bytes.is_some() { "free" } else { "in all" },
        gb(free - room),
        gb(fixed.bytes(positions)),
        gb(left),
    );
    Budget { expert_bytes: Some(left), positions, why }
}

/// What a heap is, for people.
#[must_use]
pub fn told(heap: Option<Heap>) -> String {
    let gb = |bytes: u64| bytes as f64 / 1e9;
    match heap {
        None => "unknown: all experts are taken to fit".into(),
        Some(Heap { bytes, free_bytes: None }) => {
            format!("{:.1} GB, what is free of it unknown, {:.1} GB kept free", gb(bytes), gb(reserve_bytes(bytes)))
        }
        Some(Heap { bytes, free_bytes: Some(free) }) => {
            format!(
                "{:.1} GB, {:.1} GB free, of which {:.1} GB are kept free",
                gb(bytes),
                gb(free),
                gb(reserve_bytes(free))
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIXED: Fixed = Fixed {
        dense_bytes: 3 << 30,
        pass_bytes: 1 << 30,
        state_bytes: 1 << 27,
        position_bytes: 24_576,
        row_bytes: 2048,
        staging_bytes: 256_000_000,
    };
    const NOTHING: Asked = Asked { expert_bytes: None, positions: None };
    const ALL: u64 = 16_000_000_000;

    fn heap(gb: u64) -> Option<Heap> {
        Some(Heap { bytes: 2 * gb * 1_000_000_000, free_bytes: Some(gb * 1_000_000_000) })
    }

    #[test]
    fn a_binding_holds_its_positions_and_the_rows_behind_them() {
        // 128 MiB, keys and values of 2 heads of 128
        let positions = bindable(1 << 27, 2048);
        assert_eq!(positions, 65_536 - ROWS);
        assert!((positions + ROWS) as u64 * 2048 <= 1 << 27);
        assert_eq!((bindable(0, 2048), bindable(1 << 27, 0)), (0, usize::MAX - ROWS));
    }

    #[test]
    fn a_large_card_takes_everything() {
        let budget = share(heap(80), false, &FIXED, NOTHING, ALL, 262_144);
        assert_eq!(budget.positions, 65_536);
        assert!(budget.expert_bytes > Some(ALL), "{budget:?}");
    }

    #[test]
    fn positions_give_way_to_experts_as_far_as_needed() {
        let budget = share(heap(25), false, &FIXED, NOTHING, ALL, 262_144);
        assert!((POSITIONS_SHARED..65_536).contains(&budget.positions), "{budget:?}");
        assert!(budget.expert_bytes >= Some(ALL), "{budget:?}");
        let least = share(heap(12), false, &FIXED, NOTHING, ALL, 262_144);
        assert_eq!(least.positions, POSITIONS_SHARED);
        assert!(least.expert_bytes < Some(ALL) && least.expert_bytes > Some(0), "{least:?}");
        let none = share(heap(4), false, &FIXED, NOTHING, ALL, 262_144);
        assert_eq!(none.expert_bytes, Some(0));
    }

    #[test]
    fn what_is_asked_for_is_given() {
        let asked = Asked { expert_bytes: Some(8_000_000_000), positions: Some(1000) };
        let budget = share(heap(12), false, &FIXED, asked, ALL, 262_144);
        assert_eq!((budget.expert_bytes, budget.positions), (Some(8_000_000_000), 1000));
        let more = Asked { positions: Some(300_000), ..NOTHING };
        assert_eq!(share(heap(80), false, &FIXED, more, ALL, 262_144).positions, 300_000);
    }

    #[test]
    fn shared_memory_and_small_models_hold_fewer_positions_and_say_why() {
        let budget = share(heap(80), true, &FIXED, NOTHING, ALL, 262_144);
        assert_eq!(budget.positions, POSITIONS_SHARED);
        assert!(budget.why.contains("processor"), "{}", budget.why);
        assert_eq!(share(heap(80), false, &FIXED, NOTHING, ALL, 4096).positions, 4096);
        let unknown = share(None, false, &FIXED, NOTHING, ALL, 4096);
        assert_eq!(unknown.expert_bytes, None);
        assert!(unknown.why.contains("nothing is known"));
    }

    #[test]
    fn the_reserve_is_an_eighth_within_limits() {
        assert_eq!(reserve_bytes(0), 5 * GIB / 2);
        assert_eq!(reserve_bytes(24 * GIB), 3 * GIB);
        assert_eq!(reserve_bytes(140 * GIB), 4 * GIB);
    }
}
