//! `down relu²(up x)`: experts, the shared expert and dense blocks (`model.md` §1.5, §1.6).
//!
//! All of a layer's experts are one parallel region: the tiles of every `up`
//! come first, then those of every `down`. Whoever ends an expert's last `up`
//! tile prepares its inner rows; a `down` tile begins when they are there, which
//! by then nearly always is the case.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::kernels::{Input, Set, cut, prepare_here, split_columns, tile};
use super::math;
use crate::host::Pool;
use crate::knobs::Activations;
use crate::model::weights::MlpWeights;

/// One pair of matrices with the rows that go through it.
pub(crate) struct Job<'a> {
    /// Weights.
    pub(crate) weights: &'a MlpWeights,
    /// Rows prepared for `up`.
    pub(crate) input: &'a Input,
    /// `[n, down.rows()]`
    pub(crate) out: &'a mut [f32],
}

/// Inner rows on their way from `up` to `down`.
struct Inner {
    /// Tiles of `up`, `[n, rows of the tile]` each.
    parts: Vec<(Range<usize>, OnceLock<Vec<f32>>)>,
    /// Tiles not yet there.
    left: AtomicUsize,
    /// Rows prepared for `down`; none if a tile's thread panicked.
    ready: OnceLock<Option<Input>>,
}

impl Inner {
    /// The rows for `down`, once they are there. They nearly are: looking again is quicker than being woken.
    fn wait(&self) -> Option<&Input> {
        /// Some ten microseconds.
        const LOOKS: usize = 1 << 10;
        for _ in 0..LOOKS {
            if let Some(ready) = self.ready.get() {
                return ready.as_ref();
            }
            std::hint::spin_loop();
        }
        self.ready.wait().as_ref()
    }
}

/// Opens the way for waiting threads when the one they wait for panics.
struct Release<'a>(&'a Inner);

impl Drop for Release<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _ = self.0.ready.set(None);
        }
    }
}

enum Item<'a, 'b> {
    Up { job: usize, part: usize },
    Down { job: usize, rows: Range<usize>, out: Vec<&'b mut [f32]>, weights: &'a MlpWeights },
}

/// All pairs, in one parallel region.
pub(crate) fn run(pool: &Pool, act: Activations, jobs: Vec<Job<'_>>) {
    let set = Set::of(pool.isa());
    let bytes = (jobs.iter()).map(|j| j.weights.up.payload().len() + j.weights.down.payload().len()).sum();
    let inners: Vec<Inner> = (jobs.iter())
        .map(|job| {
            let parts: Vec<_> =
                cut(pool, &job.weights.up, bytes).into_iter().map(|rows| (rows, OnceLock::new())).collect();
            Inner { left: AtomicUsize::new(parts.len()), parts, ready: OnceLock::new() }
        })
        .collect();
    let mut items: Vec<Item> = (inners.iter().enumerate())
        .flat_map(|(job, inner)| (0..inner.parts.len()).map(move |part| Item::Up { job, part }))
        .collect();
    let mut given = Vec::with_capacity(jobs.len());
    for (index, Job { weights, input, out }) in jobs.into_iter().enumerate() {
        given.push((weights, input));
        for (rows, out) in split_columns(out, input.n(), &cut(pool, &weights.down, bytes)) {
            items.push(Item::Down { job: index, rows, out, weights });
        }
    }
    pool.each(items, |item| match item {
        Item::Up { job, part } => {
            let (inner, (weights, input)) = (&inners[job], given[job]);
            let _release = Release(inner);
            let (rows, slot) = &inner.parts[part];
            let mut values = vec![0.0; rows.len() * input.n()];
            tile(set, &weights.up, rows.clone(), input, |r, i, y| {
                let values = &mut values[i * rows.len() + r..][..y.len()];
                values.iter_mut().zip(y).for_each(|(value, y)| *value = math::relu2(*y));
            });
            slot.set(values).expect("a tile is computed once");
            // Release and acquire: the last one sees what the others have set.
            if inner.left.fetch_sub(1, Ordering::AcqRel) == 1 {
                let gathered = gather(&inner.parts, input.n(), weights.up.rows());
                let _ = inner.ready.set(Some(prepare_here(set, &weights.down, act, &gathered)));
            }
        }
        Item::Down { job, rows, mut out, weights } => {
            // Begun after every `up` tile was begun by somebody, so nobody waits for work that nobody does.
            if let Some(input) = inners[job].wait() {
                tile(set, &weights.down, rows, input, |r, i, y| out[i][r..r + y.len()].copy_from_slice(y));
            }
        }
    });
}

/// The parts of `up`'s output as `[n, width]`.
fn gather(parts: &[(Range<usize>, OnceLock<Vec<f32>>)], n: usize, width: usize) -> Vec<f32> {
    let mut whole = vec![0.0; n * width];
    for (rows, part) in parts {
        let part = part.get().expect("all tiles are there");
        for (to, from) in whole.chunks_exact_mut(width).zip(part.chunks_exact(rows.len())) {
            to[rows.clone()].copy_from_slice(from);
        }
    }
    whole
}
