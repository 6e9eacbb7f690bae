//! Transcripts: speaker turns, events and words with their times (`model.md` §4.6, §4.7).

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use super::tokenizer::{Tokenizer, TokenizerError};

/// A transcript, taken apart.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Transcript {
    /// In the order they were said.
    pub turns: Vec<Turn>,
}

/// What one speaker says until another one begins.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Turn {
    /// N of `<spk:N>`; absent where the model told no speakers apart.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speaker: Option<u32>,
    /// The words, without tags.
    pub text: String,
    /// Event and style tags, in order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tags: Vec<Tag>,
    /// The words of `text`.
    pub words: Vec<Word>,
}

/// An event (`<ev:...>`) or a style (`<sty:...>`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Tag {
    /// `ev` or `sty`.
    pub kind: &'static str,
    /// What stands behind the colon.
    pub name: String,
    /// Words of the turn before it.
    pub before_word: usize,
}

/// A word with its times, as soon as they are known.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Word {
    /// The word as written, with its punctuation.
    pub word: String,
    /// Seconds from the start of the recording.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<f64>,
    /// Seconds from the start of the recording.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end: Option<f64>,
}

/// Pieces of all words, in the alignment tokenizer's vocabulary, as word times are found from them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Alignment {
    /// The speakers, each once (`None` for words before any tag), with the pieces of each of their words in order.
    pub tags: Vec<(Option<u32>, Vec<Vec<u32>>)>,
}

impl Transcript {
    /// Takes the text of a model apart.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let mut turns = vec![Draft::default()];
        let mut rest = text;
        while !rest.is_empty() {
            let turn = turns.last_mut().expect("there is always one");
            match next_tag(rest) {
                None => {
                    turn.text += rest;
                    break;
                }
                Some((at, kind, name, end)) => {
                    turn.text += &rest[..at];
                    rest = &rest[end..];
                    match (kind, name.parse()) {
                        ("spk", Ok(speaker)) => turns.push(Draft { speaker: Some(speaker), ..Draft::default() }),
                        _ => turn.tag(kind, name),
                    }
                }
            }
        }
        let turns = turns.into_iter().filter(|turn| !turn.is_empty()).map(Draft::finish).collect();
        Self { turns }
    }

    /// The words alone, turns separated by line breaks.
    #[must_use]
    pub fn plain(&self) -> String {
        let texts: Vec<&str> = self.turns.iter().map(|t| t.text.as_str()).filter(|t| !t.is_empty()).collect();
        texts.join("\n")
    }

    /// All words in order.
    pub fn words(&self) -> impl Iterator<Item = &Word> {
        self.turns.iter().flat_map(|turn| &turn.words)
    }

    /// The pieces of every word in the alignment tokenizer's vocabulary. Each word is encoded with a leading space.
    ///
    /// # Errors
    ///
    /// A word that the tokenizer refuses.
    pub fn alignment(&self, tokenizer: &Tokenizer) -> Result<Alignment, TokenizerError> {
        let mut by_speaker: BTreeMap<Option<u32>, Vec<Vec<u32>>> = BTreeMap::new();
        for turn in &self.turns {
            for word in &turn.words {
                let ids = tokenizer.encode(&format!(" {}", word.word), false)?;
                by_speaker.entry(turn.speaker).or_default().push(ids.into_iter().map(|id| id.0).collect());
            }
        }
        Ok(Alignment { tags: by_speaker.into_iter().collect() })
    }

    /// Writes down word times, in the order of [`Transcript::alignment`].
    ///
    /// # Panics
    ///
    /// If they are those of another transcript.
    pub fn set_times(&mut self, alignment: &Alignment, times: Vec<Vec<Option<(f64, f64)>>>) {
        assert_eq!(alignment.tags.len(), times.len(), "times for each speaker");
        let speakers = alignment.tags.iter().map(|(speaker, _)| *speaker);
        let mut times: BTreeMap<Option<u32>, _> = speakers.zip(times.into_iter().map(Vec::into_iter)).collect();
        for turn in &mut self.turns {
            for word in &mut turn.words {
                let mine = times.get_mut(&turn.speaker).expect("a speaker of this transcript");
                let span = mine.next().expect("a time for each word");
                (word.start, word.end) = (span.map(|s| s.0), span.map(|s| s.1));
            }
        }
    }
}

impl fmt::Display for Transcript {
    /// A line a turn, the speaker before it; with times, a line a word below it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for turn in &self.turns {
            if let Some(speaker) = turn.speaker {
                write!(f, "speaker {speaker}: ")?;
            }
            writeln!(f, "{}", turn.text)?;
            if turn.words.iter().any(|w| w.start.is_some()) {
                for word in &turn.words {
                    match (word.start, word.end) {
                        (Some(start), Some(end)) => writeln!(f, "{start:>11.3} {end:>9.3}  {}", word.word)?,
                        _ => writeln!(f, "{:>11} {:>9}  {}", "-", "-", word.word)?,
                    }
                }
            }
        }
        Ok(())
    }
}

/// A turn that is being read.
#[derive(Default)]
struct Draft {
    speaker: Option<u32>,
    text: String,
    tags: Vec<Tag>,
}

impl Draft {
    fn tag(&mut self, kind: &'static str, name: &str) {
        let before_word = words(&self.text).len();
        self.tags.push(Tag { kind, name: name.to_owned(), before_word });
        // A tag separates words.
        if !self.text.is_empty() && !self.text.ends_with(char::is_whitespace) {
            self.text.push(' ');
        }
    }

    fn is_empty(&self) -> bool {
        self.text.trim().is_empty() && self.tags.is_empty()
    }

    fn finish(self) -> Turn {
        let text = self.text.split_whitespace().collect::<Vec<_>>().join(" ");
        let words = words(&text).into_iter().map(|word| Word { word, start: None, end: None }).collect();
        Turn { speaker: self.speaker, text, tags: self.tags, words }
    }
}

/// The next tag of a text: where it starts, its kind and name, and where it ends.
fn next_tag(text: &str) -> Option<(usize, &'static str, &str, usize)> {
    text.match_indices('<').find_map(|(at, _)| {
        let inside = text[at + 1..].split_once('>')?.0;
        let (kind, name) = inside.split_once(':')?;
        let kind = ["spk", "ev", "sty"].into_iter().find(|k| *k == kind)?;
        let is_name = !name.is_empty() && name.chars().all(|c| !c.is_whitespace() && c != '<');
        (is_name && (kind != "spk" || name.parse::<u32>().is_ok())).then_some((at, kind, name, at + inside.len() + 2))
    })
}

/// Words of a text: what stands between spaces, and single characters where a script has no spaces. Marks
/// stay with the character they stand at.
fn words(text: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    for part in text.split_whitespace() {
        let mut word = String::new();
        for c in part.chars() {
            let ends = is_ideograph(c) || (c.is_alphanumeric() && word.contains(is_ideograph));
            if ends && word.contains(char::is_alphanumeric) {
                words.push(std::mem::take(&mut word));
            }
            word.push(c);
        }
        words.push(word);
    }
    words
}

/// Chinese and Japanese characters, which are said one by one.
fn is_ideograph(c: char) -> bool {
    let range = matches!(c,
        '\u{3040}'..='\u{30FF}' | '\u{31F0}'..='\u{31FF}' | '\u{3400}'..='\u{4DBF}' | '\u{4E00}'..='\u{9FFF}'
        | '\u{F900}'..='\u{FAFF}' | '\u{FF66}'..='\u{FF9D}' | '\u{20000}'..='\u{3FFFF}');
    range && c.is_alphanumeric()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(turn: &Turn) -> Vec<&str> {
        turn.words.iter().map(|w| w.word.as_str()).collect()
    }

    #[test]
    fn turns_follow_the_speakers() {
        let transcript = Transcript::parse("<spk:0> Hello there. <spk:1>Hi!<ev:laugh> <spk:0>So,");
        let seen: Vec<_> = transcript.turns.iter().map(|t| (t.speaker, t.text.as_str())).collect();
        assert_eq!(seen, [(Some(0), "Hello there."), (Some(1), "Hi!"), (Some(0), "So,")]);
        assert_eq!(transcript.turns[1].tags, [Tag { kind: "ev", name: "laugh".into(), before_word: 1 }]);
        assert_eq!(transcript.plain(), "Hello there.\nHi!\nSo,");
        let plain = Transcript::parse("Six seven.");
        assert_eq!((plain.turns.len(), plain.turns[0].speaker), (1, None));
        assert_eq!(said(&plain.turns[0]), ["Six", "seven."]);
        assert_eq!(Transcript::parse("  ").turns, []);
    }

    #[test]
    fn text_that_looks_like_tags_is_text() {
        for text in ["a < b > c", "<spk:x> y", "<spk:> y", "<spk:99999999999> y", "<ev: z> y", "x <", "<unk:1> y"] {
            let transcript = Transcript::parse(text);
            assert_eq!(transcript.turns.len(), 1, "{text}");
            assert_eq!(transcript.turns[0].text, text);
        }
        assert_eq!(Transcript::parse("a <b <spk:3>c").turns[1].speaker, Some(3));
    }

    #[test]
    fn tags_split_words_but_not_sentences() {
        let transcript = Transcript::parse("One<ev:cough>two <sty:whisper>three.");
        assert_eq!(transcript.turns[0].text, "One two three.");
        let places: Vec<_> = transcript.turns[0].tags.iter().map(|t| (t.kind, t.before_word)).collect();
        assert_eq!(places, [("ev", 1), ("sty", 2)]);
    }

    #[test]
    fn scripts_without_spaces_are_split_by_character() {
        assert_eq!(words("你好，world 「東京」です。ok"), ["你", "好，", "world", "「東", "京」", "で", "す。", "ok"]);
        assert_eq!(words("It's 3.5 — really"), ["It's", "3.5", "—", "really"]);
    }

    #[test]
    fn times_find_their_words() {
        let mut transcript = Transcript::parse("<spk:1>a b <spk:0>c <spk:1>d");
        let alignment = Alignment { tags: vec![(Some(0), vec![]), (Some(1), vec![])] };
        let times = vec![vec![Some((3.0, 4.0))], vec![Some((0.0, 1.0)), None, Some((5.0, 6.0))]];
        transcript.set_times(&alignment, times);
        let seen: Vec<_> = transcript.words().map(|w| (w.word.as_str(), w.start)).collect();
        assert_eq!(seen, [("a", Some(0.0)), ("b", None), ("c", Some(3.0)), ("d", Some(5.0))]);
        let text = transcript.to_string();
        assert!(text.starts_with("speaker 1: a b\n      0.000     1.000  a\n          -         -  b\n"), "{text}");
        let json = serde_json::to_value(&transcript).unwrap();
        assert_eq!(json["turns"][0]["words"][0], serde_json::json!({"word": "a", "start": 0.0, "end": 1.0}));
        assert_eq!(json["turns"][0]["words"][1], serde_json::json!({"word": "b"}));
    }
}
