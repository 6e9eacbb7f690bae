//! Measurements beside those of an earlier run, ours or the peer's.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::Context as _;
use serde_json::{Map, Value};

/// Reads JSON lines; lines that are no measurement are left out.
pub(super) fn read(path: &Path) -> anyhow::Result<Vec<Value>> {
    let name = super::named(path);
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {name}"))?;
    let mut lines = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let value: Value = serde_json::from_str(line).with_context(|| format!("{name}, line {}", number + 1))?;
        if value["decode_tok_s"].is_number() {
            lines.push(value);
        }
    }
    anyhow::ensure!(!lines.is_empty(), "{name} holds no measurement of bench --json");
    Ok(lines)
}

/// A line for each measurement that has a counterpart: rates before and now.
pub(super) fn told(now: &[Map<String, Value>], before: &[Value]) -> String {
    let mut text = String::new();
    for line in now {
        let Some(old) = before.iter().rev().find(|old| is_counterpart(line, old)) else {
            let _ = writeln!(text, "{}: nothing to compare with", label(line));
            continue;
        };
        let _ = write!(text, "{}:", label(line));
        for (key, unit) in [("prefill_per_s", "positions/s"), ("decode_tok_s", "tok/s")] {
            if let (Some(old), Some(new)) = (old[key].as_f64(), line[key].as_f64()) {
                let _ = write!(text, " {old:.1} -> {new:.1} {unit} ({:.2}x)", new / old);
            }
        }
        text.push('\n');
    }
    text.truncate(text.trim_end().len());
    text
}

/// Same file, prompt, budget and drafts; same device where both are ours (the peer names devices otherwise), and the same
/// arithmetic where both say it.
fn is_counterpart(line: &Map<String, Value>, old: &Value) -> bool {
    let same = |key: &str| line[key] == old[key];
    let same_if_said = |key: &str| old[key].is_null() || same(key);
    let budget = |value: &Value| value.as_str().and_then(|gb| gb.parse::<f64>().ok()).or(value.as_f64());
    same("file")
        && same("prompt_len")
        && same("mtp_used")
        && same_if_said("act")
        && (old["engine"].is_null() || same("device"))
        && budget(&line["expert_gb"]) == budget(&old["expert_gb"])
}

fn label(line: &Map<String, Value>) -> String {
    let budget = line["expert_gb"].as_str().map_or_else(|| "all experts".to_owned(), |gb| format!("{gb} GB"));
    let drafts = if line["mtp_used"] == true { "drafts" } else { "no drafts" };
    format!("{}, {budget}, {drafts}, prompt of {}", line["device"].as_str().unwrap_or("?"), line["prompt_len"])
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn line(device: &str, gb: Value, tok_s: f64) -> Value {
        json!({
            "engine": "riparian 0", "device": device, "file": "a.cmf", "prompt_len": 512, "mtp_used": false,
            "act": "int8", "expert_gb": gb, "prefill_per_s": 100.0, "decode_tok_s": tok_s,
        })
    }

    #[test]
    fn like_is_compared_with_like() {
        let now = [line("host", json!("8"), 20.0), line("gpu", Value::Null, 50.0)];
        let now: Vec<Map<String, Value>> = now.iter().map(|line| line.as_object().unwrap().clone()).collect();
        let mut peer = line("Some GPU (Vulkan)", json!("8.0"), 5.0);
        peer.as_object_mut().unwrap().retain(|key, _| key != "engine" && key != "act");
        let before = [line("host", json!("4"), 1.0), line("host", json!("8"), 10.0)];
        let told_of = told(&now, &before);
        assert!(told_of.contains("10.0 -> 20.0 tok/s (2.00x)"), "{told_of}");
        assert!(told_of.contains("gpu, all experts, no drafts, prompt of 512: nothing"), "{told_of}");
        assert!(told(&now, &[peer]).contains("5.0 -> 20.0 tok/s (4.00x)"));
    }

    #[test]
    fn what_is_no_measurement_is_refused_or_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.jsonl");
        let read_back = |text: &str| {
            std::fs::write(&path, text).unwrap();
            read(&path).map(|lines| lines.len()).map_err(|error| error.to_string())
        };
        assert_eq!(read_back("{\"cmd\": \"synth\"}\n\n{\"decode_tok_s\": 3.5}\n"), Ok(1));
        assert!(read_back("{\"cmd\": \"synth\"}").unwrap_err().contains("holds no measurement"));
        assert!(read_back("{\"decode_tok_s\": 3.5}\nnonsense").unwrap_err().contains("line 2"));
    }
}
