//! Faults of the wgpu device on a software driver: memory that is refused, a device that is gone, callbacks that never
//! come, a driver that takes its time, an adapter that refuses.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use riparian::actors::Running;
use riparian::actors::payload::{Event, FinishReason, Finished, SessionError, SessionOptions};
use riparian::actors::submitter::Fallback;
use riparian::device::host::{HostDevice, HostOptions};
use riparian::device::wgpu::faults::Faults;
use riparian::device::wgpu::{Context, Gpu, Setup, candidates, find};
use riparian::device::{Device, DeviceError, DeviceKind};
use riparian::host::Decoder;
use riparian::ids::{BlockIx, ExpertIx, TokenId};
use riparian::knobs::{Activations, DeviceChoice, Knobs};
use riparian::model::geometry::BlockKind;
use riparian::runtime::{Error, Options, Runtime};

use crate::faults::{Spoiled, blocks, in_time, scaled};
use crate::gpu::{TIE, margins};
use crate::host::{MODES, TRAINED, bank, counters, decode, decoders, plain, prompt, start_with};

const PASS_ROWS: usize = 16;
const POSITIONS: usize = 256;

fn adapter() -> String {
    std::env::var("RIPARIAN_TEST_ADAPTER").unwrap_or_else(|_| "llvmpipe".into())
}

fn context(faults: &Faults) -> Context {
    let found = find(&DeviceChoice::Adapter(adapter())).expect("an adapter for the tests");
    found.open_with(None, true, faults.clone()).expect("a device")
}

fn upload(context: Context, decoder: &Decoder, places: usize, positions: usize) -> Result<Gpu, DeviceError> {
    let setup = Setup {
        activations: decoder.activations(),
        positions,
        slots: 2,
        pass_rows: PASS_ROWS,
        window_bytes: 64 << 20,
        keep_logits: false,
        skip: vec![],
        drafts: None,
    };
    let residents: Vec<Vec<ExpertIx>> =
        bank(decoder, places).into_iter().map(|layer| layer.into_iter().flatten().collect()).collect();
    Gpu::open_partial(context, decoder.geometry(), decoder.weights(), &setup, Some(&residents), &mut |_, _| {})
}

fn trained(act: Activations) -> Arc<Decoder> {
    decoders(act).last().expect("the trained model").1
}

fn experts(decoder: &Decoder) -> usize {
    decoder.geometry().moe.expect("experts").experts
}

fn on_host(decoder: &Arc<Decoder>) -> Fallback {
    let decoder = decoder.clone();
    Box::new(move || {
        let options = HostOptions { kv_positions: POSITIONS, ..HostOptions::for_decoder(&decoder) };
        Ok(Box::new(HostDevice::new(decoder, options)?) as Box<dyn Device>)
    })
}

/// A graph on the adapter, with the host behind it; the device to spoil; its faults.
fn running(decoder: &Arc<Decoder>, places: usize) -> (Running, wgpu::Device, Faults) {
    let faults = Faults::default();
    let context = context(&faults);
    let device = context.device.clone();
    let gpu = upload(context, decoder, places, POSITIONS).expect("the model on the device");
    (start_with(Box::new(gpu), decoder, Some(on_host(decoder)), true), device, faults)
}

/// Ids of adapter and host together equal the host's, but for near ties.
fn assert_same(what: &str, decoder: &Arc<Decoder>, rows: &[f32], ids: &[TokenId]) {
    let wanted = plain(decoder, rows, ids.len()).0;
    if let Some(at) = (0..ids.len()).find(|at| ids[*at] != wanted[*at]) {
        let clear = margins(decoder, rows, &wanted)[at];
        assert!(clear < TIE, "{what}, id {at}: margin {clear}\n{ids:?}\n{wanted:?}");
    }
}

// ------------------------------------------------------------------ memory

#[test]
fn a_refused_buffer_ends_the_upload_and_frees_the_rest() {
    for partial in [false, true] {
        let decoder = trained(Activations::Int8);
        let places = if partial { decoder.geometry().moe.expect("experts").top_k } else { experts(&decoder) };
        let all = Faults::default();
        let gpu = upload(context(&all), &decoder, places, POSITIONS).expect("room");
        drop(gpu);
        let n = all.buffers();
        assert!(n > 40, "{n} buffers");
        for at in [0, 1, n / 3, n / 2, n - 2, n - 1] {
            let faults = Faults::default();
            faults.refuse_buffers(at, 1);
            let context = context(&faults);
            let device = context.device.clone();
            let refused = upload(context, &decoder, places, POSITIONS);
            let error = refused.err().unwrap_or_else(|| panic!("buffer {at} of {n} was refused"));
            assert!(matches!(error, DeviceError::OutOfMemory { .. }), "{at} of {n}: {error}");
            assert_eq!(faults.buffers(), at + 1, "nothing is asked for behind a refusal");
            // Whoever else holds the device sees that all of it is free again.
            let _ = device.poll(wgpu::PollType::wait_indefinitely());
            if let Some(report) = device.generate_allocator_report() {
                let left: Vec<&str> = report.allocations.iter().map(|allocation| allocation.name.as_str()).collect();
                let ours = left.iter().filter(|name| !name.contains("wgpu") && !name.contains("zero init")).count();
                assert_eq!(ours, 0, "{at} of {n}: {left:?}");
            }
        }
    }
}

fn knobs(faults_of: &str) -> Knobs {
    Knobs { device: DeviceChoice::Adapter(faults_of.into()), ..Knobs::default() }
}

async fn said(runtime: &Runtime) -> Vec<TokenId> {
    let mut session =
        runtime.session(Options { max_new_tokens: Some(12), eos: Some(vec![]), ..Options::default() }).await.unwrap();
    session.feed_ids(&[1, 2, 3, 4, 5].map(TokenId)).await.unwrap();
    session.decode().finish().await.unwrap().ids
}

#[tokio::test]
async fn a_full_device_takes_less_or_leaves_it_to_the_host() {
    let host = Knobs { device: DeviceChoice::Cpu, ..Knobs::default() };
    let wanted = said(&Runtime::builder(TRAINED).knobs(host).build().await.unwrap()).await;
    let all = Faults::default();
    let runtime = Runtime::builder(TRAINED).knobs(knobs(&adapter())).faults(all.clone()).build().await.unwrap();
    assert_eq!((runtime.device_kind(), said(&runtime).await), (DeviceKind::Gpu, wanted.clone()));
    let (n, places) = (all.buffers(), runtime.model().geometry.moe.unwrap().experts);
    runtime.shutdown().await;
    // A slot less, then fewer experts: what is refused is asked for again with less.
    for (at, refusals) in [(0, 1), (n / 2, 1), (n - 1, 1), (n - 1, 2), (3, 3)] {
        let faults = Faults::default();
        faults.refuse_buffers(at, refusals);
        let builder = Runtime::builder(TRAINED).knobs(knobs(&adapter())).faults(faults.clone());
        let runtime = builder.build().await.unwrap_or_else(|e| panic!("{refusals} refusals from {at}: {e}"));
        assert_eq!(
            (runtime.device_kind(), said(&runtime).await),
            (DeviceKind::Gpu, wanted.clone()),
            "{at}, {refusals}"
        );
        assert!(places > 0 && faults.buffers() > at + refusals);
        runtime.shutdown().await;
    }
    // A device that has room for nothing: an error where it was named, the host where it was not.
    let faults = Faults::default();
    faults.refuse_buffers(5, u64::MAX);
    let named = Runtime::builder(TRAINED).knobs(knobs(&adapter())).faults(faults.clone()).build().await;
    assert!(matches!(named, Err(Error::Device(DeviceError::OutOfMemory { .. }))), "{named:?}");
    faults.count_software_as_real();
    let runtime = Runtime::builder(TRAINED).faults(faults.clone()).build().await.unwrap();
    assert_eq!((runtime.device_kind(), said(&runtime).await), (DeviceKind::Host, wanted.clone()));
    runtime.shutdown().await;
    // And without faults the same choice takes the adapter.
    let faults = Faults::default();
    faults.count_software_as_real();
    let runtime = Runtime::builder(TRAINED).faults(faults).build().await.unwrap();
    assert_eq!((runtime.device_kind(), said(&runtime).await), (DeviceKind::Gpu, wanted));
}

#[tokio::test]
async fn an_adapter_that_refuses_is_followed_by_the_next() {
    let refused = Faults::default();
    refused.refuse_devices(u64::MAX);
    let named = Runtime::builder(TRAINED).knobs(knobs(&adapter())).faults(refused.clone()).build().await;
    let Err(Error::Device(DeviceError::Unfit { why })) = named else { panic!("{named:?}") };
    assert!(why.contains("refused a device"), "{why}");
    // Once only: where there is another candidate it is taken, else the host.
    let once = Faults::default();
    once.refuse_devices(1);
    once.count_software_as_real();
    let others = candidates(&DeviceChoice::Auto, true).unwrap().len() - 1;
    let runtime = Runtime::builder(TRAINED).faults(once).build().await.unwrap();
    let kind = if others > 0 { DeviceKind::Gpu } else { DeviceKind::Host };
    assert_eq!(runtime.device_kind(), kind);
    assert_eq!(said(&runtime).await.len(), 12);
}

// ------------------------------------------------------------------ loss

#[derive(Clone, Copy, Debug, PartialEq)]
enum Moment {
    /// Two flights of a decode are under way.
    Decoding,
    /// Passes of a prompt are under way.
    Prefilling,
    /// A state is being read.
    Reading,
    /// Nothing is under way.
    Idle,
}

impl Moment {
    /// Ids of the session: more than its channel holds where the device is to be busy when the reader has seen the first.
    fn ids(self) -> usize {
        if self == Moment::Decoding { 190 } else { 40 }
    }
}

/// Feeds and decodes, and destroys the device at the moment.
fn session_with_a_loss(
    running: &Running,
    device: &wgpu::Device,
    rows: &[f32],
    moment: Moment,
) -> (Vec<TokenId>, Finished) {
    let mut session = running.handle().try_open(SessionOptions::default()).unwrap();
    let answer = session.start_feed(rows.to_vec()).unwrap();
    if moment == Moment::Prefilling {
        device.destroy();
    }
    answer.blocking_recv().unwrap().unwrap();
    if moment == Moment::Reading {
        let read = session.start_read(riparian::device::Read::State).unwrap();
        device.destroy();
        // Of the old device, of the next one, or told that there is none.
        let _ = read.blocking_recv();
    }
    if moment == Moment::Idle {
        while counters(running).flights_unlanded > 0 {
            thread::sleep(Duration::from_millis(1));
        }
        device.destroy();
    }
    session.decode(Some(moment.ids())).unwrap();
    let mut ids = Vec::new();
    loop {
        match session.blocking_next().expect("a stream ends with its end") {
            Event::Token(token) => ids.push(token.id),
            Event::Finished(finished) => return (ids, *finished),
        }
        if moment == Moment::Decoding && ids.len() == 1 {
            let begun = Instant::now();
            while counters(running).flights_live < 2 && begun.elapsed() < Duration::from_secs(5) {}
            device.destroy();
        }
    }
}

#[test]
fn a_destroyed_device_is_noticed_and_its_sessions_go_on() {
    for moment in [Moment::Decoding, Moment::Prefilling, Moment::Reading, Moment::Idle] {
        for (act, partial) in [(Activations::F32, false), (Activations::Int8, true)] {
            in_time("a destroyed device", move || {
                let decoder = trained(act);
                let places = if partial { decoder.geometry().moe.unwrap().top_k } else { experts(&decoder) };
                let (running, device, _) = running(&decoder, places);
                let width = decoder.geometry().hidden;
                let rows = prompt(&decoder, 3 * PASS_ROWS + 3);
                let what = format!("{act:?}, {moment:?}, partial {partial}");
                let (ids, finished) = thread::scope(|scope| {
                    // Somebody else is on the device as well.
                    let beside = scope.spawn(|| decode(&running, &rows[..5 * width], 5 * width, 30));
                    let seen = session_with_a_loss(&running, &device, &rows, moment);
                    let (ids, finished) = beside.join().unwrap();
                    assert_eq!((ids.len(), finished.reason), (30, FinishReason::Length), "{what}, beside");
                    seen
                });
                assert_eq!((ids.len(), &finished.reason), (moment.ids(), &FinishReason::Length), "{what}");
                assert!(finished.stats.recovered, "{what}");
                assert_same(&what, &decoder, &rows, &ids);
                // The next one is the host's alone.
                let (ids, finished) = decode(&running, &rows, rows.len(), 20);
                assert_eq!(ids, plain(&decoder, &rows, 20).0, "{what}, next");
                assert!(!finished.stats.recovered);
                let seen = counters(&running);
                assert_eq!((seen.losses, seen.sessions_open, seen.violations), (1, 0, 0), "{what}: reported once");
                running.stop();
            });
        }
    }
}

#[test]
fn a_device_that_is_destroyed_during_the_upload_is_an_error() {
    let decoder = trained(Activations::Int8);
    let all = Faults::default();
    drop(upload(context(&all), &decoder, experts(&decoder), POSITIONS).expect("room"));
    let n = all.buffers();
    for at in [0, n / 3, n / 2, n - 1] {
        let decoder = decoder.clone();
        let error = in_time("an upload without a device", move || {
            let faults = Faults::default();
            faults.destroy_at_buffer(at);
            upload(context(&faults), &decoder, experts(&decoder), POSITIONS).err()
        });
        assert!(matches!(error, Some(DeviceError::Lost { .. })), "{at} of {n}: {error:?}");
    }
}

#[tokio::test]
async fn a_runtime_whose_device_goes_during_the_load_has_the_host() {
    let faults = Faults::default();
    faults.count_software_as_real();
    faults.destroy_at_buffer(20);
    let runtime = Runtime::builder(TRAINED).faults(faults).build().await.unwrap();
    assert_eq!((runtime.device_kind(), said(&runtime).await.len()), (DeviceKind::Host, 12));
}

#[test]
fn callbacks_that_never_come_are_a_loss_at_the_deadline() {
    for partial in [false, true] {
        in_time("a callback that never comes", move || {
            let decoder = trained(Activations::Int8);
            let places = if partial { decoder.geometry().moe.unwrap().top_k } else { experts(&decoder) };
            let faults = Faults::default();
            let gpu = upload(context(&faults), &decoder, places, POSITIONS).expect("room");
            let mut device = Spoiled::new(Box::new(gpu));
            assert!(device.facts.landing_deadline.is_some(), "waits have a deadline");
            device.facts.landing_deadline = Some(Duration::from_millis(1500));
            let running = start_with(Box::new(device), &decoder, Some(on_host(&decoder)), true);
            let rows = prompt(&decoder, 20);
            let mut session = running.handle().try_open(SessionOptions::default()).unwrap();
            session.start_feed(rows.clone()).unwrap().blocking_recv().unwrap().unwrap();
            session.decode(Some(60)).unwrap();
            let (mut ids, mut held) = (Vec::new(), None);
            let finished = loop {
                match session.blocking_next().expect("a stream ends with its end") {
                    Event::Token(token) => ids.push(token.id),
                    Event::Finished(finished) => break finished,
                }
                if ids.len() == 2 {
                    faults.hold_callbacks();
                    held = Some(Instant::now());
                }
            };
            assert_eq!((ids.len(), &finished.reason), (60, &FinishReason::Length));
            assert!(finished.stats.recovered && held.unwrap().elapsed() > Duration::from_millis(1400));
            assert_same("held", &decoder, &rows, &ids);
            assert_eq!(counters(&running).losses, 1);
            running.stop();
        });
    }
}

#[test]
fn a_slow_driver_is_no_loss() {
    for partial in [false, true] {
        in_time("a slow driver", move || {
            let decoder = trained(Activations::Int8);
            let places = if partial { decoder.geometry().moe.unwrap().top_k } else { experts(&decoder) };
            let gpu = upload(context(&Faults::default()), &decoder, places, POSITIONS).expect("room");
            let mut device = Spoiled::new(Box::new(gpu));
            let mut draw = 1u64;
            let mut sleep = move |most: u64| {
                draw = draw.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                thread::sleep(Duration::from_millis((draw >> 33) % most));
                Ok(())
            };
            let mut nap = sleep;
            device.append = Box::new(move || sleep(6));
            device.wait = Box::new(move || nap(25));
            let running = start_with(Box::new(device), &decoder, Some(on_host(&decoder)), true);
            let rows = prompt(&decoder, PASS_ROWS + 2);
            let (ids, finished) = decode(&running, &rows, rows.len(), 24);
            assert_eq!((ids.len(), finished.reason, finished.stats.recovered), (24, FinishReason::Length, false));
            assert_same("slow", &decoder, &rows, &ids);
            let seen = counters(&running);
            assert_eq!((seen.losses, seen.violations), (0, 0));
            running.stop();
        });
    }
}

// ------------------------------------------------------------------ capacity, numbers

#[test]
fn prompts_at_the_edge_of_the_adapters_context() {
    let limit = 40;
    for places in [2, usize::MAX] {
        let decoder = trained(Activations::Int8);
        let places = places.min(experts(&decoder)).max(decoder.geometry().moe.unwrap().top_k);
        let gpu = upload(context(&Faults::default()), &decoder, places, limit).expect("room");
        let running = start_with(Box::new(gpu), &decoder, None, true);
        for n in [limit - 1, limit, 3] {
            let rows = prompt(&decoder, n);
            let (ids, finished) = decode(&running, &rows, rows.len(), 1000);
            assert_eq!((ids.len(), finished.reason), (limit + 1 - n, FinishReason::Length), "{n} rows");
            assert_same(&format!("{n} rows"), &decoder, &rows, &ids);
        }
        let session = running.handle().try_open(SessionOptions::default()).unwrap();
        let fed = session.start_feed(prompt(&decoder, limit + 1)).unwrap().blocking_recv().unwrap();
        assert_eq!(fed, Err(SessionError::ContextFull { limit, wanted: limit + 1 }));
        drop(session);
        assert_eq!(counters(&running).violations, 0);
        running.stop();
    }
}

/// Activations that overflow f32, or whose squares do, end in an error that names the block which made them, as on the
/// host, and no id comes of them. The adapter notices, the host finds the block.
#[test]
fn an_overflow_names_its_block_on_an_adapter() {
    for (act, block) in MODES.into_iter().flat_map(|act| (0..blocks()).map(move |block| (act, block))) {
        // Finite values whose squares are not, and values that are not; in full banks and in others.
        let by = [1e20, 1e38, 1e30][block % 3];
        let decoder = scaled(act, block, by);
        let places = [experts(&decoder), decoder.geometry().moe.unwrap().top_k][usize::from(act == MODES[0])];
        let gpu = upload(context(&Faults::default()), &decoder, places, POSITIONS).expect("room");
        let running = start_with(Box::new(gpu), &decoder, None, false);
        // row by row, and in one pass
        for n in [1, 7] {
            let rows = prompt(&decoder, n);
            let (ids, finished) = decode(&running, &rows, rows.len(), 6);
            let named = FinishReason::Failed(SessionError::NotFinite { block: BlockIx::from(block) });
            assert_eq!((ids, finished.reason), (vec![], named), "{act:?}, block {block}, {n} rows, {by:e}");
        }
        assert_eq!(counters(&running).violations, 0);
        running.stop();
    }
}

/// One row of a prompt that is too large, wherever it stands, is noticed too.
#[test]
fn a_row_that_overflows_names_the_first_block_on_an_adapter() {
    for act in MODES {
        let decoder = trained(act);
        let gpu = upload(context(&Faults::default()), &decoder, experts(&decoder), POSITIONS).expect("room");
        let running = start_with(Box::new(gpu), &decoder, None, false);
        let hidden = decoder.geometry().hidden;
        let sound = prompt(&decoder, 7);
        for (n, at) in [(1, 0), (7, 3), (PASS_ROWS + 3, 5)] {
            let mut rows = prompt(&decoder, n);
            rows[at * hidden..(at + 1) * hidden].fill(1e25);
            let (ids, finished) = decode(&running, &rows, rows.len(), 6);
            let named = FinishReason::Failed(SessionError::NotFinite { block: BlockIx(0) });
            assert_eq!((ids, finished.reason), (vec![], named), "{act:?}, row {at} of {n}");
        }
        // The next session has the slot and nothing of it.
        let (ids, finished) = decode(&running, &sound, sound.len(), 6);
        assert_eq!((ids.len(), finished.reason), (6, FinishReason::Length));
        assert_same("the next", &decoder, &sound, &ids);
        running.stop();
    }
}

/// Activations beyond half floats are numbers like others.
#[test]
fn activations_beyond_half_floats_change_no_id() {
    for act in MODES {
        for block in 0..blocks() {
            // A scan multiplies five of its inputs before its norm, whose squares have to fit.
            let mamba = matches!(trained(act).geometry().blocks[block], BlockKind::Mamba);
            let decoder = scaled(act, block, if mamba { 1e3 } else { 1e5 });
            let gpu = upload(context(&Faults::default()), &decoder, experts(&decoder), POSITIONS).expect("room");
            let running = start_with(Box::new(gpu), &decoder, None, false);
            let rows = prompt(&decoder, PASS_ROWS + 1);
            let (ids, finished) = decode(&running, &rows, rows.len(), 6);
            let what = format!("{act:?}, block {block}");
            assert_eq!((ids.len(), &finished.reason), (6, &FinishReason::Length), "{what}");
            assert_same(&what, &decoder, &rows, &ids);
            running.stop();
        }
    }
}
