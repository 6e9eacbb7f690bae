//! The arrows between the parts (`docs/architecture.md`): each may use only what stands left of it.

use std::fs;
use std::path::{Path, PathBuf};

const BASE: &[&str] = &["ids", "error", "invariants", "knobs"];
const OVER_MODEL: &[&str] = &["ids", "error", "invariants", "knobs", "model"];
const UNDER_DEVICE: &[&str] =
    &["ids", "error", "invariants", "knobs", "model", "reference", "host", "audio", "text", "plan", "policy"];
const UNDER_ACTORS: &[&str] =
    &["ids", "error", "invariants", "knobs", "model", "reference", "host", "audio", "text", "plan", "policy", "device"];
/// Each part with the parts it may use, itself left out.
const ARROWS: &[(&str, &[&str])] = &[
    ("ids", &[]),
    ("error", &["ids"]),
    ("invariants", &["ids", "error"]),
    ("knobs", &["ids", "error"]),
    ("model", BASE),
    ("reference", OVER_MODEL),
    ("host", OVER_MODEL),
    ("audio", OVER_MODEL),
    ("text", OVER_MODEL),
    ("plan", OVER_MODEL),
    ("policy", OVER_MODEL),
    ("device", UNDER_DEVICE),
    ("actors", UNDER_ACTORS),
];
/// Parts beyond those above: nobody below may name them.
const TOP: &[&str] = &["runtime", "trace", "cli"];

/// Every source file under `src` and `actors`, with its path from the root.
fn sources() -> Vec<(PathBuf, String)> {
    fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, found);
            } else if path.extension().is_some_and(|e| e == "rs") {
                found.push(path);
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for folder in ["src", "actors"] {
        if root.join(folder).exists() {
            walk(&root.join(folder), &mut files);
        }
    }
    let read = |file: PathBuf| (file.strip_prefix(root).unwrap().to_path_buf(), fs::read_to_string(&file).unwrap());
    files.into_iter().map(read).collect()
}

/// Lines that are no comments, with their numbers.
fn code(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines().enumerate().map(|(i, l)| (i + 1, l)).filter(|(_, l)| !l.trim_start().starts_with("//"))
}

/// The part a file belongs to: `actors`, or its folder or own name under `src`.
fn part_of(file: &Path) -> String {
    let mut steps = file.components().map(|c| c.as_os_str().to_str().unwrap());
    match steps.next().unwrap() {
        "src" => steps.next().unwrap().trim_end_matches(".rs").into(),
        folder => folder.into(),
    }
}

/// Names that stand behind `crate::` in a line, also in a list `crate::{a::b, c}`.
fn named(line: &str) -> Vec<String> {
    let word = |s: &str| s.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>();
    let mut names = Vec::new();
    for (at, _) in line.match_indices("crate::") {
        let rest = &line[at + "crate::".len()..];
        let Some(list) = rest.strip_prefix('{') else {
            names.push(word(rest));
            continue;
        };
        let (mut depth, mut start) = (0, true);
        for (i, c) in list.char_indices() {
            match c {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' if depth == 0 => start = true,
                ' ' => {}
                _ if start && depth == 0 => {
                    names.push(word(&list[i..]));
                    start = false;
                }
                _ => {}
            }
        }
    }
    names
}

#[test]
fn each_part_uses_only_what_stands_left_of_it() {
    let (mut seen, mut wrong) = (0, Vec::new());
    for (file, text) in sources() {
        let part = part_of(&file);
        let Some((_, allowed)) = ARROWS.iter().find(|(name, _)| *name == part) else { continue };
        for (number, line) in code(&text) {
            for name in named(line) {
                seen += 1;
                let known = ARROWS.iter().any(|(n, _)| *n == name) || TOP.contains(&name.as_str());
                if known && name != part && !allowed.contains(&name.as_str()) {
                    wrong.push(format!("{}:{number}: {part} uses {name}", file.display()));
                }
            }
        }
    }
    assert!(seen > 0, "the scan no longer reads the sources");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn wgpu_is_named_in_the_device_alone_and_shaders_are_read_by_the_registry_alone() {
    for (file, text) in sources() {
        if !file.starts_with("src/device") {
            let names = |l: &str| l.replace("device::wgpu", "").contains("wgpu::");
            assert!(!code(&text).any(|(_, l)| names(l)), "{} names wgpu", file.display());
        }
        if file != Path::new("src/device/kernels.rs") {
            assert!(!code(&text).any(|(_, l)| l.contains(".wgsl\"")), "{} reads a shader", file.display());
        }
    }
}

#[test]
fn the_knobs_alone_read_the_environment() {
    for (file, text) in sources() {
        if file != Path::new("src/knobs.rs") && !file.starts_with("src/cli") && file != Path::new("src/main.rs") {
            let shipped = text.split("#[cfg(test)]").next().unwrap();
            assert!(!code(shipped).any(|(_, l)| l.contains("env::var")), "{} reads the environment", file.display());
        }
    }
}

#[test]
fn unsafe_stands_only_where_the_style_allows_it() {
    let allowed = |file: &Path| {
        file == Path::new("src/model/mmap.rs")
            || file == Path::new("src/audio/gemm.rs")
            || file == Path::new("src/device/trusted.rs")
            || file == Path::new("src/host/team.rs")
            || file.starts_with("src/host") && file.to_str().unwrap().contains("avx")
    };
    for (file, text) in sources().into_iter().filter(|(file, _)| !allowed(file)) {
        let found = code(&text).find(|(_, l)| l.contains("unsafe {") || l.contains("unsafe fn"));
        assert!(found.is_none(), "{}:{} is unsafe", file.display(), found.unwrap().0);
    }
}

/// `docs/testing.md` lists each file's unsafe blocks and impls and what makes them true; each block has its `SAFETY:` line.
#[test]
fn every_unsafe_block_is_counted_and_has_its_check() {
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/testing.md")).unwrap();
    let row = |line: &str| {
        let mut cells = line.strip_prefix("| `src/")?.split('|').map(str::trim);
        Some((PathBuf::from("src").join(cells.next()?.trim_end_matches('`')), cells.next()?.parse::<usize>().ok()?))
    };
    let listed: Vec<(PathBuf, usize)> = page.lines().filter_map(row).collect();
    let mut counted = Vec::new();
    for (file, text) in sources() {
        let lines: Vec<&str> = text.lines().collect();
        let mut blocks = 0;
        for (number, line) in code(&text) {
            let here = line.matches("unsafe {").count() + line.matches("unsafe impl").count();
            // Another form would not be counted.
            let words = line.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| *word == "unsafe").count();
            let told = line.starts_with("#![allow(unsafe_code");
            assert!(told || words == here, "{}:{number}: an unsafe that is no block and no impl", file.display());
            if here == 0 {
                continue;
            }
            blocks += here;
            let above = &lines[number.saturating_sub(9)..number];
            assert!(above.iter().any(|l| l.contains("SAFETY:")), "{}:{number} has no SAFETY line", file.display());
        }
        if blocks > 0 {
            counted.push((file, blocks));
        }
    }
    counted.sort();
    let mut told = listed.clone();
    told.sort();
    assert_eq!(told, counted, "docs/testing.md (left) and the sources (right) disagree");
}

#[test]
fn the_scan_reads_lists_and_paths() {
    assert_eq!(named("use crate::{ids::{A, B}, model};"), ["ids", "model"]);
    assert_eq!(named("    crate::device::x(crate::ids::Y)"), ["device", "ids"]);
}
