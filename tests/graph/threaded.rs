//! The simulation's scripts on real threads: fewer seeds, but real channels and real waiting.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crossbeam_channel::{bounded, unbounded};
use riparian::actors::clock::Clock;
use riparian::actors::payload::{Event, FETCHES_MAX, Fetch, Fetched, FinishReason, SessionError, SessionOptions};
use riparian::actors::session::SessionHandle;
use riparian::actors::submitter::Fallback;
use riparian::actors::{Graph, Setup};
use riparian::device::{Companion, Device, DeviceError};
use riparian::ids::TokenId;
use riparian::invariants::Broken;

use crate::random::Random;
use crate::scenario::{Scenario, User};
use crate::simulation::{ModelDrafter, Prompts};

/// A run that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(30);

/// What one user got.
struct Got {
    taken: usize,
    ids: Vec<TokenId>,
    end: Option<FinishReason>,
}

fn use_session(mut handle: SessionHandle, user: &User) -> Got {
    let mut got = Got { taken: 0, ids: Vec::new(), end: None };
    let mut at = 0;
    for chunk in &user.chunks {
        let rows = user.prompt[2 * at..2 * (at + chunk)].to_vec();
        at += chunk;
        match handle.start_feed(rows).expect("room for a request").blocking_recv().expect("every feed is answered") {
            Ok(()) => got.taken += chunk,
            Err(_) => break,
        }
    }
    handle.decode(user.max_new).expect("room for a request");
    let leaves = user.leaves.map(|(after, drops)| (after / 10, drops));
    loop {
        if let Some((after, drops)) = leaves
            && got.ids.len() >= after
        {
            if drops {
                return got;
            }
            handle.cancel();
        }
        match handle.blocking_next() {
            Some(Event::Token(token)) => got.ids.push(token.id),
            Some(Event::Finished(finished)) => {
                got.end = Some(finished.reason);
                return got;
            }
            None => panic!("a stream closed without an end"),
        }
    }
}

fn run(seed: u64) {
    let scenario = Arc::new(Scenario::new(seed, Broken::No));
    let random = &mut Random::new(seed ^ 0x7EAD);
    let delay = Duration::from_micros(random.pick(&[0, 0, 50, 300]));
    let dies_at = (scenario.losses > 0).then(|| random.below(200) as u32);
    let mut script = scenario.script.clone();
    script.landing_deadline = None;
    let model = script.model();
    let prompts = Prompts::default();
    let fails = scenario.fallback_fails;
    let fallback = scenario.fallback.clone().map(|script| -> Fallback {
        Box::new(move || {
            if fails {
                return Err(DeviceError::OutOfMemory { what: "a test".into(), bytes: 1 });
            }
            Ok(Box::new(script.threaded(delay, None)) as Box<dyn Device>)
        })
    });
    let (fetch_sender, fetches) = bounded::<Fetch>(FETCHES_MAX);
    let loading = model.clone();
    let loader = thread::spawn(move || {
        for Fetch { layer, expert, reply } in fetches {
            let payload = Ok(Arc::new(loading.payload(layer, expert)));
            let _ = reply.try_send(Fetched { layer, expert, payload });
        }
    });
    let running = Graph::assemble(Setup {
        device: Box::new(script.threaded(delay, dies_at)),
        companion: Arc::new(model.clone()),
        fallback,
        fetches: scenario.loader.then_some(fetch_sender),
        drafter: Some(Box::new(ModelDrafter { model, prompts: prompts.clone(), ids: HashMap::new() })),
        options: scenario.options,
        clock: Clock::machine(),
    })
    .start()
    .expect("threads");
    let (done, results) = unbounded();
    for (at, user) in scenario.users.iter().enumerate() {
        let options = SessionOptions { eos: user.eos.clone(), seed: None, drafts: user.drafts, depth: None };
        let handle = running.handle().try_open(options).expect("few sessions");
        prompts.lock().unwrap().insert(handle.id(), user.prompt.clone());
        let (done, user) = (done.clone(), user.clone());
        thread::spawn(move || done.send((at, use_session(handle, &user))));
    }
    for _ in 0..scenario.users.len() {
        let (at, got) = results.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("seed {seed} hangs"));
        let mut user = scenario.users[at].clone();
        user.prompt.truncate(2 * got.taken);
        // A session may die of a row before that row's feed is answered.
        let poisoned = scenario.users[at].prompt.iter().any(|x| !x.is_finite());
        let plain = if got.taken == 0 || poisoned { got.ids.clone() } else { scenario.plain(&user) };
        assert!(plain.starts_with(&got.ids), "seed {seed}: I1 Ids: {:?}, plain decode gives {plain:?}", got.ids);
        match got.end {
            Some(FinishReason::End | FinishReason::Length) => assert_eq!(got.ids, plain, "seed {seed}: ended whole"),
            Some(FinishReason::Failed(error)) => {
                let excused = match error {
                    SessionError::NotFinite { .. } => poisoned,

                    SessionError::Device(_) => dies_at.is_some() && (scenario.fallback.is_none() || fails),
                    SessionError::EmptyPrompt => got.taken == 0,
                    _ => false,
                };
                assert!(excused, "seed {seed}: session {at} failed: {error}");
            }
            Some(FinishReason::Cancelled) | None => assert!(user.leaves.is_some(), "seed {seed}"),
        }
    }
    running.stop();
    drop(loader);
}

#[test]
fn scripts_run_on_threads() {
    // The device's own death is a panic on its thread; it is part of the script.
    for seed in 0..150 {
        run(seed);
    }
}

/// `protocol.md` §5 rule 13 and `runtime.md` §2: who waits is told, whoever dies.
#[test]
fn a_graph_that_stops_ends_its_sessions() {
    let scenario = Scenario::new(1, Broken::No);
    let running = Graph::assemble(Setup {
        device: Box::new(scenario.script.threaded(Duration::ZERO, None)),
        companion: Arc::new(scenario.script.model()),
        fallback: None,
        fetches: None,
        drafter: None,
        options: scenario.options,
        clock: Clock::machine(),
    })
    .start()
    .expect("threads");
    let mut handle = running.handle().try_open(SessionOptions::default()).unwrap();
    running.stop();
    let end = handle.blocking_next();
    let cancelled =
        matches!(&end, Some(Event::Finished(finished)) if finished.reason == FinishReason::Cancelled) || end.is_none();
    assert!(cancelled, "{end:?}");
    assert!(matches!(handle.decode(None), Err(SessionError::Gone { .. })));
}
