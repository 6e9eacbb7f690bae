//! `--record-routes`: which experts each position was routed to, into a file.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, bail};
use riparian::host::{Decoder, Pool, default_threads, routes_of};
use riparian::ids::TokenId;
use riparian::knobs::Knobs;
use riparian::model::Model;
use riparian::model::weights::Mixer;
use riparian::policy::routes::{RoutedText, RoutesOf};

/// A routing trace being written; it appears when it is finished.
pub(crate) struct Recorder {
    decoder: Decoder,
    of: RoutesOf,
    path: PathBuf,
    /// Where it grows until it is whole.
    partial: PathBuf,
    out: BufWriter<File>,
}

/// A decoder that finds routes out on the host, in the arithmetic the knobs ask for.
pub(crate) fn decoder(model: &Arc<Model>, knobs: &Knobs) -> Decoder {
    let threads = knobs.threads.map_or_else(default_threads, |threads| threads as usize);
    Decoder::new(Arc::clone(model), knobs.act, Pool::new(threads))
}

/// What the model is like, as a routing trace says it.
pub(crate) fn routes_from(model: &Model) -> anyhow::Result<RoutesOf> {
    let Some(moe) = model.geometry.moe.filter(|_| model.geometry.decoder_layers() > 0) else {
        bail!("the model has no experts, so that there is nothing to route");
    };
    let bytes = model.decoder.blocks.iter().filter_map(|block| match &block.mixer {
        Mixer::Moe(moe) => moe.experts.iter().map(|e| e.up.payload().len() + e.down.payload().len()).max(),
        _ => None,
    });
    Ok(RoutesOf {
        layers: model.geometry.decoder_layers(),
        experts: moe.experts,
        top_k: moe.top_k,
        expert_bytes: bytes.max().unwrap_or(0) as u64,
        hot: model.expert_hot.clone(),
    })
}

impl Recorder {
    pub(crate) fn create(path: &Path, model: &Arc<Model>, knobs: &Knobs) -> anyhow::Result<Self> {
        let of = routes_from(model)?;
        let mut partial = OsString::from(path);
        partial.push(".partial");
        let partial = PathBuf::from(partial);
        let file = File::create(&partial).with_context(|| format!("cannot write {}", partial.display()))?;
        let mut recorder =
            Self { decoder: decoder(model, knobs), of, path: path.to_owned(), partial, out: BufWriter::new(file) };
        recorder.of.write(&mut recorder.out)?;
        Ok(recorder)
    }

    /// Adds a text: its prompt's rows `[n, hidden]` and what was decoded behind them.
    pub(crate) fn record(&mut self, rows: &[f32], ids: &[TokenId]) -> anyhow::Result<()> {
        let picks = routes_of(&self.decoder, rows, ids)?;
        let prompt = rows.len() / self.decoder.geometry().hidden;
        self.of.write_text(&RoutedText { prompt, picks }, &mut self.out)?;
        Ok(())
    }

    pub(crate) fn finish(mut self) -> anyhow::Result<()> {
        self.out.flush()?;
        fs::rename(&self.partial, &self.path).with_context(|| format!("cannot write {}", self.path.display()))
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        // Finished, it has another name; given up, it is of use to nobody.
        let _ = fs::remove_file(&self.partial);
    }
}
