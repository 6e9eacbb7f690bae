//! A session's tokens on their way to stdout, and what is said of it afterwards.

use std::future::Future;
use std::io;
use std::pin::Pin;

use riparian::ids::TokenId;
use riparian::runtime::{Error, FinishReason, Stats, Tokens};
use serde_json::{Map, Value, json};

use super::terminal::Terminal;

/// Ctrl-C, awaited beside whatever else is going on.
pub(crate) struct Interrupt {
    signal: Pin<Box<dyn Future<Output = io::Result<()>>>>,
    fired: bool,
}

impl Interrupt {
    /// Listens from here on: Ctrl-C no longer ends the process by itself.
    pub(crate) fn listen() -> Self {
        Self { signal: Box::pin(tokio::signal::ctrl_c()), fired: false }
    }

    /// Whether it came.
    pub(crate) fn fired(&self) -> bool {
        self.fired
    }

    /// What `work` gives, or `None` when Ctrl-C came first; `work` is then dropped.
    pub(crate) async fn or<T>(&mut self, work: impl Future<Output = T>) -> Option<T> {
        if self.fired {
            return None;
        }
        tokio::select! {
            biased;
            _ = &mut self.signal => {
                self.fired = true;
                None
            }
            done = work => Some(done),
        }
    }
}

/// A session at its end, however it ended.
pub(crate) struct Ended {
    /// `stop`, `length`, `cancelled`, or `error`.
    pub(crate) reason: String,
    pub(crate) ids: Vec<TokenId>,
    pub(crate) text: String,
    pub(crate) stats: Stats,
    /// What broke it off; ids and text are what was right before.
    pub(crate) error: Option<Error>,
}

/// Takes all tokens, writing the text as it comes if `aloud`.
pub(crate) async fn follow(
    tokens: &mut Tokens,
    terminal: &Terminal,
    interrupt: &mut Interrupt,
    aloud: bool,
) -> io::Result<Ended> {
    let (mut error, mut shown) = (None, 0);
    loop {
        match interrupt.or(tokens.next()).await {
            Some(Some(Ok(token))) => {
                if aloud && !token.text.is_empty() {
                    terminal.put(&token.text)?;
                    shown += token.text.len();
                }
            }
            Some(Some(Err(e))) => error = Some(e),
            Some(None) => break,
            // What was made before still comes, then the end.
            None => {
                tokens.cancel();
                if let Err(e) = tokens.finish().await {
                    error = Some(e);
                }
                break;
            }
        }
    }
    if aloud {
        terminal.put(&tokens.text()[shown..])?;
    }
    let reason = match (&error, tokens.reason()) {
        (Some(_), _) => "error".into(),
        (None, reason) => reason.unwrap_or(FinishReason::Cancelled).to_string(),
    };
    Ok(Ended { reason, ids: tokens.ids().to_vec(), text: tokens.text().to_owned(), stats: tokens.stats(), error })
}

impl Ended {
    /// The part of a JSON line that every session has.
    pub(crate) fn record(&self, device: &str) -> Map<String, Value> {
        let Stats { bank, drafts, .. } = self.stats;
        let ids: Vec<u32> = self.ids.iter().map(|id| id.0).collect();
        let mut record = Map::new();
        record.insert("text".into(), self.text.clone().into());
        record.insert("ids".into(), ids.into());
        record.insert("finish_reason".into(), self.reason.clone().into());
        if let Some(error) = &self.error {
            record.insert("error".into(), error.to_string().into());
        }
        for (name, time) in [
            ("audio_s", self.stats.audio),
            ("encode_s", self.stats.encode),
            ("prefill_s", self.stats.prefill),
            ("decode_s", self.stats.decode),
        ] {
            record.insert(name.into(), seconds(time.as_secs_f64()));
        }
        record.insert("prompt_rows".into(), self.stats.prompt_rows.into());
        record.insert("tokens".into(), self.stats.tokens.into());
        record.insert("device".into(), device.into());
        record.insert(
            "bank".into(),
            json!({
                "slots": bank.slots, "misses": bank.misses, "completed": bank.completed, "admitted": bank.admitted,
            }),
        );
        record.insert("drafts".into(), json!({ "offered": drafts.offered, "kept": drafts.kept }));
        record
    }

    /// The same for people, in a few lines.
    pub(crate) fn summary(&self, device: &str) -> String {
        let Stats { audio, encode, prefill, decode, prompt_rows, tokens, bank, drafts, recovered } = self.stats;
        let rate = tokens.saturating_sub(1) as f64 / decode.as_secs_f64();
        let rate = if rate.is_finite() { format!(", {rate:.1} tokens/s") } else { String::new() };
        let mut lines = String::new();
        if !audio.is_zero() {
            lines += &format!("audio    {:8.3} s, encoded in {:.3} s\n", audio.as_secs_f64(), encode.as_secs_f64());
        }
        lines += &format!("prefill  {:8.3} s, {prompt_rows} rows\n", prefill.as_secs_f64());
        lines += &format!("decode   {:8.3} s, {tokens} tokens{rate}\n", decode.as_secs_f64());
        lines += &format!("device   {device}\n");
        lines += &format!(
            "bank     {} slots, {} misses, {} completed, {} admitted\n",
            bank.slots, bank.misses, bank.completed, bank.admitted
        );
        lines += &format!("drafts   {} kept of {} offered\n", drafts.kept, drafts.offered);
        if recovered {
            lines += "the device was lost on the way; the host went on\n";
        }
        lines + &format!("ended    {}", self.reason)
    }
}

/// Seconds to the microsecond: more digits are noise.
pub(crate) fn seconds(value: f64) -> Value {
    json!((value * 1e6).round() / 1e6)
}
