//! The traces that are kept, and what replaying them shows.

use std::path::Path;

use riparian::policy::admission::{AdmissionOptions, Policy};
use riparian::policy::replay::{ReplayOptions, Replayed, StepCosts, replay, residents};
use riparian::policy::routes::Routes;

fn kept(name: &str) -> Routes {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/traces").join(name);
    Routes::read(&mut &std::fs::read(path).unwrap()[..]).unwrap()
}

fn with(routes: &Routes, places: usize, policy: Option<Policy>) -> Replayed {
    let admission = policy.map(|policy| AdmissionOptions { policy, ..AdmissionOptions::default() });
    let options = ReplayOptions { admission, ..ReplayOptions::default() };
    replay(routes, &residents(&routes.of, places), &options, &StepCosts::default())
}

#[test]
fn the_traces_are_small_and_whole() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/traces");
    let bytes: u64 = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum();
    assert!(bytes < 300_000, "{bytes} bytes");
    for name in ["synthetic.routes", "tiny-transcribe.routes"] {
        let routes = kept(name);
        let (prompt, decoded) = routes.positions();
        assert!(prompt > 100 && decoded > 100, "{name}: {prompt} and {decoded}");
        assert!(routes.counts().iter().all(|counts| counts.iter().sum::<u64>() > 0), "{name}: every layer was routed");
    }
}

#[test]
fn the_default_policy_loses_on_no_trace_and_repeats_itself() {
    for name in ["synthetic.routes", "tiny-transcribe.routes"] {
        let routes = kept(name);
        for part in [8, 4, 2] {
            let places = (routes.of.experts / part).max(routes.of.top_k);
            let default = with(&routes, places, Some(Policy::default()));
            assert_eq!(default, with(&routes, places, Some(Policy::default())));
            for other in [None, Some(Policy::Baseline), Some(Policy::RecencyFrequency)] {
                let other = with(&routes, places, other);
                // Half a point of the hit rate is noise of the trace.
                assert!(
                    default.hit_rate() + 0.005 > other.hit_rate(),
                    "{name}, {places} places: {} after {}",
                    default.hit_rate(),
                    other.hit_rate()
                );
            }
        }
    }
}
