//! Forced alignment by CTC: when was each token of a known sequence said?
//!
//! Viterbi over the states `blank, token 0, blank, token 1, .., blank`. A row stays in its state,
//! goes to the next one, or skips the blank between two tokens that differ. Memory stays linear in
//! rows plus states: scores are kept at the start of every segment of rows, and the back pointers
//! are computed again, segment by segment, from the end.

use std::ops::RangeInclusive;

/// Back pointers held at a time.
const SEGMENT_CELLS: usize = 16 << 20;

/// Emissions of the rows an alignment runs over, in natural logarithms.
pub(crate) trait Emissions {
    /// Rows.
    fn rows(&self) -> usize;
    /// Of the blank in a row.
    fn blank(&self, row: usize) -> f32;
    /// Of the classes in a row: to be added to each, and each.
    fn classes(&self, row: usize) -> (f32, &[f32]);
}

/// First and last row of each of `tokens` on the best path, or `None` where the rows do not suffice.
///
/// On ties the path moves on as late as it can.
pub(crate) fn align(tokens: &[usize], emissions: &impl Emissions) -> Option<Vec<RangeInclusive<usize>>> {
    align_in_segments(tokens, emissions, SEGMENT_CELLS)
}

fn align_in_segments(
    tokens: &[usize],
    emissions: &impl Emissions,
    segment_cells: usize,
) -> Option<Vec<RangeInclusive<usize>>> {
    let rows = emissions.rows();
    let repeats = tokens.windows(2).filter(|pair| pair[0] == pair[1]).count();
    if tokens.is_empty() || rows < tokens.len() + repeats {
        return tokens.is_empty().then(Vec::new);
    }
    let trellis = Trellis { tokens, emissions };
    let states = 2 * tokens.len() + 1;
    let segment = (segment_cells / states).clamp(1, rows);

    // Scores before row 0: as if a blank had been in state 0.
    let mut scores = vec![f64::NEG_INFINITY; states];
    scores[0] = 0.0;
    let mut starts = Vec::with_capacity(rows.div_ceil(segment));
    let mut back = vec![0u8; states];
    for first in (0..rows).step_by(segment) {
        starts.push(scores.clone());
        if first + segment < rows {
            for row in first..first + segment {
                trellis.row(row, &mut scores, &mut back);
            }
        }
    }
    let mut spans: Vec<Option<RangeInclusive<usize>>> = vec![None; tokens.len()];
    let mut state = usize::MAX;
    let mut segment_back = Vec::new();
    for (index, mut scores) in starts.into_iter().enumerate().rev() {
        let range = index * segment..((index + 1) * segment).min(rows);
        segment_back.resize(range.len() * states, 0);
        for (row, back) in range.clone().zip(segment_back.chunks_exact_mut(states)) {
            trellis.row(row, &mut scores, back);
        }
        if state == usize::MAX {
            state = if scores[states - 1] >= scores[states - 2] { states - 1 } else { states - 2 };
        }
        for (row, back) in range.zip(segment_back.chunks_exact(states)).rev() {
            if state % 2 == 1 {
                let span = &mut spans[state / 2];
                let last = span.as_ref().map_or(row, |s| *s.end());
                *span = Some(row..=last);
            }
            state -= usize::from(back[state]);
        }
    }
    spans.into_iter().collect()
}

struct Trellis<'a, E> {
    tokens: &'a [usize],
    emissions: &'a E,
}

impl<E: Emissions> Trellis<'_, E> {
    /// Moves `scores` on by one row; `back` says how many states each came from below.
    fn row(&self, row: usize, scores: &mut [f64], back: &mut [u8]) {
        let rows = self.emissions.rows();
        let states = scores.len();
        // States that can be reached by now, and from which the end can still be reached.
        let high = (2 * row + 2).min(states);
        let low = states.saturating_sub(2 * (rows - row)).min(high);
        let blank = f64::from(self.emissions.blank(row));
        let (all, classes) = self.emissions.classes(row);
        for state in (low..high).rev() {
            let (mut best, mut step) = (scores[state], 0);
            if state >= 1 && scores[state - 1] > best {
                (best, step) = (scores[state - 1], 1);
            }
            let emission = if state % 2 == 1 {
                let token = self.tokens[state / 2];
                if state >= 3 && token != self.tokens[state / 2 - 1] && scores[state - 2] > best {
                    (best, step) = (scores[state - 2], 2);
                }
                f64::from(all + classes[token])
            } else {
                blank
            };
            scores[state] = best + emission;
            back[state] = step;
        }
        // States below can no longer reach the end and are read only by those at `low`.
        scores[..low].fill(f64::NEG_INFINITY);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Table {
        classes: usize,
        values: Vec<f32>,
    }

    impl Emissions for Table {
        fn rows(&self) -> usize {
            self.values.len() / self.classes
        }
        fn blank(&self, row: usize) -> f32 {
            self.values[row * self.classes]
        }
        fn classes(&self, row: usize) -> (f32, &[f32]) {
            (0.0, &self.values[row * self.classes..(row + 1) * self.classes])
        }
    }

    impl Table {
        fn class(&self, row: usize, class: usize) -> f32 {
            self.classes(row).1[class]
        }
    }

    fn table(rows: usize, classes: usize, seed: u64) -> Table {
        let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut next = || {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            -((x >> 40) as f32) / (1 << 22) as f32
        };
        Table { classes, values: (0..rows * classes).map(|_| next()).collect() }
    }

    /// Score of the best of all paths, by trying each.
    fn best_by_search(tokens: &[usize], table: &Table, row: usize, state: usize) -> f64 {
        let states = 2 * tokens.len() + 1;
        if row == table.rows() {
            return if state + 2 >= states { 0.0 } else { f64::NEG_INFINITY };
        }
        (0..=2)
            .map(|step| (state + step, step))
            .filter(|(to, step)| {
                *to < states
                    && (*step < 2 || (to % 2 == 1 && (to / 2 == 0 || tokens[to / 2] != tokens[to / 2 - 1])))
                    && (*step < 2 || *to > 1)
            })
            .map(|(to, _)| {
                let class = if to % 2 == 1 { tokens[to / 2] } else { 0 };
                f64::from(table.class(row, class)) + best_by_search(tokens, table, row + 1, to)
            })
            .fold(f64::NEG_INFINITY, f64::max)
    }

    /// Score of the path that spans describe.
    fn score(tokens: &[usize], table: &Table, spans: &[RangeInclusive<usize>]) -> f64 {
        (0..table.rows())
            .map(|row| {
                let token = spans.iter().position(|s| s.contains(&row));
                f64::from(token.map_or(table.blank(row), |t| table.class(row, tokens[t])))
            })
            .sum()
    }

    #[test]
    fn finds_the_best_path() {
        for (rows, tokens) in [
            (1, vec![1]),
            (2, vec![1, 2]),
            (3, vec![1, 1]),
            (7, vec![2, 2, 1]),
            (8, vec![1, 2, 3]),
            (9, vec![3, 3, 3, 3, 1]),
            (9, vec![1]),
        ] {
            for seed in 0..20 {
                let table = table(rows, 4, seed);
                let spans = align(&tokens, &table).unwrap();
                assert!(spans.windows(2).all(|s| s[0].end() < s[1].start()), "{spans:?}");
                let (seen, want) = (score(&tokens, &table, &spans), best_by_search(&tokens, &table, 0, 0));
                assert!((seen - want).abs() < 1e-9, "{rows} {tokens:?} {seed}: {seen} {want}");
            }
        }
    }

    #[test]
    fn segments_do_not_change_the_path() {
        let tokens: Vec<usize> = (0..30).map(|i| 1 + i * i % 5).collect();
        let table = table(131, 6, 9);
        let whole = align(&tokens, &table).unwrap();
        for rows in [1, 2, 7, 64, 130] {
            assert_eq!(align_in_segments(&tokens, &table, rows * 61).unwrap(), whole);
        }
    }

    #[test]
    fn too_few_rows_have_no_alignment() {
        assert!(align(&[1, 1], &table(2, 3, 1)).is_none());
        assert!(align(&[1, 2], &table(1, 3, 1)).is_none());
        assert!(align(&[1], &table(0, 3, 1)).is_none());
        assert_eq!(align(&[], &table(4, 3, 1)), Some(vec![]));
    }
}
