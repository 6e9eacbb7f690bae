#![no_main]

#[path = "../bodies.rs"]
#[allow(dead_code, reason = "each target runs one of them")]
mod bodies;

/// The fuzzer's hook ends the process at every panic; those of the decoders are caught and become errors.
fn leave_the_decoders_theirs() {
    let fatal = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if !riparian::audio::read::is_reading() {
            fatal(panic);
        }
    }));
}

libfuzzer_sys::fuzz_target!(init: leave_the_decoders_theirs(), |data: &[u8]| bodies::audio(data));
