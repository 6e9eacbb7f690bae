// Weight rows a team computes at once, sharing each activation read.
const WIDE: u32 = 4u;
