//! A block of weight rows woven together, so that a vector holds four columns of each row.
//!
//! Sums go by lanes of the columns' groups as everywhere (`body.rs`): the same bits come out whichever kernel ran.

use super::input::LANES;
use super::set::BLOCK;

/// Bytes of a vector: four columns of each row of a block.
pub(crate) const VECTOR: usize = 4 * BLOCK;
/// Vectors of a group of columns.
pub(crate) const VECTORS: usize = 8;

/// A block of weight rows for products with many activation rows.
#[derive(Default)]
pub(crate) struct Packed {
    /// Whether the rows are q4tp's: each group's even columns come first, and it has scales.
    pub(crate) split: bool,
    /// `[groups, 8]` vectors of unsigned codes: what [`Codes::offsets`](super::input::Codes) takes off is in them.
    pub(crate) codes: Vec<[[u8; VECTOR]; VECTORS]>,
    /// `[groups]`: each row's scale; empty for q8_2f.
    pub(crate) scales: Vec<[f32; BLOCK]>,
}

impl Packed {
    /// The lanes of groups that are in use, in the order in which [`crate::host::math::tree`] can add them pair by pair
    /// with the fewest sums waiting: counting with the bits reversed. The other lanes are zero and change nothing.
    pub(crate) fn lanes(&self) -> impl Iterator<Item = usize> + use<> {
        let lanes = self.codes.len().next_power_of_two().min(LANES);
        let bits = lanes.trailing_zeros();
        (0..lanes).map(move |i| if bits == 0 { 0 } else { i.reverse_bits() >> (usize::BITS - bits) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_come_in_the_order_of_the_tree() {
        let lanes = |groups| {
            let packed = Packed { codes: vec![[[0; VECTOR]; VECTORS]; groups], ..Packed::default() };
            packed.lanes().collect::<Vec<_>>()
        };
        assert_eq!(lanes(1), [0]);
        assert_eq!(lanes(3), [0, 2, 1, 3]);
        assert_eq!(lanes(84), [0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15]);
    }
}
