//! Kernels of drafts and of verify passes.

use riparian::device::kernels::{
    ACCEPT, Choice, DRAFT_FUSE, DRAFT_PICK, DRAFT_ROWS, EXPERTS_DOWN, Encoding, Format, Kernel, Team, Variant,
};
use riparian::ids::TokenId;
use riparian::knobs::Activations;
use riparian::model::tensors::{Codec, Matrix};
use riparian::reference;

use crate::gpu::{Buffer, Gpu, Random, Tolerance, UNWRITTEN, close};
use crate::prefill::{NONE, gpu};
use crate::weights::{Arena, lay, random};

const WG: usize = 256;
const SUM_ORDER: Tolerance = Tolerance { nmse: 1e-12, max_abs: 2e-6, why: "f32 sums in another order" };
const LADDER: Tolerance = Tolerance { nmse: 1e-10, max_abs: 1e-5, why: "exp2 of a rung rounds otherwise" };
const CODE_FLIPS: Tolerance =
    Tolerance { nmse: 2e-6, max_abs: 5e-3, why: "a code may move by one where the norm or the division rounds" };

fn choice(gpu: &Gpu, format: Format, int8: bool, rows: usize, wide: usize) -> Choice {
    let out = format.encoding(int8);
    let team = gpu.context.team;
    Choice { team, format, int8, out, rows, wide, group_norm: false, full: true, pass: false }
}

/// A kernel with the bodies of this adapter, and with those that real GPUs get.
fn bodies(gpu: &Gpu, kernel: &Kernel, choice: &Choice) -> [Variant; 2] {
    let own = kernel.variant(choice);
    let mut other = kernel.variant(&Choice { team: Team::Subgroup32, ..*choice });
    let team = match gpu.context.team {
        Team::None => "team_none",
        Team::Subgroup => "team_subgroup",
        Team::Subgroup32 => "team_subgroup32",
    };
    assert_eq!(own.commons[0], team);
    other.commons[0] = own.commons[0];
    [own, other]
}

fn flight(gpu: &Gpu, rows: usize, limit: u32, accept: u32) -> Buffer {
    gpu.buffer(&[7, rows as u32, 11, 0, limit, accept, 1, 1])
}

/// Words of a live slot.
fn control(position: usize) -> [u32; 36] {
    let mut control = [0; 36];
    (control[0], control[6]) = (7, position as u32);
    control
}

// ------------------------------------------------------------------ accept

const COLS: usize = 64;
const VOCAB: usize = 40;
const GROUPS: usize = 3;
const ROOM: usize = 16;

/// What an accept decides, in plain words.
#[derive(Debug, Default, PartialEq)]
struct Decided {
    ids: Vec<u32>,
    stand: usize,
    position: usize,
    stop: u32,
    /// Drafts that agreed, drafts offered.
    round: Option<(u32, u32)>,
}

fn decide(best: &[u32], drafts: &[u32], position: usize, limit: usize, eos: &[u32]) -> Decided {
    let most = best.len().min(limit.max(position + 1) - position);
    let mut out = Decided::default();
    let mut ended = false;
    for row in 0..most {
        if ended || best[row] == NONE || row > 0 && drafts[row - 1] != best[row - 1] {
            break;
        }
        out.ids.push(best[row]);
        ended = eos.contains(&best[row]);
    }
    let kept = out.ids.len();
    out.stand = kept.max(1);
    out.position = position + out.stand;
    if kept > 0 && most > 1 {
        let end_was_drafted = ended && kept < most && drafts[kept - 1] == best[kept - 1];
        let offered = if ended { kept.min(most - 1) } else { most - 1 };
        out.round = Some(((kept - 1 + usize::from(end_was_drafted)) as u32, offered as u32));
    }
    out.stop = if kept == 0 {
        4
    } else if ended || out.position >= limit {
        3
    } else {
        0
    };
    out
}

#[test]
fn accept() {
    let gpu = gpu();
    let mut rng = Random::new(3);
    let table = random(Codec::Q8_2f, VOCAB, COLS, &mut rng);
    let laid = lay(&table);
    let mut arena = Arena::default();
    let [base, side, field] = arena.matrix(&laid);
    let arena = gpu.buffer(&arena.0);
    let own = choice(&gpu, Format::Q8, true, 1, 1);
    let pipeline = gpu.pipeline(ACCEPT.variant(&own), &[("WG", WG), ("COLS", COLS), ("LAST_BLOCK", 5)]);
    let params = [GROUPS as u32, VOCAB as u32, 0, base, side, field, 1, ROOM as u32, ROOM as u32, 0, 0, 0];
    let params = gpu.buffer(&params);
    let position = 20;
    let mut seen = [0; 5];
    for case in 0..200 {
        let rows = 1 + case % 5;
        let best: Vec<u32> =
            (0..rows).map(|_| if rng.unit() < 0.02 { NONE } else { rng.bits() % VOCAB as u32 }).collect();
        // most drafts agree
        let drafts: Vec<u32> =
            best.iter().map(|id| if rng.unit() < 0.8 { *id } else { rng.bits() % VOCAB as u32 }).collect();
        let limit = if rng.unit() < 0.3 { position + 1 + rng.bits() as usize % 5 } else { 1000 };
        let eos = if rng.unit() < 0.4 { vec![best[rng.bits() as usize % rows]] } else { vec![] };
        let want = decide(&best, &drafts, position, limit, &eos);
        seen[want.stop as usize] += 1;

        // the best of a row lies in one of its groups, a tie of a higher id in another
        let logits: Vec<u32> = (best.iter())
            .flat_map(|id| {
                let at = rng.bits() as usize % GROUPS;
                (0..GROUPS).flat_map(move |group| {
                    let lower = [(-1.0f32).to_bits(), 1];
                    match (*id, group) {
                        (NONE, _) => [(-3.4e38f32).to_bits(), NONE],
                        (id, group) if group == at => [2.5f32.to_bits(), id],
                        (id, group) if group == (at + 1) % GROUPS => [2.5f32.to_bits(), id + 1],
                        _ => lower,
                    }
                })
            })
            .collect();
        let mut words = control(position);
        words[13] = eos.len() as u32;
        words[20..20 + eos.len()].copy_from_slice(&eos);
        // another flight's record lies there, and a few ids of this one where it is this one's
        let (count, rounds) = if case % 3 == 0 { (4, 2) } else { (0, 0) };
        words[9] = 4;
        words[16] = 2;
        (words[10], words[11]) = if case % 3 == 0 { (11, 0) } else { (9, 0) };
        let slot = gpu.buffer(&words);
        let (rows_control, chain_control) = (gpu.buffer(&control(0)), gpu.buffer(&control(0)));
        let (out, x, next) = (gpu.empty(2 * ROOM), gpu.empty(COLS), gpu.empty(5 * COLS));
        gpu.run(
            &pipeline,
            &[
                &flight(&gpu, rows, limit as u32, 1),
                &slot,
                &params,
                &arena,
                &arena,
                &gpu.buffer(&logits),
                &out,
                &x,
                &next,
                &gpu.buffer(&drafts),
                &rows_control,
                &chain_control,
            ],
            [1, 1, 1],
        );
        let (slot, out) = (gpu.read(&slot), gpu.read(&out));
        let what = format!("case {case}: {best:?}, drafts {drafts:?}, limit {limit}, end {eos:?}");
        let kept = want.ids.len();
        assert_eq!((slot[6] as usize, slot[15] as usize, slot[1]), (want.position, want.stand, want.stop), "{what}");
        assert_eq!((slot[7] as usize, slot[14]), (want.stand - 1, 1), "{what}");
        assert_eq!(out[count..count + kept], want.ids, "{what}");
        assert_eq!(slot[9] as usize, count + kept, "{what}");
        assert_eq!(slot[16] as usize, rounds + usize::from(want.round.is_some()), "{what}");
        if let Some((agreed, offered)) = want.round {
            assert_eq!(out[ROOM + rounds], agreed | offered << 16, "{what}");
        }
        if let Some(last) = want.ids.last() {
            let mut row = vec![0.0; COLS];
            for (at, id) in want.ids.iter().enumerate() {
                reference::embed::embed(&table, TokenId(*id), &mut row);
                close(&what, &gpu.read_floats(&next)[at * COLS..(at + 1) * COLS], &row, SUM_ORDER);
            }
            close(&what, &gpu.read_floats(&x), &row, SUM_ORDER);
            assert_eq!(slot[8], *last, "{what}");
        }
        assert!(gpu.read(&next)[kept * COLS..].iter().all(|word| *word == UNWRITTEN), "{what}");
        let (rows_control, chain_control) = (gpu.read(&rows_control), gpu.read(&chain_control));
        assert_eq!(
            (rows_control[0], rows_control[1] == 0, rows_control[6] as usize, rows_control[15] as usize),
            (7, kept > 0, position, want.stand),
            "{what}"
        );
        assert_eq!(
            (chain_control[0], chain_control[1], chain_control[6] as usize),
            (7, want.stop, want.position - 1),
            "{what}"
        );
    }
    assert!(seen[0] > 40 && seen[3] > 40 && seen[4] > 0, "{seen:?}");
}

/// A halted slot keeps everything, and what follows is told so.
#[test]
fn an_accept_of_a_halted_slot_stops_what_follows() {
    let gpu = gpu();
    let own = choice(&gpu, Format::F32, true, 1, 1);
    let pipeline = gpu.pipeline(ACCEPT.variant(&own), &[("WG", WG), ("COLS", COLS), ("LAST_BLOCK", 5)]);
    let params = gpu.buffer(&[1, 4, 0, 0, 0, NONE, 1, ROOM as u32, ROOM as u32, 0, 0, 0]);
    let mut words = control(20);
    words[1] = 1;
    let (slot, rows_control, chain_control) = (gpu.buffer(&words), gpu.buffer(&control(5)), gpu.buffer(&control(5)));
    let (out, x, next) = (gpu.empty(2 * ROOM), gpu.empty(COLS), gpu.empty(COLS));
    let arena = gpu.floats(&[0.5; 4 * COLS]);
    let best = gpu.buffer(&[1.0f32.to_bits(), 2]);
    gpu.run(
        &pipeline,
        &[
            &flight(&gpu, 1, 1000, 1),
            &slot,
            &params,
            &arena,
            &arena,
            &best,
            &out,
            &x,
            &next,
            &gpu.buffer(&[0]),
            &rows_control,
            &chain_control,
        ],
        [1, 1, 1],
    );
    assert_eq!(gpu.read(&slot), words);
    assert!(gpu.read(&x).iter().chain(&gpu.read(&out)).all(|word| *word == UNWRITTEN));
    assert_eq!([gpu.read(&rows_control)[1], gpu.read(&chain_control)[1]], [5, 5]);
}

#[test]
fn draft_pick() {
    let gpu = gpu();
    let mut rng = Random::new(8);
    let table = random(Codec::Q8_2f, VOCAB, COLS, &mut rng);
    let mut arena = Arena::default();
    let [base, side, field] = arena.matrix(&lay(&table));
    let arena = gpu.buffer(&arena.0);
    let own = choice(&gpu, Format::Q8, true, 1, 1);
    let pipeline = gpu.pipeline(DRAFT_PICK.variant(&own), &[("WG", WG), ("COLS", COLS)]);
    for (given, best, want) in [(0, 7, 7), (30, 7, 33), (0, NONE, 0)] {
        let params = [1, VOCAB as u32, 0, base, side, field, 1, 2, given, 0, 0, 0];
        // what is given stands at its position; the chain stands two before the draft's
        let known: Vec<u32> = (0..30).map(|p| p + 11).collect();
        let chain = gpu.buffer(&control(20));
        let (x, drafts) = (gpu.empty(4 * COLS), gpu.empty(4));
        gpu.run(
            &pipeline,
            &[
                &flight(&gpu, 4, 1000, 1),
                &chain,
                &gpu.buffer(&params),
                &arena,
                &arena,
                &gpu.buffer(&[1.0f32.to_bits(), best]),
                &x,
                &drafts,
                &gpu.buffer(&known),
            ],
            [1, 1, 1],
        );
        assert_eq!(gpu.read(&drafts), [UNWRITTEN, UNWRITTEN, want, UNWRITTEN]);
        assert_eq!(gpu.read(&chain)[6], 21);
        let mut row = vec![0.0; COLS];
        reference::embed::embed(&table, TokenId(want), &mut row);
        let got = gpu.read(&x);
        assert!(got[..3 * COLS].iter().all(|word| *word == UNWRITTEN));
        close("embedding", &gpu.read_floats(&x)[3 * COLS..], &row, SUM_ORDER);
    }
}

// ------------------------------------------------------------------ rows and fusion

#[test]
fn draft_rows() {
    let gpu = gpu();
    let mut rng = Random::new(4);
    let (rows, width, cols) = (3, 48, 64);
    let x = rng.normals(rows * width).into_iter().map(|v| v + 0.3).collect::<Vec<_>>();
    let wide = |x: &[f32]| -> Vec<f32> {
        x.chunks_exact(width).flat_map(|row| [row, &vec![0.0; cols - width]].concat()).collect()
    };
    let (norm, kept) = (rng.normals(width), rng.normals(width));
    let mut arena = Arena::default();
    let at = arena.floats(&wide(&norm));
    let own = choice(&gpu, Format::F32, true, 1, 1);
    let numbers = [("WG", WG), ("COLS", cols), ("HIDDEN", width), ("EPS", 0)];
    let pipeline = gpu.pipeline(DRAFT_ROWS.variant(&own), &numbers);
    for how in 0..3u32 {
        for before in [0, 1] {
            let slot = gpu.buffer(&control(9));
            let out = gpu.empty(rows * cols);
            gpu.run(
                &pipeline,
                &[
                    &flight(&gpu, rows, 1000, 1),
                    &slot,
                    &gpu.buffer(&[at, how, before, 0]),
                    &gpu.buffer(&arena.0),
                    &gpu.floats(&wide(&x)),
                    &gpu.floats(&wide(&kept)),
                    &out,
                ],
                [rows as u32, 1, 1],
            );
            let mut made = vec![0.0; width];
            let mut want = if before == 1 { kept.clone() } else { vec![] };
            for row in x.chunks_exact(width) {
                match how {
                    0 => made.copy_from_slice(row),
                    1 => reference::rms_norm::rms_norm(row, &norm, 0.0, &mut made),
                    _ => {
                        let mean = row.iter().sum::<f32>() / width as f32;
                        made.iter_mut().zip(row).for_each(|(m, v)| *m = v - mean);
                    }
                }
                want.extend(&made);
            }
            want.truncate(rows * width);
            close(&format!("rows, {how}, before {before}"), &gpu.read_floats(&out), &wide(&want), SUM_ORDER);
        }
    }
}

#[test]
fn draft_fuse() {
    let gpu = gpu();
    let mut rng = Random::new(6);
    let (width, row) = (80, 96);
    let wide =
        |x: &[f32]| -> Vec<f32> { x.chunks_exact(width).flat_map(|r| [r, &vec![0.0; row - width]].concat()).collect() };
    for (codec, format) in [(Codec::Q8_2f, Format::Q8), (Codec::Q4tp, Format::Q4), (Codec::Bf16, Format::Bf16)] {
        // a matrix of q4tp has whole groups of 32 columns
        let matrix = random(codec, width, 2 * width, &mut rng);
        let laid = lay(&matrix);
        for act in [Activations::Int8, Activations::F32] {
            let int8 = act == Activations::Int8;
            let encoding = format.encoding(int8);
            for (rows, wide_rows) in [(1, 1), (2, 1), (2, 2), (3, 4), (4, 2), (5, 1), (5, 4)] {
                let at_once = if encoding == Encoding::F32 { 1 } else { rows };
                let following = rng.normals((rows + 1) * width);
                let hidden = rng.normals(rows * width);
                let (enorm, hnorm) = (rng.normals(width), rng.normals(width));
                let mut arena = Arena::default();
                let [e_at, h_at] = [&enorm, &hnorm].map(|n| arena.floats(&wide(n)));
                let [base, side, field] = arena.matrix(&laid);
                let arena = gpu.buffer(&arena.0);
                let numbers = [
                    ("WG", WG),
                    ("BLOCK", 8),
                    ("HIDDEN", width),
                    ("ROW", row),
                    ("EPS", 0),
                    ("COLS", laid.cols),
                    ("SIDE_WORDS", laid.side_words),
                    ("STAGED_VECS", at_once * laid.cols / 32 * encoding.vecs()),
                    ("STAGED_SCALES", if encoding == Encoding::F32 { 1 } else { at_once * laid.cols / 32 }),
                    ("NORM_CELLS", at_once * WG / 4),
                ];
                let kept = 1 + rows / 2;
                let hidden_first = (rows % 2) as u32;
                for variant in bodies(&gpu, &DRAFT_FUSE, &choice(&gpu, format, int8, at_once, wide_rows)) {
                    let what = format!("{codec:?} {act:?}, {rows} rows, {:?}", variant.commons);
                    let pipeline = gpu.pipeline(variant, &numbers);
                    let params = [e_at, h_at, width as u32, base, side, field, hidden_first, 1, 1, 0, 0, 0];
                    let mut words = control(9);
                    words[15] = kept as u32;
                    let (out, tail) = (gpu.empty(rows * row), gpu.empty(row));
                    gpu.run(
                        &pipeline,
                        &[
                            &flight(&gpu, rows, 1000, 1),
                            &gpu.buffer(&words),
                            &gpu.buffer(&params),
                            &arena,
                            &arena,
                            &gpu.floats(&wide(&following)),
                            &gpu.floats(&wide(&hidden)),
                            &out,
                            &tail,
                        ],
                        [width.div_ceil(8) as u32, rows.div_ceil(at_once) as u32, 1],
                    );
                    let tolerance = match (encoding, format) {
                        (Encoding::F32, Format::Q4) => LADDER,
                        (Encoding::F32, _) => SUM_ORDER,
                        _ => CODE_FLIPS,
                    };
                    let got = gpu.read_floats(&out);
                    for r in 0..rows {
                        let (mut e, mut h) = (vec![0.0; width], vec![0.0; width]);
                        reference::rms_norm::rms_norm(&following[(r + 1) * width..][..width], &enorm, 0.0, &mut e);
                        reference::rms_norm::rms_norm(&hidden[r * width..][..width], &hnorm, 0.0, &mut h);
                        let both = if hidden_first == 1 { [h, e].concat() } else { [e, h].concat() };
                        let mut want = vec![0.0; width];
                        reference::matvec::matvec(&matrix, &both, act, &mut want);
                        close(&what, &got[r * row..][..width], &want, tolerance);
                        if r + 1 == kept {
                            assert_eq!(gpu.read_floats(&tail)[..width], got[r * row..][..width], "{what}");
                        }
                    }
                }
            }
        }
    }
}

// ------------------------------------------------------------------ a verify pass's experts

/// The union's experts, each weight read once, for every row that chose it; with an expert that has no place.
#[test]
fn experts_down_of_several_rows() {
    let gpu = gpu();
    let mut rng = Random::new(12);
    let (inter, hidden, top_k, places) = (64, 40, 2, 4);
    let experts: Vec<Matrix> = (0..places).map(|_| random(Codec::Q4tp, hidden, inter, &mut rng)).collect();
    let laid: Vec<_> = experts.iter().map(lay).collect();
    let mut bank = Arena::default();
    let at: Vec<[u32; 3]> = laid.iter().map(|l| bank.matrix(l)).collect();
    let place = at[1][0] - at[0][0];
    assert!((0..places as u32).all(|p| at[p as usize][0] == p * place), "places lie alike");
    for rows in [2usize, 3, 5] {
        // expert e has place e; the last one chosen by row 1 has none
        let picks: Vec<[u32; 2]> = (0..rows as u32).map(|r| if r == 1 { [0, 9] } else { [r % 3, 3] }).collect();
        let mut union: Vec<u32> = picks.iter().flatten().copied().collect();
        union.sort_unstable();
        union.dedup();
        let weights = rng.normals(rows * top_k);
        let weights_at = 1 + rows * top_k * (3 + rows);
        let mut routes = vec![UNWRITTEN; weights_at];
        routes[0] = union.len() as u32;
        for (u, expert) in union.iter().enumerate() {
            let entry = 1 + u * (3 + rows);
            let by: u32 = (0..rows).filter(|r| picks[*r].contains(expert)).map(|r| 1 << r).sum();
            routes[entry..entry + 3].copy_from_slice(&[*expert, if *expert == 9 { NONE } else { *expert }, by]);
            for r in 0..rows {
                routes[entry + 3 + r] = u32::from(picks[r][1] == *expert);
            }
        }
        routes.extend(weights.iter().map(|w| w.to_bits()));

        // codes in nibble order, a scale beside eight times the group's sum
        let inner = rng.normals(rows * top_k * inter).into_iter().map(|v| v * v).collect::<Vec<_>>();
        let (mut codes, mut scales) = (Vec::<u32>::new(), Vec::<f32>::new());
        for group in inner.chunks_exact(32) {
            let d = group.iter().fold(0f32, |m, v| m.max(v.abs())) / 127.0;
            let q: Vec<i32> = group.iter().map(|v| (v / d).round_ties_even() as i32).collect();
            for eight in q.chunks_exact(8) {
                for odd in [0, 1] {
                    codes.push((0..4).map(|i| (eight[2 * i + odd] as u8 as u32) << (8 * i)).sum());
                }
            }
            scales.extend([d, 8.0 * q.iter().sum::<i32>() as f32]);
        }
        let (x, shared) = (rng.normals(rows * hidden), rng.normals(rows * hidden));
        let numbers = [
            ("WG", WG),
            ("COLS", inter),
            ("SIDE_WORDS", laid[0].side_words),
            ("TOP_K", top_k),
            ("BLOCK", 8),
            ("PICKS", rows * top_k),
            ("WEIGHTS", rows * rows * top_k),
        ];
        let bank = gpu.buffer(&bank.0);
        for variant in bodies(&gpu, &EXPERTS_DOWN, &choice(&gpu, Format::Q4, true, rows, 1)) {
            let what = format!("{rows} rows, {:?}", variant.commons);
            let by_pick = usize::from(variant.commons.contains(&"picked_1_rows"));
            let pipeline = gpu.pipeline(variant, &[&numbers[..], &[("BY_PICK", by_pick)]].concat());
            let params = [0, place, at[0][0], at[0][1], hidden as u32, hidden as u32, weights_at as u32, 0];
            let (to, partial) = (gpu.floats(&x), gpu.empty(rows * hidden));
            gpu.run(
                &pipeline,
                &[
                    &flight(&gpu, rows, 1000, 1),
                    &gpu.buffer(&control(9)),
                    &gpu.buffer(&params),
                    &bank,
                    &bank,
                    &gpu.buffer(&codes),
                    &gpu.floats(&scales),
                    &gpu.buffer(&routes),
                    &gpu.floats(&shared),
                    &to,
                    &partial,
                ],
                [hidden.div_ceil(8) as u32, 1, 1],
            );
            let mut want = x.clone();
            for r in 0..rows {
                for k in (0..top_k).filter(|k| picks[r][*k] != 9) {
                    let mut made = vec![0.0; hidden];
                    let row = &inner[(r * top_k + k) * inter..][..inter];
                    reference::matvec::matvec(&experts[picks[r][k] as usize], row, Activations::Int8, &mut made);
                    (want[r * hidden..][..hidden].iter_mut().zip(made))
                        .for_each(|(w, m)| *w += weights[r * top_k + k] * m);
                }
                (want[r * hidden..][..hidden].iter_mut().zip(&shared[r * hidden..])).for_each(|(w, s)| *w += s);
            }
            close(&what, &gpu.read_floats(&to), &want, CODE_FLIPS);
        }
    }
}
