//! Which experts each position of some texts was routed to: what a replay of admission is fed with.
//!
//! # Format
//!
//! Little-endian, one file for any number of texts:
//!
//! | bytes | what |
//! |---|---|
//! | 8 | `RIPROUT1` |
//! | u32 × 4 | MoE layers of the decoder, experts of a layer, experts a row picks, lists of hot experts (0, or one a layer) |
//! | u64 | bytes of one expert |
//! | | for each list, all experts of the layer as indices, most used first |
//! | | texts until the file ends |
//!
//! A text is a u32 with the positions of its prompt, a u32 with those decoded behind it, and for each position and each
//! layer the indices picked. An index is one byte where a layer has at most 256 experts, else a u16.

use std::io::{self, Read, Write};

use crate::ids::ExpertIx;

const MAGIC: &[u8; 8] = b"RIPROUT1";
/// Most layers, experts and positions believed.
const MOST: u32 = 1 << 24;

/// Why bytes are no routing trace.
#[derive(Debug, thiserror::Error)]
pub enum RoutesError {
    /// The source failed, or ended early.
    #[error("the routing trace cannot be read: {0}")]
    Io(#[from] io::Error),
    /// Another kind of file.
    #[error("the file begins with {seen:02x?}, a routing trace with {MAGIC:02x?}")]
    Magic {
        /// Its first bytes.
        seen: [u8; 8],
    },
    /// A number that cannot be.
    #[error("the routing trace has {seen} {what}, wanted {want}")]
    Number {
        /// Of what.
        what: &'static str,
        /// How many.
        seen: u64,
        /// What is accepted.
        want: &'static str,
    },
    /// An expert that does not exist.
    #[error("the routing trace names expert {seen} of {experts}")]
    Expert {
        /// Its index.
        seen: u32,
        /// Experts of a layer.
        experts: usize,
    },
}

/// What kind of model a trace is of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RoutesOf {
    /// MoE layers of the decoder.
    pub layers: usize,
    /// Experts of a layer.
    pub experts: usize,
    /// Experts a row picks.
    pub top_k: usize,
    /// Bytes of one expert.
    pub expert_bytes: u64,
    /// For each layer all experts, most used first; empty where that is not known.
    pub hot: Vec<Vec<ExpertIx>>,
}

/// One text: a prompt and what was decoded behind it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoutedText {
    /// Positions of the prompt.
    pub prompt: usize,
    /// `[positions, layers, top_k]`
    pub picks: Vec<ExpertIx>,
}

/// A routing trace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Routes {
    /// The model.
    pub of: RoutesOf,
    /// Texts, in the order in which they were made.
    pub texts: Vec<RoutedText>,
}

impl RoutesOf {
    /// Picks of one position.
    #[must_use]
    pub fn stride(&self) -> usize {
        self.layers * self.top_k
    }

    fn wide(&self) -> bool {
        self.experts > 256
    }

    /// Writes the part before the texts.
    ///
    /// # Errors
    ///
    /// What `out` says.
    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        out.write_all(MAGIC)?;
        for number in [self.layers, self.experts, self.top_k, self.hot.len()] {
            out.write_all(&(number as u32).to_le_bytes())?;
        }
        out.write_all(&self.expert_bytes.to_le_bytes())?;
        self.hot.iter().try_for_each(|list| self.write_experts(list, out))
    }

    /// Writes a text behind what was written before.
    ///
    /// # Errors
    ///
    /// What `out` says.
    ///
    /// # Panics
    ///
    /// If the picks are no whole positions.
    pub fn write_text(&self, text: &RoutedText, out: &mut impl Write) -> io::Result<()> {
        let positions = text.positions(self);
        assert_eq!(positions * self.stride(), text.picks.len(), "whole positions");
        out.write_all(&(text.prompt as u32).to_le_bytes())?;
        out.write_all(&((positions - text.prompt) as u32).to_le_bytes())?;
        self.write_experts(&text.picks, out)
    }

    fn write_experts(&self, experts: &[ExpertIx], out: &mut impl Write) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(experts.len() * if self.wide() { 2 } else { 1 });
        for expert in experts {
            if self.wide() { bytes.extend(expert.0.to_le_bytes()) } else { bytes.push(expert.0 as u8) }
        }
        out.write_all(&bytes)
    }

    fn read_experts(&self, count: usize, source: &mut impl Read) -> Result<Vec<ExpertIx>, RoutesError> {
        let width = if self.wide() { 2 } else { 1 };
        let mut bytes = Vec::new();
        // A file that promises more than it has is found out by reading, not by an allocation.
        source.take((count * width) as u64).read_to_end(&mut bytes)?;
        if bytes.len() < count * width {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        let index = |bytes: &[u8]| match bytes {
            [low, high] => u16::from_le_bytes([*low, *high]),
            bytes => u16::from(bytes[0]),
        };
        let check = |index: u16| {
            let exists = usize::from(index) < self.experts;
            exists.then_some(ExpertIx(index)).ok_or(RoutesError::Expert { seen: index.into(), experts: self.experts })
        };
        bytes.chunks_exact(width).map(|bytes| check(index(bytes))).collect()
    }
}

impl RoutedText {
    /// Positions in all.
    #[must_use]
    pub fn positions(&self, of: &RoutesOf) -> usize {
        self.picks.len() / of.stride().max(1)
    }

    /// The picks of each position, `[layers, top_k]`.
    pub fn by_position<'a>(&'a self, of: &RoutesOf) -> impl Iterator<Item = &'a [ExpertIx]> + use<'a> {
        self.picks.chunks_exact(of.stride().max(1))
    }
}

impl Routes {
    /// Reads a trace to its end.
    ///
    /// # Errors
    ///
    /// See [`RoutesError`].
    pub fn read(source: &mut impl Read) -> Result<Self, RoutesError> {
        let mut magic = [0; 8];
        source.read_exact(&mut magic)?;
        if &magic != MAGIC {
            return Err(RoutesError::Magic { seen: magic });
        }
        let [layers, experts, top_k, lists] = [number(source)?, number(source)?, number(source)?, number(source)?];
        let mut bytes = [0; 8];
        source.read_exact(&mut bytes)?;
        let wrong = |what, seen: u32, want| Err(RoutesError::Number { what, seen: seen.into(), want });
        match () {
            () if layers == 0 || layers > 4096 => return wrong("layers", layers, "1 to 4096"),
            () if experts == 0 || experts > 65_535 => return wrong("experts", experts, "1 to 65535"),
            () if top_k == 0 || top_k > experts => return wrong("experts a row picks", top_k, "1 to all of them"),
            () if lists != 0 && lists != layers => return wrong("lists of hot experts", lists, "none, or one a layer"),
            () => {}
        }
        let mut of = RoutesOf {
            layers: layers as usize,
            experts: experts as usize,
            top_k: top_k as usize,
            expert_bytes: u64::from_le_bytes(bytes),
            hot: Vec::new(),
        };
        of.hot = (0..lists).map(|_| of.read_experts(of.experts, source)).collect::<Result<_, _>>()?;
        let mut texts = Vec::new();
        while let Some(prompt) = number_or_end(source)? {
            let decoded = number(source)?;
            if prompt > MOST || decoded > MOST {
                return wrong("positions of a text", prompt.max(decoded), "16777216 at most");
            }
            let picks = of.read_experts((prompt + decoded) as usize * of.stride(), source)?;
            texts.push(RoutedText { prompt: prompt as usize, picks });
        }
        Ok(Self { of, texts })
    }

    /// Writes all of it.
    ///
    /// # Errors
    ///
    /// What `out` says.
    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        self.of.write(out)?;
        self.texts.iter().try_for_each(|text| self.of.write_text(text, out))
    }

    /// Positions of all texts: of prompts, and decoded.
    #[must_use]
    pub fn positions(&self) -> (usize, usize) {
        let prompt = self.texts.iter().map(|text| text.prompt).sum();
        let all: usize = self.texts.iter().map(|text| text.positions(&self.of)).sum();
        (prompt, all - prompt)
    }

    /// How often each expert was picked, `[layers][experts]`.
    #[must_use]
    pub fn counts(&self) -> Vec<Vec<u64>> {
        let mut counts = vec![vec![0; self.of.experts]; self.of.layers];
        for picks in self.texts.iter().flat_map(|text| text.by_position(&self.of)) {
            for (counts, picks) in counts.iter_mut().zip(picks.chunks_exact(self.of.top_k)) {
                picks.iter().for_each(|expert| counts[expert.index()] += 1);
            }
        }
        counts
    }
}

/// Experts by count, most used first; of equals the one `before` names earlier, else the lower index.
#[must_use]
pub fn by_count(counts: &[u64], before: &[ExpertIx]) -> Vec<ExpertIx> {
    let mut rank = vec![usize::MAX; counts.len()];
    before.iter().enumerate().for_each(|(at, expert)| rank[expert.index()] = at);
    let mut order: Vec<ExpertIx> = (0..counts.len()).map(ExpertIx::from).collect();
    order.sort_by_key(|expert| (std::cmp::Reverse(counts[expert.index()]), rank[expert.index()], *expert));
    order
}

fn number(source: &mut impl Read) -> Result<u32, RoutesError> {
    let mut bytes = [0; 4];
    source.read_exact(&mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}

/// A number, or nothing where the source has ended.
fn number_or_end(source: &mut impl Read) -> Result<Option<u32>, RoutesError> {
    let mut first = [0];
    let read = loop {
        match source.read(&mut first) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            read => break read?,
        }
    };
    if read == 0 {
        return Ok(None);
    }
    let mut rest = [0; 3];
    source.read_exact(&mut rest)?;
    Ok(Some(u32::from_le_bytes([first[0], rest[0], rest[1], rest[2]])))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn routes(experts: usize) -> Routes {
        let hot = vec![(0..experts).rev().map(ExpertIx::from).collect(); 3];
        let of = RoutesOf { layers: 3, experts, top_k: 2, expert_bytes: 1234, hot };
        let text = |prompt, positions: usize| RoutedText {
            prompt,
            picks: (0..positions * 6).map(|i| ExpertIx::from(i * 31 % experts)).collect(),
        };
        Routes { of, texts: vec![text(3, 7), text(0, 0), text(2, 2)] }
    }

    #[test]
    fn what_is_written_is_read() {
        for experts in [5, 256, 257, 1000] {
            let routes = routes(experts);
            let mut bytes = Vec::new();
            routes.write(&mut bytes).unwrap();
            assert_eq!(Routes::read(&mut &bytes[..]).unwrap(), routes);
            assert_eq!(routes.positions(), (5, 4));
            let all: u64 = routes.counts().iter().flatten().sum();
            assert_eq!(all, 9 * 6);
        }
    }

    #[test]
    fn what_is_broken_is_refused_wherever_it_breaks() {
        let mut bytes = Vec::new();
        let routes = routes(5);
        routes.write(&mut bytes).unwrap();
        let head = 8 + 16 + 8 + 15;
        for len in 0..bytes.len() {
            // Cut between texts it is a trace of fewer of them.
            let whole = [head, head + 8 + 42, head + 8 + 42 + 8].contains(&len);
            assert_eq!(Routes::read(&mut &bytes[..len]).is_ok(), whole, "cut at {len}");
        }
        let broken = |at: usize, byte: u8| {
            let mut bytes = bytes.clone();
            bytes[at] = byte;
            Routes::read(&mut &bytes[..]).unwrap_err().to_string()
        };
        assert!(broken(0, b'X').contains("begins with"));
        assert!(broken(8, 0).contains("0 layers"));
        assert!(broken(16, 9).contains("9 experts a row picks"));
        assert!(broken(20, 2).contains("2 lists"));
        assert!(broken(head + 8, 5).contains("names expert 5 of 5"));
        assert!(broken(head + 3, 255).contains("positions of a text"));
    }

    #[test]
    fn counts_decide_and_the_order_before_breaks_ties() {
        let order = by_count(&[3, 0, 9, 3, 0], &[3, 4].map(ExpertIx));
        assert_eq!(order, [2, 3, 0, 4, 1].map(ExpertIx));
    }
}
