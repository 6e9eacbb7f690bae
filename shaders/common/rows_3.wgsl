// Activation rows that share each weight read.
const ROWS: u32 = 3u;
