//! Every kernel of every instruction set this processor has, against its twin.

use riparian::host::{Isa, Pool, matmul, row};
use riparian::knobs::Activations;
use riparian::model::tensors::{Codec, Matrix};
use riparian::reference::{dequantize::dequantize_row, matvec};

use crate::random::Random;

const CODECS: [Codec; 5] = [Codec::F32, Codec::F16, Codec::Bf16, Codec::Q8_2f, Codec::Q4tp];
const MODES: [Activations; 2] = [Activations::F32, Activations::Int8];

/// Largest difference to the twin, relative to the sum of the products' magnitudes: some roundings of f32, and in
/// q4tp the two ways to evaluate the ladder (`cmf.md` §5: 4e-6).
fn tolerance(codec: Codec) -> f64 {
    if codec == Codec::Q4tp { 6e-6 } else { 1e-6 }
}

fn product(pool: &Pool, matrix: &Matrix, x: &[f32], act: Activations) -> Vec<f32> {
    let mut out = vec![f32::NAN; x.len() / matrix.cols() * matrix.rows()];
    matmul(pool, matrix, x, act, &mut out);
    out
}

/// Sum of the products' magnitudes for each output.
fn magnitudes(matrix: &Matrix, x: &[f32]) -> Vec<f64> {
    let mut w = vec![0.0; matrix.cols()];
    let n = x.len() / matrix.cols();
    let mut out = vec![0.0; n * matrix.rows()];
    for r in 0..matrix.rows() {
        dequantize_row(matrix, r, &mut w);
        for (i, x) in x.chunks_exact(matrix.cols()).enumerate() {
            out[i * matrix.rows() + r] = w.iter().zip(x).map(|(w, x)| f64::from((w * x).abs())).sum();
        }
    }
    out
}

fn compare(pool: &Pool, matrix: &Matrix, x: &[f32], act: Activations) -> Vec<f32> {
    let seen = product(pool, matrix, x, act);
    let wanted = matvec::matmul(matrix, x, act);
    for (i, ((seen, wanted), size)) in seen.iter().zip(&wanted).zip(magnitudes(matrix, x)).enumerate() {
        let error = (f64::from(*seen) - f64::from(*wanted)).abs();
        assert!(
            error <= tolerance(matrix.codec()) * size + 1e-37,
            "{pool:?} {matrix:?} {act:?} output {i}: {seen} for {wanted}, off by {error:e} of {size:e}"
        );
    }
    seen
}

#[test]
fn all_shapes_codecs_and_sets_agree_with_the_twin() {
    let mut random = Random(1);
    let shapes: [[usize; 2]; 12] = [
        [1, 1],
        [3, 31],
        [5, 33],
        [17, 63],
        [16, 64],
        [33, 65],
        [2, 511],
        [3, 513],
        [19, 96],
        [40, 544],
        [7, 1856],
        [130, 2688],
    ];
    for codec in CODECS {
        for [rows, cols] in shapes {
            let cols = if codec == Codec::Q4tp { cols.next_multiple_of(32) } else { cols };
            let matrix = random.matrix(codec, [rows, cols], rows % 3);
            for n in [1, 2, 3, 4, 5, 8, 9, 17] {
                let x = random.rows(n * cols, 3.0);
                for act in MODES {
                    let mut first: Option<Vec<f32>> = None;
                    for isa in Isa::present() {
                        let seen = compare(&Pool::with_isa(2, isa), &matrix, &x, act);
                        if act == Activations::Int8 && codec.is_quantized() {
                            let first = first.get_or_insert_with(|| seen.clone());
                            assert_eq!(&seen, first, "{isa} gives other bits: {matrix:?}, {n} rows");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn a_row_does_not_depend_on_its_company() {
    let mut random = Random(2);
    for codec in CODECS {
        let matrix = random.matrix(codec, [70, 1120], 0);
        let x = random.rows(64 * 1120, 1.0);
        for act in MODES {
            for isa in Isa::present() {
                let alone: Vec<f32> =
                    x.chunks_exact(1120).flat_map(|x| product(&Pool::with_isa(1, isa), &matrix, x, act)).collect();
                for n in [1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 64] {
                    let together = product(&Pool::with_isa(3, isa), &matrix, &x[..n * 1120], act);
                    assert_eq!(together, alone[..n * 70], "{matrix:?} {act:?} {isa} {n} rows");
                }
            }
        }
    }
}

#[test]
fn extremes_of_the_activations() {
    let mut random = Random(3);
    for codec in CODECS {
        let matrix = random.matrix(codec, [9, 96], 1);
        let mut rows = vec![
            vec![0.0; 96],
            vec![1e-42; 96],
            vec![-3e30; 96],
            (0..96).map(|i| if i == 40 { 1e6 } else { 1e-6 }).collect(),
            (0..96).map(|i| if i % 2 == 0 { 127.0 } else { -127.0 }).collect(),
            // halves of a code, which round to even
            (0..96).map(|i| if i % 32 == 0 { 127.0 } else { i as f32 - 47.5 }).collect(),
        ];
        for size in [1e-36, 1e-20, 1e20] {
            rows.push(random.rows(96, size));
        }
        for isa in Isa::present() {
            for act in MODES {
                rows.iter().for_each(|x| {
                    compare(&Pool::with_isa(1, isa), &matrix, x, act);
                });
            }
        }
    }
}

#[test]
fn what_is_not_finite_stays_so() {
    let mut random = Random(4);
    for codec in CODECS {
        let matrix = random.matrix(codec, [4, 96], 0);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, 37, 95] {
                let mut x = random.rows(96, 1.0);
                x[at] = bad;
                for isa in Isa::present() {
                    for act in MODES {
                        let seen = product(&Pool::with_isa(1, isa), &matrix, &x, act);
                        assert!(
                            seen.iter().all(|y| !y.is_finite()),
                            "{matrix:?} {act:?} {isa} {bad} at {at}: {seen:?}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn extremes_of_the_scales() {
    let half = |x: f32| half::f16::from_f32(x).to_le_bytes();
    let groups = 18;
    for (lo, step) in [(-14.0, 5.9e-8), (-24.0, 0.0), (15.0, 0.5), (-60.0, 1.0), (3.0, 0.001)] {
        let mut payload: Vec<u8> = (0..groups * 16).map(|i| (i * 37) as u8).collect();
        payload.extend([half(lo), half(step)].concat());
        payload.extend((0..Codec::code_bytes(groups)).map(|i| (i * 59 + 31) as u8));
        let matrix = Matrix::from_payload("q4", Codec::Q4tp, [1, groups * 32], payload);
        let x = Random(5).rows(groups * 32, 1.0);
        for isa in Isa::present() {
            for act in MODES {
                compare(&Pool::with_isa(1, isa), &matrix, &x, act);
            }
        }
    }
    for scale in [6e-8, 6.1e-5, 65504.0] {
        let mut payload: Vec<u8> = (0..33).map(|i| (i * 8) as u8).collect();
        payload.extend((0..34).flat_map(|_| half(scale)));
        let matrix = Matrix::from_payload("q8", Codec::Q8_2f, [1, 33], payload);
        let x = Random(6).rows(33, 1.0);
        for isa in Isa::present() {
            for act in MODES {
                compare(&Pool::with_isa(1, isa), &matrix, &x, act);
            }
        }
    }
}

#[test]
fn rows_dequantise_as_the_twin_does() {
    let mut random = Random(7);
    for codec in CODECS {
        let matrix = random.matrix(codec, [5, 96], 1);
        for r in 0..5 {
            let (mut seen, mut wanted) = (vec![0.0; 96], vec![0.0; 96]);
            row(&matrix, r, &mut seen);
            dequantize_row(&matrix, r, &mut wanted);
            for (seen, wanted) in seen.iter().zip(&wanted) {
                let most = if codec == Codec::Q4tp { 5e-6 * wanted.abs() } else { 0.0 };
                assert!((seen - wanted).abs() <= most, "{matrix:?}: {seen} for {wanted}");
            }
        }
    }
}

/// The sets this processor has, asked without the library; with `RIPARIAN_TEST_ISA=avx2,avx512` those are demanded.
fn wanted() -> Vec<Isa> {
    #[cfg_attr(not(target_arch = "x86_64"), expect(unused_mut, reason = "x86 alone has more sets"))]
    let mut wanted = vec![Isa::Portable];
    #[cfg(target_arch = "x86_64")]
    {
        let avx2 = ["avx2", "fma", "f16c"].map(cpu_flag).iter().all(|has| *has);
        wanted.extend(avx2.then_some(Isa::Avx2));
        let avx512 = ["avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"].map(cpu_flag);
        wanted.extend((avx2 && avx512.iter().all(|has| *has)).then_some(Isa::Avx512));
    }
    if let Ok(names) = std::env::var("RIPARIAN_TEST_ISA") {
        for name in names.split(',') {
            let isa: Isa = name.parse().unwrap();
            assert!(wanted.contains(&isa), "RIPARIAN_TEST_ISA={names}: this processor has no {isa}");
        }
    }
    wanted
}

/// Whether the kernel lists a flag; without such a list, whether the library finds what it needs.
#[cfg(target_arch = "x86_64")]
fn cpu_flag(flag: &str) -> bool {
    match std::fs::read_to_string("/proc/cpuinfo") {
        Ok(text) => text.lines().find(|l| l.starts_with("flags")).is_some_and(|l| l.split(' ').any(|f| f == flag)),
        Err(_) => {
            if flag.starts_with("avx512") {
                Isa::Avx512.is_present()
            } else {
                Isa::Avx2.is_present()
            }
        }
    }
}

/// Every set the processor has is found, can be forced, and is the one that runs.
#[test]
fn every_set_present_is_run() {
    let wanted = wanted();
    assert_eq!(Isa::present().collect::<Vec<_>>(), wanted);
    let mut random = Random(8);
    for isa in Isa::ALL {
        if !wanted.contains(&isa) {
            assert!(isa.require().is_err(), "{isa}");
            continue;
        }
        let before = riparian::host::regions_run(isa);
        let pool = Pool::with_isa(2, isa.require().unwrap());
        assert_eq!(pool.isa(), isa);
        for codec in CODECS {
            let matrix = random.matrix(codec, [33, 96], 1);
            // A few rows and many: kernels of their own.
            for n in [1, 5, 20] {
                let x = random.rows(n * 96, 1.0);
                for act in MODES {
                    compare(&pool, &matrix, &x, act);
                }
            }
        }
        let ran = riparian::host::regions_run(isa) - before;
        assert!(ran >= 30, "{isa} ran {ran} times");
        println!("{isa}: {ran} regions of products");
    }
    assert!("sse9".parse::<Isa>().is_err());
}
