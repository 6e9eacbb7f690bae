// No such thing: an absent column field, an expert without a place.
const NONE: u32 = 0xffffffffu;
