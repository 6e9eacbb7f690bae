//! Random numbers that are a pure function of seed, stream and index, so that threads share no state.

/// What steps between the states of [`Random`].
const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// The finaliser of SplitMix64 (Steele, Lea and Flood 2014): a bijection that leaves no pattern of its input.
pub(super) const fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ (word >> 31)
}

/// The `index`-th word of a stream.
pub(super) const fn word(key: u64, index: u64) -> u64 {
    mix(key.wrapping_add(index.wrapping_mul(STEP)))
}

/// A stream of random numbers.
#[derive(Clone, Debug)]
pub(super) struct Random(u64);

impl Random {
    /// The stream of this name.
    pub(super) fn new(seed: u64, stream: &str) -> Self {
        Self(stream.bytes().fold(mix(seed), |state, byte| mix(state ^ u64::from(byte))))
    }

    pub(super) fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        mix(self.0)
    }

    /// Uniform in `[0, 1)`.
    pub(super) fn unit(&mut self) -> f64 {
        unit(self.word())
    }

    /// Standard normal, by Box and Muller's transform.
    pub(super) fn normal(&mut self) -> f32 {
        let (radius, angle) = (1.0 - self.unit(), std::f64::consts::TAU * self.unit());
        ((-2.0 * radius.ln()).sqrt() * angle.cos()) as f32
    }

    /// Fisher and Yates' shuffle.
    pub(super) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, (self.word() % (last as u64 + 1)) as usize);
        }
    }
}

/// A word as a number uniform in `[0, 1)`.
pub(super) fn unit(word: u64) -> f64 {
    (word >> 11) as f64 / (1u64 << 53) as f64
}
