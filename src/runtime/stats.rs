//! What sessions and runtimes measure of themselves.

use std::time::Duration;

/// What one session took so far; complete once the stream has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stats {
    /// Length of the recording, where there is one.
    pub audio: Duration,
    /// Time the encoder worked on the recording. Prefill runs beside it.
    pub encode: Duration,
    /// From the first row's arrival to the first id.
    pub prefill: Duration,
    /// From the first id to the end.
    pub decode: Duration,
    /// Rows of the prompt.
    pub prompt_rows: usize,
    /// Ids made, the end id among them.
    pub tokens: usize,
    /// What happened at the banks.
    pub bank: BankStats,
    /// How drafts fared.
    pub drafts: DraftStats,
    /// Whether the device was lost and the session went on on the host.
    pub recovered: bool,
}

/// What happened at the banks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BankStats {
    /// Places of all layers.
    pub slots: usize,
    /// Times a layer of this session waited for experts that no place held.
    pub misses: u64,
    /// Experts the host computed for them.
    pub completed: u64,
    /// Experts uploaded into a place while this session was open, whichever session asked for them.
    pub admitted: u64,
}

/// How drafts fared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftStats {
    /// Drafts that were verified.
    pub offered: u64,
    /// Drafts the decoder agreed with.
    pub kept: u64,
}
