//! Where our own code parks and wakes threads, under a scheduler that tries their orders: a software device's queue
//! (`src/device/worker.rs`) and its landings (`src/device/board.rs`), compiled here from the crate's own files over
//! shuttle's locks; and the host's team of threads (`src/host/team.rs`), whose text `build.rs` puts over shuttle's atomics,
//! locks and threads. The actors' channels are crossbeam's and tokio's.

#![allow(dead_code, reason = "the files are the crate's, this uses a part of them")]

pub(crate) use riparian::{check, ids, invariants};

mod device;
pub mod team;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use device::board::{Board, BoardLandings};
use device::machine::{Machine, Maths, Micro, Routed};
use device::worker::assemble;
use device::{
    DeviceError, Item, Landing, Landings, Pass, Point, Queue, Run, Seed, Staging, Stamp, Wait, Work,
};
use ids::{BlockIx, ExpertIx, FlightId, LayerIx, Position, SessionId, SlotIx, TokenId, Turn};
use shuttle::thread;

/// A model without layers whose ids count its rows.
struct Counting;

impl Maths for Counting {
    type State = u32;

    fn start(&mut self, _: Option<&Seed>) -> u32 {
        0
    }

    fn embed(&self, id: TokenId) -> Vec<f32> {
        vec![id.0 as f32; 2]
    }

    fn route(&mut self, _: &mut u32, _: LayerIx, _: &mut [f32], _: bool) -> Result<Routed, BlockIx> {
        unreachable!("no layers")
    }

    fn experts(&mut self, _: LayerIx, _: &[f32], _: &[(ExpertIx, Vec<u32>)]) -> Vec<f32> {
        unreachable!("no layers")
    }

    fn shared(&mut self, _: LayerIx, _: &[f32]) -> Vec<f32> {
        unreachable!("no layers")
    }

    fn sum(&mut self, _: LayerIx, _: &mut [f32], _: &Routed, _: &[f32], _: &[f32]) -> Result<(), BlockIx> {
        unreachable!("no layers")
    }

    fn finish(&mut self, rows: &mut u32, batch: &mut [f32], first: usize, _: bool) -> Result<Vec<TokenId>, BlockIx> {
        let n = batch.len() / 2;
        Ok((first..n).map(|row| TokenId(*rows + row as u32 + 1)).collect())
    }

    fn keep(&mut self, rows: &mut u32, _: &[f32], kept: usize) {
        *rows += kept as u32;
    }

    fn draft(&mut self, _: &mut u32, _: TokenId, _: usize) -> Vec<TokenId> {
        Vec::new()
    }

    fn save(&self, _: &u32) -> Seed {
        unreachable!("nothing is read")
    }

    fn logits(&self, _: &u32) -> Vec<f32> {
        unreachable!("nothing is read")
    }
}

fn machine() -> Machine<Counting> {
    let script = riparian::device::scripted::Script { layers: 0, experts: 0, top_k: 0, places: 0, ..Default::default() };
    Machine::new(Counting, script.facts())
}

const SLOT: SlotIx = SlotIx(0);
const TURN: Turn = Turn(1);

fn start() -> Item {
    Item::Start { slot: SLOT, turn: TURN, session: SessionId(1), eos: Arc::new([]), seed: None }
}

/// A flight of one batch: the prompt's row, or a step.
fn flight(number: u32) -> Vec<Item> {
    let stamp = Stamp { flight: FlightId(u64::from(number) + 1), slot: SLOT, turn: TURN };
    let work = match number {
        0 => Work::Prefill(Arc::new(Pass { rows: vec![0.0; 2], accept: true })),
        _ => Work::Steps,
    };
    let (from, to) = (Point::start_of(number), Point::start_of(number + 1));
    let run = Run { stamp, from, to, work, limit: Position(60), peeks: vec![] };
    vec![Item::Run(run), Item::Land { stamp, staging: Staging(number as u16) }]
}

/// Somebody waits while one lands and another loses the device: the wait ends, with the landing or the loss.
pub fn a_wait_ends() {
    let board = Arc::new(Board::default());
    let wait = Wait::Land(Staging(0));
    board.own(wait);
    let (lands, loses) = (board.clone(), board.clone());
    let mut landings = BoardLandings(board);
    let lander = thread::spawn(move || lands.land(wait, Landing::Uploaded));
    let loser = thread::spawn(move || loses.lose("gone"));
    match landings.wait(wait, None) {
        Ok(Landing::Uploaded) => {}
        Ok(other) => panic!("{other:?}"),
        Err(error) => assert_eq!(error, DeviceError::Lost { why: "gone".into() }),
    }
    lander.join().unwrap();
    loser.join().unwrap();
}

/// Two who wait for different buffers: each gets its own, whatever the order in which they land.
pub fn waits_get_their_own() {
    let board = Arc::new(Board::default());
    let buffers = [Wait::Land(Staging(0)), Wait::Upload(device::UploadStaging(0))];
    buffers.into_iter().for_each(|wait| board.own(wait));
    let waiting = buffers.map(|wait| {
        let mut landings = BoardLandings(board.clone());
        thread::spawn(move || landings.wait(wait, None).map(|landing| format!("{landing:?}")))
    });
    let landers = [(1, Landing::Uploaded), (0, Landing::Logits(vec![]))].map(|(at, landing)| {
        let board = board.clone();
        thread::spawn(move || board.land(buffers[at], landing))
    });
    let got = waiting.map(|thread| thread.join().unwrap().unwrap());
    assert!(got[0].starts_with("Logits") && got[1].starts_with("Uploaded"), "{got:?}");
    landers.into_iter().for_each(|thread| thread.join().unwrap());
    assert!(board.is_idle());
}

/// Flights run and land in order while more are appended; the queue may close, or the device die, at any moment. Whoever
/// waits is told, ids are right up to there, and the thread ends.
fn flights(flights: u32, closes_after: Option<u32>, dies_at: Option<usize>) {
    let (mut queue, mut landings, run) = {
        let steps = AtomicUsize::new(0);
        assemble(machine(), 0, move |_: &Micro| match dies_at {
            Some(at) if steps.fetch_add(1, Ordering::Relaxed) == at => Err("a test took it away".into()),
            _ => Ok(()),
        })
    };
    let device = thread::spawn(run);
    let whole = closes_after.is_none() && dies_at.is_none();
    let reader = thread::spawn(move || {
        let mut ids = Vec::new();
        for number in 0..flights {
            match landings.wait(Wait::Land(Staging(number as u16)), None) {
                Ok(Landing::Record(record)) => {
                    assert_eq!(record.flight, FlightId(u64::from(number) + 1));
                    ids.extend(record.out.ids.iter().map(|id| id.0));
                }
                Ok(other) => panic!("{other:?}"),
                Err(error) => {
                    assert!(matches!(error, DeviceError::Lost { .. }) && !whole, "{error}");
                    break;
                }
            }
        }
        ids
    });
    let mut appended = queue.append(vec![start()]).is_ok();
    for number in 0..flights {
        if closes_after == Some(number) {
            break;
        }
        appended = appended && queue.append(flight(number)).is_ok();
    }
    assert!(appended || dies_at.is_some(), "a device that lives takes what is queued");
    let queue = if whole { Some(queue) } else { drop(queue); None };
    let ids = reader.join().unwrap();
    drop(queue);
    device.join().unwrap();
    assert_eq!(ids, (1..=ids.len() as u32).collect::<Vec<_>>());
    assert!(!whole || ids.len() == flights as usize);
}

/// All of them land.
pub fn flights_land() {
    flights(3, None, None);
}

/// The queue is closed behind two of them, at any moment of theirs.
pub fn a_queue_is_closed() {
    flights(3, Some(2), None);
}

/// The device dies at some entry.
pub fn a_device_dies() {
    for dies_at in [0, 1, 2, 4] {
        flights(3, None, Some(dies_at));
    }
}
