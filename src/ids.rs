//! Indices and names that travel between the parts.
//!
//! Each is a newtype so that a block number cannot stand where an expert
//! number is meant. They are plain data: no part of the runtime is named here.

use std::fmt;

macro_rules! index {
    ($(#[$doc:meta])* $name:ident($int:ty), $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $int);

        impl $name {
            /// The number as an index into a slice.
            #[must_use]
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl From<usize> for $name {
            /// # Panics
            ///
            /// If the number does not fit, which no checked geometry reaches.
            fn from(index: usize) -> Self {
                Self(<$int>::try_from(index).expect("index out of the range its geometry allows"))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

index! {
    /// A block of the decoder, all kinds counted (`model.md` §1.1).
    BlockIx(u16), "block "
}
index! {
    /// A bank: the n-th MoE block, MoE blocks counted alone; the draft layer's bank comes last.
    LayerIx(u16), "layer "
}
index! {
    /// A routed expert of one layer.
    ExpertIx(u16), "expert "
}
index! {
    /// A place of one layer's bank that holds one expert.
    PlaceIx(u16), "place "
}
index! {
    /// A device slot: the state of one session on the device.
    SlotIx(u16), "slot "
}
index! {
    /// A device slot's number that only grows; a cure begins the next one.
    Turn(u32), "turn "
}
index! {
    /// Work submitted to the device and read back once.
    FlightId(u64), "flight "
}
index! {
    /// One sequence being decoded.
    SessionId(u64), "session "
}
index! {
    /// Position in a sequence, from 0.
    Position(u32), "position "
}
index! {
    /// A token's id.
    TokenId(u32), "id "
}
