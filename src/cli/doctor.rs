//! `riparian doctor`: what this machine offers, and every knob with its value and source.

use std::fs;
use std::thread::available_parallelism;

use clap::Args;
use riparian::host::{Isa, physical_cores};
use riparian::knobs::Knobs;
use serde_json::{Value, json};

use super::terminal::Terminal;
use super::{Failure, Global, Outcome, SUCCESS};

const EXAMPLES: &str = "\
Examples:
  riparian doctor                        for people
  riparian doctor --json                 for scripts
  riparian doctor --knob steps=8         how a flag would be read";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Doctor {
    /// Write JSON
    #[arg(long)]
    json: bool,
}

impl Doctor {
    pub(crate) fn run(self, global: &Global, terminal: &mut Terminal) -> Outcome {
        let knobs = global.knobs()?;
        let report = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "system": format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            "cpu": cpu(),
            "memory": memory(),
            "gpu_support": cfg!(feature = "gpu"),
            "adapters": adapters(),
            "knobs": knob_table(&knobs),
        });
        let text = if self.json { format!("{report:#}\n") } else { page(&report) };
        terminal.put(&text).map_err(|error| Failure::from(anyhow::Error::from(error)))?;
        Ok(SUCCESS)
    }
}

fn cpu() -> Value {
    json!({
        "name": cpu_name(),
        "physical_cores": physical_cores(),
        "threads": available_parallelism().map_or(1, usize::from),
        "features": features(),
        "kernels": Isa::best().to_string(),
    })
}

/// As the system names it; elsewhere than on Linux the architecture has to do.
fn cpu_name() -> String {
    let listed = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = listed.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    name.map_or_else(|| std::env::consts::ARCH.into(), |(_, name)| name.trim().to_owned())
}

/// Instruction sets that kernels of ours or of our libraries look for.
fn features() -> Vec<&'static str> {
    let mut found = Vec::new();
    macro_rules! look {
        ($detect:ident: $($name:tt)*) => {
            $(if std::arch::$detect!($name) { found.push($name); })*
        };
    }
    #[cfg(target_arch = "x86_64")]
    look!(is_x86_feature_detected: "sse4.2" "avx" "avx2" "fma" "f16c" "avx512f" "avx512bw" "avx512vl" "avx512vnni" "avx512bf16" "avxvnni");
    #[cfg(target_arch = "aarch64")]
    look!(is_aarch64_feature_detected: "neon" "dotprod" "fp16" "i8mm" "bf16" "sve");
    found
}

/// Bytes of memory, where the system tells.
fn memory() -> Value {
    let listed = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let bytes = |field: &str| {
        let line = listed.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
        Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
    };
    json!({ "total_bytes": bytes("MemTotal"), "available_bytes": bytes("MemAvailable") })
}

#[cfg(feature = "gpu")]
fn adapters() -> Value {
    let described = riparian::device::wgpu::describe::describe();
    let row = |adapter: &riparian::device::wgpu::describe::Description| {
        let limits: serde_json::Map<String, Value> =
            adapter.limits.iter().map(|(name, limit)| ((*name).to_owned(), (*limit).into())).collect();
        json!({
            "id": adapter.id, "name": adapter.name, "kind": adapter.kind, "driver": adapter.driver,
            "subgroup": adapter.subgroup, "features": adapter.features, "limits": limits,
            "memory": adapter.memory, "self_test": adapter.self_test,
        })
    };
    described.iter().map(row).collect()
}

#[cfg(not(feature = "gpu"))]
fn adapters() -> Value {
    json!([])
}

fn knob_table(knobs: &Knobs) -> Value {
    let row = |(knob, value, origin): (&'static riparian::knobs::Knob, String, _)| {
        json!({
            "name": knob.name, "value": value, "from": format!("{origin}"), "accepts": knob.accepts,
            "default": knob.default, "meaning": knob.meaning.trim(),
        })
    };
    knobs.list().map(row).collect()
}

/// The report for people.
fn page(report: &Value) -> String {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let gigabytes = |value: &Value| {
        value.as_u64().map_or_else(|| "unknown".into(), |bytes| format!("{:.1} GB", bytes as f64 / 1e9))
    };
    let (cpu, memory) = (&report["cpu"], &report["memory"]);
    let features: Vec<String> = cpu["features"].as_array().into_iter().flatten().map(text).collect();
    let mut page = format!(
        "riparian {} on {}\n\nprocessor  {}, {} physical cores, {} threads\n           {}\n           kernels: {}\n\
         memory     {}, {} available\n\nadapters\n",
        text(&report["version"]),
        text(&report["system"]),
        text(&cpu["name"]),
        cpu["physical_cores"],
        cpu["threads"],
        features.join(" "),
        text(&cpu["kernels"]),
        gigabytes(&memory["total_bytes"]),
        gigabytes(&memory["available_bytes"]),
    );
    let adapters = report["adapters"].as_array().map_or(&[][..], Vec::as_slice);
    for adapter in adapters {
        page += &format!("  {:<10} {}\n", text(&adapter["id"]), text(&adapter["name"]));
        for (name, value) in adapter.as_object().into_iter().flatten() {
            if !["id", "name"].contains(&name.as_str()) {
                page += &format!("             {name}: {}\n", listed(value));
            }
        }
    }
    if adapters.is_empty() {
        page += if report["gpu_support"] == true {
            "  none: decoding runs on the processor\n"
        } else {
            "  this program was built without the gpu feature: decoding runs on the processor\n"
        };
    }
    page += "\nknobs\n";
    for knob in report["knobs"].as_array().into_iter().flatten() {
        page += &format!(
            "  {:<22} {:<8} {:<12} {}\n",
            text(&knob["name"]),
            text(&knob["value"]),
            text(&knob["from"]),
            text(&knob["meaning"])
        );
    }
    page
}

/// Lists and maps in one line.
fn listed(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().map(listed).collect::<Vec<_>>().join(", "),
        Value::Object(map) => {
            map.iter().map(|(name, value)| format!("{name} {}", listed(value))).collect::<Vec<_>>().join(", ")
        }
        other => other.to_string(),
    }
}
