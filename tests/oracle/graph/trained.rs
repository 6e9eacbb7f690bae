//! Recordings to ids: the trained tiny model's own perception, and the graph behind it.

use std::path::{Path, PathBuf};
use std::time::Instant;

use riparian::actors::payload::FinishReason;
use riparian::ids::TokenId;
use riparian::knobs::Activations;
use riparian::model::Model;

use super::{Drafting, Source, Through, Way, partial_banks};
use crate::common::tiny_transcribe_dir;
use crate::trained::{Ears, golden};

/// A prompt and its ids.
pub(super) struct Recording {
    pub(super) name: String,
    pub(super) rows: Vec<f32>,
    pub(super) ids: Vec<TokenId>,
}

/// The golden recordings where they are, else those that travel with the source, whose ids the host decoder says.
pub(super) fn recordings(source: &Source, model: &Model) -> Vec<Recording> {
    let ears = Ears::of(model);
    let rows = |wav: &Path| {
        let embedded = |ids: &[TokenId]| {
            let mut rows = vec![0.0; ids.len() * model.geometry.hidden];
            let each = rows.chunks_exact_mut(model.geometry.hidden);
            ids.iter().zip(each).for_each(|(id, row)| source.decoder.embed(*id, row));
            rows
        };
        [embedded(&ears.prompt.before), ears.hear(wav), embedded(&ears.prompt.after)].concat()
    };
    if let Some(folder) = tiny_transcribe_dir() {
        let all = golden(&folder).into_iter();
        return all.map(|(name, ids, _)| Recording { rows: rows(&folder.join(&name)), name, ids }).collect();
    }
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo");
    let mut wavs: Vec<PathBuf> = (demo.read_dir().expect("recordings"))
        .map(|entry| entry.expect("a name").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "wav"))
        .collect();
    wavs.sort();
    let of = |wav: PathBuf| {
        let rows = rows(&wav);
        let mut ids = source.plain(&rows, 64);
        let end = ids.iter().position(|id| model.eos.contains(id)).expect("a short text");
        ids.truncate(end + 1);
        Recording { name: wav.display().to_string(), rows, ids }
    };
    wavs.into_iter().map(of).collect()
}

/// What a trained model drafts is kept, all sessions open at once or one after the other.
#[test]
fn recordings_through_the_graph() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tiny-transcribe.cmf");
    let (source, model) = Source::of_file(&path, Activations::Int8);
    let recordings = recordings(&source, &model);
    let banks = partial_banks(source.geometry());
    let smallest = banks.first().copied();
    assert!(smallest.is_some() && source.geometry().draft, "experts and drafts");
    let ways = [
        (None, Drafting::Scheduled),
        (smallest, Drafting::Off),
        (smallest, Drafting::Depth(4)),
        (banks.get(1).copied().or(smallest), Drafting::Scheduled),
        (banks.get(banks.len() - 2).copied(), Drafting::Depth(1)),
        (banks.last().copied(), Drafting::Depth(3)),
    ];
    for (places, drafting) in ways {
        let started = Instant::now();
        let what = format!("{places:?} places, drafting {drafting:?}");
        let graph = source.start(&Way::bank(places));
        let open = |rows: &[f32]| graph.open(rows, &[7, 40], None, drafting.options(&model.eos));
        let check = |recording: &Recording, session: &mut _| {
            let got = Through::take(session);
            assert_eq!(got.ids, recording.ids, "{}: {what}", recording.name);
            assert_eq!(got.finished.reason, FinishReason::End, "{}: {what}", recording.name);
        };
        if drafting == Drafting::Scheduled {
            let mut sessions: Vec<_> = recordings.iter().map(|recording| open(&recording.rows)).collect();
            recordings.iter().zip(&mut sessions).for_each(|(recording, session)| check(recording, session));
        } else {
            recordings.iter().for_each(|recording| check(recording, &mut open(&recording.rows)));
        }
        graph.check_bank(places, &what);
        let seen = graph.counters();
        assert_eq!(seen.admitted > 0, places.is_some(), "{what}");
        let kept = seen.drafts_kept as f64 / seen.drafts_offered.max(1) as f64;
        println!(
            "{} recordings, {what}: {} misses, {} experts completed, {} admitted; {} of {} drafts kept, {:.1} %; {:.1} s",
            recordings.len(),
            seen.misses,
            seen.completed,
            seen.admitted,
            seen.drafts_kept,
            seen.drafts_offered,
            100.0 * kept,
            started.elapsed().as_secs_f32(),
        );
        assert_eq!(seen.drafts_offered > 0, drafting != Drafting::Off, "{what}");
        if drafting == Drafting::Depth(1) {
            assert!(kept > 0.9, "{what}: a trained model's drafts are kept");
        }
    }
}
