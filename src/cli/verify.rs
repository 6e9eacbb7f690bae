//! `riparian verify`: every hash of a model file.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use clap::Args;
use riparian::model::container::Container;
use riparian::model::verify::{Progress, VerifyError, verify};
use serde_json::{Value, json};

use super::terminal::Terminal;
use super::{FAILURE, Failure, Global, Outcome, SUCCESS, access, pool, progress};

const EXAMPLES: &str = "\
Examples:
  riparian verify model.cmf             names each tensor whose bytes are not those that were written
  riparian verify model.cmf --json";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Verify {
    /// The model file
    #[arg(value_name = "MODEL.cmf")]
    model: PathBuf,
    /// Write JSON
    #[arg(long)]
    json: bool,
}

impl Verify {
    pub(crate) fn run(self, global: &Global, terminal: &mut Terminal) -> Outcome {
        let knobs = global.knobs()?;
        // Header and directory are compared with their hashes on opening.
        let container = Container::open(&self.model, access(&knobs)).map_err(anyhow::Error::from)?;
        let bar = progress::bytes(terminal, "verify");
        let furthest = AtomicU64::new(0);
        let verified = pool(&knobs)?.install(|| {
            verify(&container, |seen: Progress| {
                bar.set_length(seen.bytes_total);
                // Threads report out of order.
                bar.set_position(furthest.fetch_max(seen.bytes, Ordering::Relaxed).max(seen.bytes));
            })
        });
        bar.finish_and_clear();
        let put = |line: String| terminal.line(line).map_err(|error| Failure::from(anyhow::Error::from(error)));
        let file = self.model.to_string_lossy();
        match verified {
            Ok(seen) => {
                put(if self.json {
                    json!({ "file": file, "tensors": seen.tensors, "bytes": seen.bytes, "failed": [] }).to_string()
                } else {
                    format!("{file}: {} tensors, {} bytes, all as they were written", seen.tensors, seen.bytes)
                })?;
                Ok(SUCCESS)
            }
            Err(VerifyError::Damaged(damaged)) if self.json => {
                let failed: Vec<Value> = (damaged.iter())
                    .map(|one| {
                        json!({
                            "tensor": one.name, "stored": format!("{:016x}", one.stored),
                            "computed": format!("{:016x}", one.computed),
                        })
                    })
                    .collect();
                put(json!({ "file": file, "failed": failed }).to_string())?;
                Ok(FAILURE)
            }
            Err(error) => Err(Failure::from(anyhow::Error::from(error)).about(&self.model)),
        }
    }
}
