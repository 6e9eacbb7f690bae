//! Decodes a file on the host and prints how fast: `host_decode FILE [PROMPT] [TOKENS] [THREADS] [f32|int8]`.
//!
//! Made for the files of `cortiq-bench synth`, in which the id after `t` is `t + 1`: how many of the ids are so is
//! printed beside the speed.

#![allow(clippy::print_stdout, reason = "an example prints its figures")]

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use riparian::host::{Decoder, HostSequence, Pool, physical_cores};
use riparian::ids::TokenId;
use riparian::knobs::Activations;
use riparian::model::{OpenOptions, open};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize, default: usize| args.get(i).map_or(Ok(default), |text| text.parse());
    let path = args.first().ok_or("the file to decode is wanted")?;
    let (prompt, tokens, threads) = (number(1, 64)?, number(2, 32)?, number(3, physical_cores())?);
    let act = match args.get(4).map(String::as_str) {
        Some("f32") => Activations::F32,
        None | Some("int8") => Activations::Int8,
        Some(other) => return Err(format!("activations {other:?}; accepted are f32 and int8").into()),
    };
    let model = open(Path::new(path), &OpenOptions::default())?;
    let decoder = Arc::new(Decoder::new(Arc::clone(&model), act, Pool::new(threads)));
    println!("{:?}, {act:?}, prompt {prompt}, {tokens} tokens", decoder.pool());
    let hidden = model.geometry.hidden;
    for run in 0..3 {
        let mut rows = vec![0.0; prompt * hidden];
        for (i, row) in rows.chunks_exact_mut(hidden).enumerate() {
            decoder.embed(TokenId::from(1000 + i), row);
        }
        let mut sequence = HostSequence::new(Arc::clone(&decoder)).without_drafts();
        let start = Instant::now();
        let mut pick = sequence.feed(&rows, &mut ())?;
        let prefill = start.elapsed().as_secs_f64();
        let start = Instant::now();
        let mut expected = 0;
        let mut times = Vec::with_capacity(tokens);
        for i in 0..tokens {
            expected += usize::from(pick.id.index() == 1000 + prompt + i);
            let step = Instant::now();
            pick = sequence.step(pick.id)?;
            times.push(step.elapsed().as_secs_f64() * 1e3);
        }
        let decode = start.elapsed().as_secs_f64();
        times.sort_by(f64::total_cmp);
        println!(
            "run {run}: prefill {:.1} positions/s, decode {:.2} tok/s (step: median {:.2} ms, best {:.2} ms), {expected} of {tokens} ids as expected",
            prompt as f64 / prefill,
            tokens as f64 / decode,
            times[tokens / 2],
            times[0],
        );
    }
    Ok(())
}
