//! dtype codes of the tensor directory (`cmf.md` §3).

use super::tensors::Codec;

/// Every code the format defines, by number.
const NAMES: [&str; 22] = [
    "f32", "f16", "bf16", "q8_row", "q4_block", "mix8_4", "u8", "q4_col", "vbit", "q8_2f", "vbit_ro", "q4_tiled", "q1",
    "q1s", "q1t", "q4tp", "q2tp", "u32", "u64", "blr", "q1g", "mxfp4",
];

/// Code of the 2-bit profile, which is refused in words of its own.
pub const Q2TP: u8 = 16;

impl Codec {
    /// The codec of a dtype code, if it is one that is read here.
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Self> {
        match code {
            0 => Some(Self::F32),
            1 => Some(Self::F16),
            2 => Some(Self::Bf16),
            9 => Some(Self::Q8_2f),
            15 => Some(Self::Q4tp),
            _ => None,
        }
    }

    /// The dtype code written to a directory.
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Bf16 => 2,
            Self::Q8_2f => 9,
            Self::Q4tp => 15,
        }
    }
}

/// The name of a dtype code, or `None` for a code the format does not define.
#[must_use]
pub fn name(code: u8) -> Option<&'static str> {
    NAMES.get(usize::from(code)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_names_agree() {
        for code in 0..=u8::MAX {
            if let Some(codec) = Codec::from_code(code) {
                assert_eq!(codec.code(), code);
                assert_eq!(name(code), Some(codec.to_string().as_str()));
            }
        }
        assert_eq!(name(Q2TP), Some("q2tp"));
        assert_eq!(name(22), None);
    }
}
