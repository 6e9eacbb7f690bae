//! Attention blocks (`model.md` §1.3): causal, no positions.
//!
//! Keys are taken in tiles that begin at multiples of [`TILE`]; a tile gives a
//! maximum, a sum and a weighted value row, and tiles are merged in order. So a
//! row's result depends on its keys alone, memory does not grow with the
//! context beyond the KV itself, and a long context is spread over threads.

use super::kernels::{Job, Set, prepare, run};
use super::math;
use crate::host::Pool;
use crate::knobs::Activations;
use crate::model::geometry::AttentionGeometry;
use crate::model::state::KvState;
use crate::model::weights::AttentionWeights;

/// Keys of a tile.
pub(crate) const TILE: usize = 128;
/// Rows of a task: they share the reading of the keys.
const ROWS: usize = 8;

/// Mixer output `[n, hidden]` for normed rows `[n, hidden]`; their keys and values are appended.
pub(crate) fn mix(
    pool: &Pool,
    geometry: &AttentionGeometry,
    weights: &AttentionWeights,
    act: Activations,
    normed: &[f32],
    kv: &mut KvState,
) -> Vec<f32> {
    let n = normed.len() / weights.q.cols();
    let (q_width, kv_width) = (geometry.q_width(), geometry.kv_width());
    let past = kv.k.len() / kv_width;
    let mut q = vec![0.0; n * q_width];
    kv.k.resize((past + n) * kv_width, 0.0);
    kv.v.resize((past + n) * kv_width, 0.0);
    let inputs = [&weights.q, &weights.k, &weights.v].map(|matrix| prepare(pool, matrix, act, normed));
    let jobs = vec![
        Job { matrix: &weights.q, input: &inputs[0], out: &mut q },
        Job { matrix: &weights.k, input: &inputs[1], out: &mut kv.k[past * kv_width..] },
        Job { matrix: &weights.v, input: &inputs[2], out: &mut kv.v[past * kv_width..] },
    ];
    run(pool, jobs);

    let mixed = attend(pool, geometry, &q, kv, past);

    let mut out = vec![0.0; n * weights.o.rows()];
    let input = prepare(pool, &weights.o, act, &mixed);
    run(pool, vec![Job { matrix: &weights.o, input: &input, out: &mut out }]);
    out
}

/// What one tile, or several merged ones, give for a query.
#[derive(Clone)]
pub(crate) struct Partial {
    pub(crate) max: f32,
    pub(crate) sum: f32,
    /// `[head_dim]`
    pub(crate) acc: Vec<f32>,
}

impl Partial {
    fn empty(head_dim: usize) -> Self {
        Self { max: f32::NEG_INFINITY, sum: 0.0, acc: vec![0.0; head_dim] }
    }

    /// Adds a later tile's part.
    fn merge(&mut self, tile: &Partial) {
        // A NaN in a score must stay one: `f32::max` would drop it.
        let max = if tile.max > self.max || tile.max.is_nan() { tile.max } else { self.max };
        let (old, new) = (math::exp(self.max - max), math::exp(tile.max - max));
        self.max = max;
        self.sum = self.sum * old + tile.sum * new;
        for (acc, tile) in self.acc.iter_mut().zip(&tile.acc) {
            *acc = *acc * old + tile * new;
        }
    }
}

/// Causal attention of queries `[n, heads, head_dim]` at positions `past …`, over `kv`.
fn attend(pool: &Pool, geometry: &AttentionGeometry, q: &[f32], kv: &KvState, past: usize) -> Vec<f32> {
    let (width, dim) = (geometry.q_width(), geometry.head_dim);
    let n = q.len() / width;
    let tiles = (past + n).div_ceil(TILE);
    let mut out = vec![0.0; n * width];
    let blocks = n.div_ceil(ROWS);
    let set = Set::of(pool.isa());
    // With few rows the tiles are spread over the threads, with many the rows.
    if tiles > 1 && blocks * geometry.kv_heads < 4 * pool.threads() {
        let mut parts: Vec<Option<Vec<Partial>>> = vec![None; blocks * geometry.kv_heads * tiles];
        let work = parts.iter_mut().enumerate().collect();
        pool.each(work, |(i, part): (usize, &mut Option<Vec<Partial>>)| {
            let (block, head, t) = (i / (geometry.kv_heads * tiles), i / tiles % geometry.kv_heads, i % tiles);
            *part = Some(Tile { q, kv, geometry, past, first: block * ROWS, kv_head: head, t }.attend(set));
        });
        for (i, parts) in parts.chunks(tiles).enumerate() {
            let mut sums: Option<Vec<Partial>> = None;
            for part in parts.iter().flatten() {
                merge(&mut sums, part, dim);
            }
            let sums = sums.unwrap_or_default();
            finish(
                geometry,
                &sums,
                |row, head, value| {
                    let at = (i / geometry.kv_heads * ROWS + row) * width + head * dim;
                    out[at..at + dim].copy_from_slice(value);
                },
                i % geometry.kv_heads,
            );
        }
        return out;
    }
    let mut work = Vec::new();
    for (block, rows) in out.chunks_mut(ROWS * width).enumerate() {
        let mut heads: Vec<Vec<&mut [f32]>> = (0..geometry.kv_heads).map(|_| Vec::new()).collect();
        for row in rows.chunks_exact_mut(width) {
            for (head, part) in row.chunks_exact_mut(width / geometry.kv_heads).enumerate() {
                heads[head].push(part);
            }
        }
        work.extend(heads.into_iter().enumerate().map(|(head, rows)| (block, head, rows)));
    }
    // The last rows have the most keys: longest work first.
    work.reverse();
    pool.each(work, |(block, head, mut rows)| {
        let mut sums: Option<Vec<Partial>> = None;
        for t in 0..tiles {
            let tile = Tile { q, kv, geometry, past, first: block * ROWS, kv_head: head, t };
            merge(&mut sums, &tile.attend(set), dim);
        }
        let share = geometry.heads / geometry.kv_heads;
        finish(
            geometry,
            &sums.unwrap_or_default(),
            |row, query_head, value| {
                let at = (query_head - head * share) * dim;
                rows[row][at..at + dim].copy_from_slice(value);
            },
            head,
        );
    });
    out
}

/// Merges a tile's partials into those of the tiles before it.
fn merge(sums: &mut Option<Vec<Partial>>, tile: &[Partial], dim: usize) {
    let sums = sums.get_or_insert_with(|| vec![Partial::empty(dim); tile.len()]);
    for (sum, tile) in sums.iter_mut().zip(tile) {
        // A tile wholly in a row's future has no part in it.
        if tile.sum != 0.0 {
            sum.merge(tile);
        }
    }
}

/// Gives each row's and query head's value, divided by its sum.
fn finish(geometry: &AttentionGeometry, sums: &[Partial], mut give: impl FnMut(usize, usize, &[f32]), kv_head: usize) {
    let share = geometry.heads / geometry.kv_heads;
    let mut value = vec![0.0; geometry.head_dim];
    for (i, sum) in sums.iter().enumerate() {
        for (value, acc) in value.iter_mut().zip(&sum.acc) {
            *value = acc / sum.sum;
        }
        give(i / share, kv_head * share + i % share, &value);
    }
}

/// One tile of keys for some rows and the query heads that share a KV head.
pub(crate) struct Tile<'a> {
    /// `[n, heads, head_dim]`
    q: &'a [f32],
    kv: &'a KvState,
    geometry: &'a AttentionGeometry,
    /// Keys before the first query's own.
    past: usize,
    /// The first of up to [`ROWS`] rows.
    first: usize,
    kv_head: usize,
    /// Keys `t · TILE …`.
    t: usize,
}

impl<'a> Tile<'a> {
    /// Partials `[rows, heads that share the KV head]`.
    fn attend(&self, set: &Set) -> Vec<Partial> {
        let n = self.q.len() / self.geometry.q_width();
        let rows = (n - self.first).min(ROWS);
        let mut partials = vec![Partial::empty(self.head_dim()); rows * self.share()];
        (set.attend)(self, &mut partials);
        partials
    }

    /// Values of a head.
    pub(crate) fn head_dim(&self) -> usize {
        self.geometry.head_dim
    }

    /// Query heads that share the KV head.
    pub(crate) fn share(&self) -> usize {
        self.geometry.heads / self.geometry.kv_heads
    }

    /// What scores are multiplied by.
    pub(crate) fn factor(&self) -> f32 {
        1.0 / (self.head_dim() as f32).sqrt()
    }

    /// How many of the tile's keys the row at `row` of those asked for may see.
    pub(crate) fn keys(&self, row: usize) -> usize {
        (self.past + self.first + row + 1).saturating_sub(self.t * TILE).min(TILE)
    }

    /// A row's query for one of the sharing heads.
    pub(crate) fn query(&self, row: usize, head: usize) -> &'a [f32] {
        let at = (self.first + row) * self.geometry.q_width() + (self.kv_head * self.share() + head) * self.head_dim();
        &self.q[at..at + self.head_dim()]
    }

    /// The tile's key number `j`.
    pub(crate) fn key(&self, j: usize) -> &'a [f32] {
        &self.kv.k[self.line(j)..][..self.head_dim()]
    }

    /// The tile's value number `j`.
    pub(crate) fn value(&self, j: usize) -> &'a [f32] {
        &self.kv.v[self.line(j)..][..self.head_dim()]
    }

    fn line(&self, j: usize) -> usize {
        (self.t * TILE + j) * self.geometry.kv_width() + self.kv_head * self.head_dim()
    }
}

/// Fills the partials of one tile.
#[inline(always)]
pub(crate) fn attend_body(tile: &Tile<'_>, partials: &mut [Partial]) {
    let (share, factor) = (tile.share(), tile.factor());
    let mut scores = [0.0f32; TILE];
    for (i, partial) in partials.iter_mut().enumerate() {
        let keys = tile.keys(i / share);
        if keys == 0 {
            continue;
        }
        let query = tile.query(i / share, i % share);
        let scores = &mut scores[..keys];
        for (j, score) in scores.iter_mut().enumerate() {
            *score = math::dot(query, tile.key(j)) * factor;
        }
        weigh(scores, partial);
        for (j, weight) in scores.iter().enumerate() {
            for (acc, v) in partial.acc.iter_mut().zip(tile.value(j)) {
                *acc += weight * v;
            }
        }
    }
}

/// Turns a tile's scores into weights below its largest, and notes that and their sum.
#[inline(always)]
pub(crate) fn weigh(scores: &mut [f32], partial: &mut Partial) {
    for score in scores.iter() {
        // A NaN must stay one: `f32::max` would drop it.
        if *score > partial.max || score.is_nan() {
            partial.max = *score;
        }
    }
    for score in scores.iter_mut() {
        *score = math::exp(*score - partial.max);
    }
    partial.sum = math::sum(scores);
}

/// Appends the keys and values of normed rows `[n, hidden]`, computing no output.
pub(crate) fn remember(pool: &Pool, weights: &AttentionWeights, act: Activations, normed: &[f32], kv: &mut KvState) {
    let (n, width) = (normed.len() / weights.k.cols(), weights.k.rows());
    let past = kv.k.len();
    kv.k.resize(past + n * width, 0.0);
    kv.v.resize(past + n * width, 0.0);
    let inputs = [&weights.k, &weights.v].map(|matrix| prepare(pool, matrix, act, normed));
    let jobs = vec![
        Job { matrix: &weights.k, input: &inputs[0], out: &mut kv.k[past..] },
        Job { matrix: &weights.v, input: &inputs[1], out: &mut kv.v[past..] },
    ];
    run(pool, jobs);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::Isa;

    fn values(len: usize, seed: usize) -> Vec<f32> {
        (0..len).map(|i| ((i * 7919 + seed * 104_729) % 2003) as f32 / 1000.0 - 1.0).collect()
    }

    /// Attention with f64 sums, straight from the formula.
    fn plain(geometry: &AttentionGeometry, q: &[f32], kv: &KvState, past: usize) -> Vec<f32> {
        let (dim, share) = (geometry.head_dim, geometry.heads / geometry.kv_heads);
        let mut out = Vec::with_capacity(q.len());
        for (row, q) in q.chunks_exact(geometry.q_width()).enumerate() {
            for (head, q) in q.chunks_exact(dim).enumerate() {
                let line = |j: usize| j * geometry.kv_width() + head / share * dim;
                let scores: Vec<f64> = (0..past + row + 1)
                    .map(|j| {
                        q.iter().zip(&kv.k[line(j)..]).map(|(q, k)| f64::from(q * k)).sum::<f64>() / (dim as f64).sqrt()
                    })
                    .collect();
                let top = scores.iter().copied().fold(f64::MIN, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
                let sum: f64 = weights.iter().sum();
                for d in 0..dim {
                    let value: f64 = weights.iter().enumerate().map(|(j, w)| w * f64::from(kv.v[line(j) + d])).sum();
                    out.push((value / sum) as f32);
                }
            }
        }
        out
    }

    /// Every set's attention is the formula's, whatever the heads that share keys, and a row does not depend on its company.
    #[test]
    fn every_attention_agrees() {
        for (heads, kv_heads, head_dim) in [(4, 1, 128), (6, 2, 64), (5, 1, 128), (2, 2, 16), (3, 3, 64)] {
            let geometry = AttentionGeometry { heads, kv_heads, head_dim };
            for (past, n) in [(0, 1), (0, 9), (127, 1), (128, 3), (300, 1), (120, 21)] {
                let kv = KvState {
                    k: values((past + n) * geometry.kv_width(), 1),
                    v: values((past + n) * geometry.kv_width(), 2),
                };
                let q: Vec<f32> = values(n * geometry.q_width(), 3).iter().map(|q| 3.0 * q).collect();
                let wanted = plain(&geometry, &q, &kv, past);
                for isa in Isa::present() {
                    let pool = Pool::with_isa(2, isa);
                    let seen = attend(&pool, &geometry, &q, &kv, past);
                    for (seen, wanted) in seen.iter().zip(&wanted) {
                        assert!((seen - wanted).abs() < 1e-5, "{isa} {geometry:?} {past} {n}: {seen} for {wanted}");
                    }
                    let width = geometry.q_width();
                    for row in 0..n {
                        let alone = KvState {
                            k: kv.k[..(past + row + 1) * geometry.kv_width()].to_vec(),
                            v: kv.v[..(past + row + 1) * geometry.kv_width()].to_vec(),
                        };
                        let alone = attend(&pool, &geometry, &q[row * width..(row + 1) * width], &alone, past + row);
                        assert_eq!(alone, seen[row * width..(row + 1) * width], "{isa} row {row}");
                    }
                }
            }
        }
    }
}
