//! Settings of the perception module, from the header of a file (`cmf.md` §6).
//!
//! Every key is optional; a key of the wrong kind is an error that names it. Widths and layer
//! counts are not settings: they come from the tensors.

use serde_json::Value;

use super::weights::PerceptionError;

/// Settings of the whole module.
#[derive(Clone, Debug, PartialEq)]
pub struct AudioConfig {
    /// Heads of the speech encoder.
    pub asr_heads: usize,
    /// Share of each head of the speech encoder that is rotated.
    pub asr_rotary_share: f64,
    /// Diarization and chunking.
    pub diarization: DiarizationConfig,
    /// A speaker is active in a frame above this mean probability.
    pub activity_threshold: f32,
    /// The word timestamp head.
    pub words: WordConfig,
}

/// Settings of the diarization model, and the chunks that all parts share.
#[derive(Clone, Debug, PartialEq)]
pub struct DiarizationConfig {
    /// Attention heads.
    pub heads: usize,
    /// Share of each head that is rotated.
    pub rotary_share: f64,
    /// Encoder frames of a chunk.
    pub chunk_length: usize,
    /// Encoder frames read before a chunk.
    pub chunk_left: usize,
    /// Encoder frames read after a chunk.
    pub chunk_right: usize,
    /// Frames the queue of recent frames holds.
    pub fifo_length: usize,
    /// Frames that leave the queue at a time.
    pub update_period: usize,
    /// Speakers, where the file says so; checked against the tensors.
    pub speakers: Option<usize>,
    /// Frames the speaker cache holds.
    pub cache_length: usize,
    /// Silence frames of each speaker in the cache.
    pub silence_frames: usize,
    /// Probabilities are raised to this before their logarithm.
    pub score_threshold: f32,
    /// Added to the scores of frames that just arrived.
    pub latest_boost: f32,
    /// Share of a speaker's places that positive scores must fill before others are dropped.
    pub min_positive_rate: f64,
    /// Share of a speaker's places whose scores are raised by 2 ln 2.
    pub strong_rate: f64,
    /// Share of a speaker's places whose scores are raised by ln 2.
    pub weak_rate: f64,
}

/// Settings of the word timestamp head.
#[derive(Clone, Debug, PartialEq)]
pub struct WordConfig {
    /// Attention heads.
    pub heads: usize,
    /// Share of each head that is rotated.
    pub rotary_share: f64,
    /// Rows of an encoder frame.
    pub upsampling: usize,
    /// Factor on the head's own encoder.
    pub residual_scale: f32,
    /// Class of the blank, where the file says so; the last class otherwise.
    pub blank: Option<usize>,
}

impl Default for DiarizationConfig {
    fn default() -> Self {
        Self {
            heads: 8,
            rotary_share: 1.0,
            chunk_length: 500,
            chunk_left: 50,
            chunk_right: 50,
            fifo_length: 40,
            update_period: 300,
            speakers: None,
            cache_length: 188,
            silence_frames: 1,
            score_threshold: 0.25,
            latest_boost: 0.05,
            min_positive_rate: 0.5,
            strong_rate: 0.75,
            weak_rate: 1.5,
        }
    }
}

impl Default for WordConfig {
    fn default() -> Self {
        Self { heads: 16, rotary_share: 0.5, upsampling: 2, residual_scale: 0.1, blank: None }
    }
}

impl Default for AudioConfig {
    fn default() -> Self {
        Self {
            asr_heads: 10,
            asr_rotary_share: 0.5,
            diarization: DiarizationConfig::default(),
            activity_threshold: 0.5,
            words: WordConfig::default(),
        }
    }
}

impl AudioConfig {
    /// Reads `audio_config` and `word_timestamp_config` of `source`, the record
    /// `provenance.nemotron_transcribe` of a file or the `config.json` of a checkpoint.
    ///
    /// # Errors
    ///
    /// [`PerceptionError::Config`] for a value of the wrong kind or out of range.
    pub fn from_json(source: &Value) -> Result<Self, PerceptionError> {
        let base = Self::default();
        let audio = Record::root(source, "audio_config");
        let asr = audio.at("asr_config");
        let diar = audio.at("diarization_config");
        let tower = diar.at("audio_config");
        let stream = diar.at("streaming_config");
        let words = Record::root(source, "word_timestamp_config");
        let d = base.diarization;
        asr.fixed("subsampling_factor", super::logmel::STACK, "8")?;
        asr.fixed("num_mel_bins", super::logmel::BINS, "128")?;
        let config = Self {
            asr_heads: asr.count("num_attention_heads", base.asr_heads, 1)?,
            asr_rotary_share: asr.rotary_share(base.asr_rotary_share)?,
            diarization: DiarizationConfig {
                heads: tower.count("num_attention_heads", d.heads, 1)?,
                rotary_share: tower.rotary_share(d.rotary_share)?,
                chunk_length: diar.count("chunk_length", d.chunk_length, 1)?,
                chunk_left: diar.count("chunk_left_context", d.chunk_left, 0)?,
                chunk_right: diar.count("chunk_right_context", d.chunk_right, 0)?,
                fifo_length: diar.count("fifo_length", d.fifo_length, 0)?,
                update_period: diar.count("speaker_cache_update_period", d.update_period, 1)?,
                speakers: stream.optional_count("num_speakers")?,
                cache_length: stream.count("speaker_cache_length", d.cache_length, 1)?,
                silence_frames: stream.count("speaker_cache_silence_frames_per_speaker", d.silence_frames, 0)?,
                score_threshold: stream.share("prediction_score_threshold", f64::from(d.score_threshold))? as f32,
                latest_boost: stream.number("latest_frames_score_boost", f64::from(d.latest_boost))? as f32,
                min_positive_rate: stream.number("min_positive_scores_rate", d.min_positive_rate)?,
                strong_rate: stream.number("strong_boost_rate", d.strong_rate)?,
                weak_rate: stream.number("weak_boost_rate", d.weak_rate)?,
            },
            activity_threshold: audio.number("speaker_activity_threshold", f64::from(base.activity_threshold))? as f32,
            words: WordConfig {
                heads: words.count("num_attention_heads", base.words.heads, 1)?,
                rotary_share: words.rotary_share(base.words.rotary_share)?,
                upsampling: words.count("upsampling_factor", base.words.upsampling, 1)?,
                residual_scale: words.number("residual_scale", f64::from(base.words.residual_scale))? as f32,
                blank: words.optional_count("blank_token_id")?,
            },
        };
        Ok(config)
    }
}

impl DiarizationConfig {
    /// Whether the cache has room for what the model's speakers need.
    pub(crate) fn check_speakers(&self, speakers: usize) -> Result<(), PerceptionError> {
        let error = |key: &str, seen: usize, wanted| PerceptionError::Config {
            key: format!("audio_config.diarization_config.streaming_config.{key}"),
            seen: seen.to_string(),
            wanted,
        };
        if self.speakers.is_some_and(|s| s != speakers) || speakers == 0 {
            let seen = self.speakers.unwrap_or(speakers);
            return Err(error("num_speakers", seen, "the number of rows of single_hidden_to_spks"));
        }
        if self.cache_length / speakers < self.silence_frames {
            return Err(error("speaker_cache_length", self.cache_length, "room for each speaker's silence frames"));
        }
        Ok(())
    }
}

/// An object of the configuration, or nothing, and the path to it.
struct Record<'a> {
    value: Option<&'a Value>,
    path: String,
}

impl<'a> Record<'a> {
    fn root(source: &'a Value, key: &str) -> Self {
        Self { value: source.get(key), path: key.to_owned() }
    }

    fn at(&self, key: &str) -> Self {
        Self { value: self.value.and_then(|v| v.get(key)), path: format!("{}.{key}", self.path) }
    }

    fn error(&self, wanted: &'static str) -> PerceptionError {
        let seen = self.value.map_or_else(|| "absent".into(), Value::to_string);
        PerceptionError::Config { key: self.path.clone(), seen, wanted }
    }

    /// A null counts as absent.
    fn present(&self) -> Option<&'a Value> {
        self.value.filter(|v| !v.is_null())
    }

    fn optional_count(&self, key: &str) -> Result<Option<usize>, PerceptionError> {
        let record = self.at(key);
        let Some(value) = record.present() else { return Ok(None) };
        // Large enough for any model, small enough that sums of counts cannot overflow.
        match value.as_u64() {
            Some(count) if count <= 1 << 24 => Ok(Some(count as usize)),
            _ => Err(record.error("a count of at most 2^24")),
        }
    }

    fn count(&self, key: &str, default: usize, least: usize) -> Result<usize, PerceptionError> {
        match self.optional_count(key)? {
            None => Ok(default),
            Some(count) if count >= least => Ok(count),
            Some(_) => Err(self.at(key).error("a count of at least 1")),
        }
    }

    /// A count for which one value alone is implemented.
    fn fixed(&self, key: &str, value: usize, wanted: &'static str) -> Result<(), PerceptionError> {
        match self.optional_count(key)? {
            Some(seen) if seen != value => Err(self.at(key).error(wanted)),
            _ => Ok(()),
        }
    }

    fn number(&self, key: &str, default: f64) -> Result<f64, PerceptionError> {
        let record = self.at(key);
        match record.present().map(Value::as_f64) {
            None => Ok(default),
            Some(Some(number)) if (0.0..1e6).contains(&number) => Ok(number),
            Some(_) => Err(record.error("a number that is not negative")),
        }
    }

    fn share(&self, key: &str, default: f64) -> Result<f64, PerceptionError> {
        match self.number(key, default)? {
            share if share > 0.0 && share <= 1.0 => Ok(share),
            _ => Err(self.at(key).error("a share above 0 and up to 1")),
        }
    }

    fn rotary_share(&self, default: f64) -> Result<f64, PerceptionError> {
        self.at("rope_parameters").share("partial_rotary_factor", default)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn missing_keys_are_defaults() {
        assert_eq!(AudioConfig::from_json(&json!({})).unwrap(), AudioConfig::default());
        let some = json!({
            "audio_config": {
                "asr_config": {"num_attention_heads": 4, "rope_parameters": {"partial_rotary_factor": null}},
                "diarization_config": {"fifo_length": 7, "streaming_config": {"fifo_length": 264, "num_speakers": 4}}
            },
            "word_timestamp_config": {"blank_token_id": 40}
        });
        let config = AudioConfig::from_json(&some).unwrap();
        assert_eq!((config.asr_heads, config.asr_rotary_share), (4, 0.5));
        assert_eq!((config.diarization.fifo_length, config.diarization.speakers), (7, Some(4)));
        assert_eq!(config.words.blank, Some(40));
    }

    #[test]
    fn wrong_kinds_are_named() {
        for (source, key) in [
            (json!({"audio_config": {"asr_config": {"num_attention_heads": "four"}}}), "num_attention_heads"),
            (json!({"audio_config": {"asr_config": {"num_attention_heads": 0}}}), "num_attention_heads"),
            (json!({"audio_config": {"asr_config": {"subsampling_factor": 4}}}), "subsampling_factor"),
            (json!({"audio_config": {"diarization_config": {"chunk_length": 0}}}), "chunk_length"),
            (json!({"audio_config": {"diarization_config": {"chunk_length": -5}}}), "chunk_length"),
            (json!({"audio_config": {"diarization_config": {"fifo_length": 1e30}}}), "fifo_length"),
            (json!({"audio_config": {"speaker_activity_threshold": []}}), "speaker_activity_threshold"),
            (json!({"word_timestamp_config": {"rope_parameters": {"partial_rotary_factor": 1.5}}}), "partial_rotary"),
        ] {
            match AudioConfig::from_json(&source) {
                Err(PerceptionError::Config { key: seen, .. }) => assert!(seen.contains(key), "{seen}"),
                other => panic!("{source}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_cache_without_room_is_refused() {
        let config = DiarizationConfig { cache_length: 3, silence_frames: 1, ..DiarizationConfig::default() };
        assert!(config.check_speakers(4).is_err() && config.check_speakers(3).is_ok());
        let config = DiarizationConfig { speakers: Some(4), ..DiarizationConfig::default() };
        assert!(config.check_speakers(8).is_err() && config.check_speakers(4).is_ok());
    }
}
