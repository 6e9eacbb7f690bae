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
        if value["decode_tok_s"].is_number() || value["prefill_per_s"].is_number() {
            lines.push(value);
        }
    }
    anyhow::ensure!(!lines.is_empty(), "{name} holds no measurement of bench --json");
    Ok(lines)
}

/// A table with a row for each counterpart that a measurement has among `before`: rates before and now. The newest of each
/// engine counts.
pub(super) fn told(now: &[Map<String, Value>], before: &[Value]) -> String {
    let head = ["device", "experts", "drafts", "prompt", "against", "prefill/s", "now", "", "tok/s", "now", ""];
    let mut rows = vec![head.map(str::to_owned)];
    let mut alone = String::new();
    for line in now {
        let mut found: Vec<&Value> = Vec::new();
        for old in before.iter().rev().filter(|old| is_counterpart(line, old)) {
            if !found.iter().any(|other| engine(other) == engine(old)) {
                found.push(old);
            }
        }
        if found.is_empty() {
            let _ = writeln!(alone, "{}: nothing to compare with", label(line));
        }
        rows.extend(found.into_iter().rev().map(|old| row(line, old)));
    }
    let table = if rows.len() > 1 { super::table::aligned(&rows, 3) } else { String::new() };
    (table + &alone).trim_end().to_owned()
}

fn row(line: &Map<String, Value>, old: &Value) -> [String; 11] {
    let rates = |key: &str| match (old[key].as_f64(), line[key].as_f64()) {
        (Some(old), Some(new)) if old > 0.0 => [format!("{old:.1}"), format!("{new:.1}"), format!("{:.2}x", new / old)],
        (None, Some(new)) => ["-".into(), format!("{new:.1}"), String::new()],
        _ => ["-".into(), "-".into(), String::new()],
    };
    let ([prefill, prefill_now, prefill_ratio], [decode, decode_now, decode_ratio]) =
        (rates("prefill_per_s"), rates("decode_tok_s"));
    [
        line["device"].as_str().unwrap_or("?").to_owned(),
        budget_of(line),
        drafts_of(line),
        line["prompt_len"].to_string(),
        engine(old),
        prefill,
        prefill_now,
        prefill_ratio,
        decode,
        decode_now,
        decode_ratio,
    ]
}

/// Whose measurement it is: ours with its commit, where it says one. The first peer's lines do not name it.
fn engine(line: &Value) -> String {
    let name = line["engine"].as_str().unwrap_or("peer").to_owned();
    line["commit"].as_str().map_or(name.clone(), |commit| format!("{name} {commit}"))
}

/// Same file, prompt, budget and drafts; same device where both are ours (peers name devices otherwise), and the same
/// arithmetic where both say it.
fn is_counterpart(line: &Map<String, Value>, old: &Value) -> bool {
    let same = |key: &str| line[key] == old[key];
    let same_if_said = |key: &str| old[key].is_null() || same(key);
    let budget = |value: &Value| value.as_str().and_then(|gb| gb.parse::<f64>().ok()).or(value.as_f64());
    same("file")
        && same("prompt_len")
        && same("mtp_used")
        && same_if_said("act")
        && same_if_said("draft_depth")
        && (!old["engine"].as_str().is_some_and(|engine| engine.starts_with("riparian")) || same("device"))
        && budget(&line["expert_gb"]) == budget(&old["expert_gb"])
}

fn budget_of(line: &Map<String, Value>) -> String {
    line["expert_gb"].as_str().map_or_else(|| "all".to_owned(), |gb| format!("{gb} GB"))
}

fn drafts_of(line: &Map<String, Value>) -> String {
    let depth = line.get("draft_depth").and_then(Value::as_u64);
    match (line["mtp_used"] == true, depth) {
        (false, _) => "off".to_owned(),
        (true, None) => "on".to_owned(),
        (true, Some(depth)) => format!("{depth} a round"),
    }
}

fn label(line: &Map<String, Value>) -> String {
    let (budget, drafts) = (budget_of(line), drafts_of(line));
    let device = line["device"].as_str().unwrap_or("?");
    format!("{device}, experts {budget}, drafts {drafts}, prompt of {}", line["prompt_len"])
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
        let ends = |text: &str, engine: &str, row: &str| {
            text.lines().any(|line| {
                line.contains(engine) && line.split_whitespace().collect::<Vec<_>>().join(" ").ends_with(row)
            })
        };
        assert!(ends(&told_of, "riparian 0", "10.0 20.0 2.00x"), "{told_of}");
        assert!(told_of.contains("gpu, experts all, drafts off, prompt of 512: nothing"), "{told_of}");
        let mut other = peer.clone();
        other["engine"] = json!("llama.cpp 0.7.0");
        other["decode_tok_s"] = json!(40.0);
        let both = told(&now, &[peer, other]);
        assert!(ends(&both, "peer", "5.0 20.0 4.00x") && ends(&both, "llama.cpp", "40.0 20.0 0.50x"), "{both}");
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
