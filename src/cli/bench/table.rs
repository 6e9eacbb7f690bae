//! Measurements for people.

use std::fmt::Write as _;

use serde_json::{Map, Value};

/// What ran where, then a row a measurement. A star marks decode rates of a device that was lost on the way.
pub(super) fn of(lines: &[Map<String, Value>]) -> String {
    let mut text = String::new();
    if let Some(line) = lines.first() {
        let commit = line["commit"].as_str().map_or_else(String::new, |commit| format!(", commit {commit}"));
        let _ = writeln!(
            text,
            "{}{commit}, {} ({:.2} GB), {} threads, {} activations, median of {} runs",
            plain(&line["engine"]),
            plain(&line["file"]),
            line["file_gb"].as_f64().unwrap_or(0.0),
            plain(&line["cpu_threads"]),
            plain(&line["act"]),
            plain(&line["repeats"]),
        );
    }
    let head = [
        "device",
        "experts",
        "drafts",
        "prompt",
        "prefill/s",
        "tok/s",
        "spread",
        "misses",
        "admitted",
        "right",
        "load s",
        "peak GB",
    ];
    let mut rows = vec![head.map(str::to_owned)];
    rows.extend(lines.iter().map(row));
    text + &aligned(&rows, 3)
}

/// Rows under each other: the first columns, of words, to the left, numbers to the right.
pub(super) fn aligned<const N: usize>(rows: &[[String; N]], words: usize) -> String {
    let mut text = String::new();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..N).map(width).collect();
    for row in rows {
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let _ = if column < words { write!(text, "{cell:<width$}  ") } else { write!(text, "{cell:>width$}  ") };
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
    }
    text
}

fn row(line: &Map<String, Value>) -> [String; 12] {
    let number = |value: &Value, digits: usize| value.as_f64().map_or_else(|| "-".into(), |n| format!("{n:.digits$}"));
    let experts = line["expert_gb"].as_str().map_or_else(|| "all".to_owned(), |gb| format!("{gb} GB"));
    let drafts = match line["draft"]["kept_percent"].as_f64() {
        Some(kept) => match line["draft_depth"].as_u64() {
            Some(depth) => format!("{depth}, {kept:.0} % kept"),
            None => format!("{kept:.0} % kept"),
        },
        None => "off".to_owned(),
    };
    let spread = format!("{}-{}", number(&line["decode_spread"][0], 1), number(&line["decode_spread"][1], 1));
    let lost = if line["recovered"] == true { "*" } else { "" };
    let (device, kernels) = (plain(&line["device"]), plain(&line["kernels"]));
    let named = device.to_lowercase().contains(&kernels);
    [
        if named { device } else { format!("{device} ({kernels})") },
        experts,
        drafts,
        plain(&line["prompt_len"]),
        number(&line["prefill_per_s"], 1),
        format!("{}{lost}", number(&line["decode_tok_s"], 1)),
        spread,
        plain(&line["misses"]),
        plain(&line["admitted"]),
        plain(&line["expected_ids"]),
        number(&line["load_s"], 1),
        number(&line["peak_above_mapping_gb"], 2),
    ]
}

/// A string without its quotes, anything else as it is, nothing as a dash.
fn plain(value: &Value) -> String {
    match value {
        Value::Null => "-".into(),
        Value::String(text) => text.clone(),
        value => value.to_string(),
    }
}
