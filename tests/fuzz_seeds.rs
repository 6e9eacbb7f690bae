//! The fuzz targets over their seeds, over changed copies of them, and over what fuzzing found: found once, kept for good.

use std::fs;
use std::path::Path;

#[path = "../fuzz/bodies.rs"]
mod bodies;

/// Runs a target over what was found, over its seeds and `rounds` changed copies of each.
fn replay(target: &str, body: fn(&[u8]), rounds: u64) {
    let files = |folder: &str| {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz").join(folder).join(target);
        let mut paths: Vec<_> = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        assert!(!paths.is_empty(), "{target} has nothing in {folder}");
        paths
    };
    // These reach further than the seeds as they are.
    files("found").iter().for_each(|path| body(&fs::read(path).unwrap()));
    let mut state = 1u64;
    let mut random = move |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below.max(1)
    };
    for path in files("seeds") {
        let seed = fs::read(&path).unwrap();
        body(&seed);
        for _ in 0..rounds {
            let mut data = seed.clone();
            for _ in 0..=random(6) {
                match random(4) {
                    0 if !data.is_empty() => data.truncate(random(data.len())),
                    1 => data.insert(random(data.len() + 1), random(256) as u8),
                    _ if !data.is_empty() => {
                        let at = random(data.len());
                        data[at] = [0, 1, 0x7F, 0xFF, random(256) as u8][random(5)];
                    }
                    _ => {}
                }
            }
            body(&data);
        }
    }
}

#[test]
fn container() {
    replay("container", bodies::container, 500);
}

#[test]
fn audio() {
    replay("audio", bodies::audio, 60);
}

#[test]
fn codec() {
    replay("codec", bodies::codec, 300);
}

#[test]
fn import() {
    replay("import", bodies::import, 100);
}

#[test]
fn config() {
    replay("config", bodies::config, 1000);
}
