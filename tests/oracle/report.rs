//! What a comparison found: the largest difference of each kind, and what was excused.

use std::collections::BTreeMap;

/// Differences of one engine on one case. Printed when it is done.
#[derive(Debug)]
pub(crate) struct Report {
    title: String,
    worst: BTreeMap<&'static str, Worst>,
    /// Ids and expert choices that differ behind a near-tie, with the gap.
    excused: Vec<String>,
    checked: BTreeMap<&'static str, usize>,
}

/// The largest difference of one kind.
#[derive(Clone, Copy, Debug, Default)]
struct Worst {
    absolute: f32,
    /// Over the largest magnitude of the reference tensor it was seen in; of bounds that are absolute, nothing.
    relative: Option<f32>,
}

impl Report {
    pub(crate) fn new(engine: &str, case: &str) -> Self {
        Self {
            title: format!("{case}, {engine}"),
            worst: BTreeMap::new(),
            excused: Vec::new(),
            checked: BTreeMap::new(),
        }
    }

    /// Holds `got` to within `tolerance` of the peak of `want`.
    ///
    /// `kind` is what the figures are summed up under, `place` names the tensor.
    #[track_caller]
    pub(crate) fn close(&mut self, kind: &'static str, place: &str, got: &[f32], want: &[f32], tolerance: f32) {
        assert_eq!(got.len(), want.len(), "{}: {kind} {place}: length", self.title);
        let peak = want.iter().fold(0.0f32, |peak, w| peak.max(w.abs()));
        self.within(kind, place, got, want, tolerance * peak, Some(peak));
    }

    /// Holds `got` to within an absolute bound of `want`.
    #[track_caller]
    pub(crate) fn close_absolute(&mut self, kind: &'static str, place: &str, got: &[f32], want: &[f32], bound: f32) {
        assert_eq!(got.len(), want.len(), "{}: {kind} {place}: length", self.title);
        self.within(kind, place, got, want, bound, None);
    }

    #[track_caller]
    fn within(&mut self, kind: &'static str, place: &str, got: &[f32], want: &[f32], bound: f32, peak: Option<f32>) {
        let worst = self.worst.entry(kind).or_default();
        for (i, (got, want)) in got.iter().zip(want).enumerate() {
            let difference = (got - want).abs();
            // written so that NaN fails
            assert!(
                difference <= bound,
                "{}: {kind} {place}: value {i} is {got}, the reference {want}: {difference:e} apart, {bound:e} allowed",
                self.title,
            );
            worst.absolute = worst.absolute.max(difference);
            if let Some(peak) = peak.filter(|peak| *peak > 0.0) {
                worst.relative = Some(worst.relative.unwrap_or(0.0).max(difference / peak));
            }
        }
        *self.checked.entry(kind).or_default() += got.len();
    }

    /// Counts exact comparisons that held.
    pub(crate) fn equal(&mut self, kind: &'static str, count: usize) {
        *self.checked.entry(kind).or_default() += count;
    }

    /// Notes a difference behind a near-tie.
    pub(crate) fn excuse(&mut self, what: String) {
        self.excused.push(what);
    }

    /// Prints the figures; gives back how many differences were excused.
    pub(crate) fn print(self) -> usize {
        let mut line = self.title.clone();
        for (kind, count) in &self.checked {
            match self.worst.get(kind) {
                Some(Worst { absolute, relative: Some(relative) }) => {
                    line += &format!("\n    {kind}: {count} values, {absolute:.1e} apart, {relative:.1e} of the peak");
                }
                Some(Worst { absolute, relative: None }) => {
                    line += &format!("\n    {kind}: {count} values, {absolute:.1e} apart");
                }
                None => line += &format!("\n    {kind}: {count} equal"),
            }
        }
        println!("{line}\n    excused: {}", self.excused.len());
        for excuse in &self.excused {
            println!("        {excuse}");
        }
        self.excused.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "value 1")]
    fn nan_is_never_close() {
        Report::new("test", "nan").close("rows", "here", &[0.0, f32::NAN], &[1e9, 1.0], 1.0);
    }

    #[test]
    #[should_panic(expected = "length")]
    fn a_short_tensor_is_never_close() {
        Report::new("test", "short").close("rows", "here", &[], &[1.0], 1.0);
    }

    #[test]
    #[should_panic(expected = "apart")]
    fn the_bound_is_of_the_peak() {
        let mut report = Report::new("test", "peak");
        report.close("rows", "near", &[1.0, 10.0], &[1.04, 10.0], 5e-3);
        report.close("rows", "far", &[1.0, 10.0], &[1.06, 10.0], 5e-3);
    }
}
