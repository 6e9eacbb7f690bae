//! Every command once, on the bundled model.

use serde_json::Value;

use crate::support::{Ran, demo, file, finish, model, program, recording, run};

fn on_model(command: &str, flags: &[&str]) -> Ran {
    finish(program().arg(command).arg(model()).args(flags))
}

#[test]
fn a_json_line_says_what_happened() {
    let (wav, said) = demo().swap_remove(0);
    let ran = finish(program().arg("transcribe").arg(model()).arg(&wav).args(["--format", "json", "--stats"])).ok();
    let lines = ran.json();
    let [line] = &lines[..] else { panic!("one line a recording") };
    assert_eq!(line["file"], wav.to_str().unwrap());
    assert_eq!(line["text"], said);
    assert_eq!(line["finish_reason"], "stop");
    assert_eq!(line["ids"].as_array().unwrap().len() as u64, line["tokens"].as_u64().unwrap());
    for field in ["audio_s", "encode_s", "prefill_s", "decode_s"] {
        assert!(line[field].as_f64().is_some_and(|s| s > 0.0), "{field}: {line}");
    }
    assert!(!line["device"].as_str().unwrap().is_empty());
    for field in ["/bank/slots", "/bank/misses", "/bank/completed", "/bank/admitted", "/drafts/offered", "/drafts/kept"]
    {
        assert!(line.pointer(field).is_some_and(Value::is_u64), "{field}: {line}");
    }
    assert!(line["drafts"]["kept"].as_u64() <= line["drafts"]["offered"].as_u64());
    for part in ["prefill", "decode", "bank", "drafts"] {
        assert!(ran.stderr.contains(part), "{}", ran.stderr);
    }
}

#[test]
fn quiet_says_nothing_but_the_result() {
    let ran = finish(program().arg("transcribe").arg(model()).arg(recording()).args(["--stats", "--quiet"])).ok();
    assert_eq!(ran.stderr, "");
    assert!(!ran.stdout.is_empty());
}

#[test]
fn the_length_is_bounded() {
    let (wav, _) = demo().swap_remove(0);
    let flags = ["--format", "json", "--max-new-tokens", "2"];
    let ran = finish(program().arg("transcribe").arg(model()).arg(wav).args(flags)).ok();
    let line = &ran.json()[0];
    assert_eq!((&line["finish_reason"], &line["tokens"]), (&"length".into(), &2.into()));
}

#[test]
fn info_tells_shapes_and_sizes() {
    let info = on_model("info", &["--json"]).ok().json_value();
    assert_eq!(info["geometry"]["hidden"], 256);
    assert_eq!(info["geometry"]["pattern"], "MEM*EM*EME");
    assert_eq!((&info["experts"]["routed"], &info["experts"]["top_k"]), (&32.into(), &4.into()));
    let roles = info["bytes"].as_object().unwrap();
    let sum: u64 = roles.iter().filter(|(role, _)| *role != "file").map(|(_, bytes)| bytes.as_u64().unwrap()).sum();
    assert!(sum <= roles["file"].as_u64().unwrap() && sum > 0, "{roles:?}");
    let page = on_model("info", &[]).ok().stdout;
    assert!(page.contains("MEM*EM*EME") && page.contains("q4tp"), "{page}");
}

#[test]
fn verify_names_the_tensor_that_changed() {
    on_model("verify", &[]).ok();
    let mut bytes = std::fs::read(model()).unwrap();
    // The directory says where payloads lie; the middle of the file is one of them.
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x40;
    let changed = file("changed.cmf", &bytes);
    let ran = finish(program().arg("verify").arg(&changed));
    ran.refused(1, &["hash", "weight"]);
    let report = finish(program().arg("verify").arg(&changed).arg("--json"));
    assert_eq!(report.code, 1);
    let failed = &report.json_value()["failed"];
    assert_eq!(failed.as_array().map(Vec::len), Some(1), "{failed}");
}

#[test]
fn doctor_lists_every_knob_with_its_source() {
    let report =
        finish(program().args(["doctor", "--json", "--act", "f32"]).env("CMF_NEMO_STEPS", "7")).ok().json_value();
    let knobs = report["knobs"].as_array().unwrap();
    assert_eq!(knobs.len(), riparian::knobs::TABLE.len());
    let one = |name: &str| knobs.iter().find(|knob| knob["name"] == name).unwrap();
    assert_eq!((&one("CMF_NEMO_STEPS")["value"], &one("CMF_NEMO_STEPS")["from"]), (&"7".into(), &"environment".into()));
    assert_eq!((&one("CMF_NEMO_ACT")["value"], &one("CMF_NEMO_ACT")["from"]), (&"f32".into(), &"flag".into()));
    assert_eq!(one("CMF_NEMO_ADMIT")["from"], "default");
    assert!(report["cpu"]["physical_cores"].as_u64().is_some_and(|cores| cores > 0));
    let page = run(["doctor"]).ok().stdout;
    assert!(knobs.iter().all(|knob| page.contains(knob["name"].as_str().unwrap())), "{page}");
}

#[test]
fn generate_takes_ids_rows_and_text() {
    let flags = ["--format", "json", "--max-new-tokens", "8", "--ignore-eos"];
    let by_ids = finish(program().arg("generate").arg(model()).args(["--ids", "1,42,7,300"]).args(flags)).ok().json();
    assert_eq!(by_ids[0]["tokens"], 8);

    // The same prompt as embedding rows.
    let opened = riparian::model::open(&model(), &riparian::model::OpenOptions::default()).unwrap();
    let (embedding, hidden) = (&opened.decoder.embedding, opened.geometry.hidden);
    let mut rows = vec![0.0; 4 * hidden];
    for (id, row) in [1, 42, 7, 300].into_iter().zip(rows.chunks_exact_mut(hidden)) {
        riparian::model::quant::dequantize_row(embedding, id, row);
    }
    let bytes: Vec<u8> = rows.iter().flat_map(|value| value.to_le_bytes()).collect();
    let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![4, hidden], &bytes).unwrap();
    let path = file("rows.safetensors", &safetensors::serialize([("embeds", view)], None).unwrap());
    let named = format!("{}:embeds", path.display());
    let by_rows = finish(program().arg("generate").arg(model()).args(["--rows", &named]).args(flags)).ok().json();
    assert_eq!(by_rows[0]["ids"], by_ids[0]["ids"]);

    let by_text =
        finish(program().arg("generate").arg(model()).args(["--prompt", "one two", "--raw"]).args(flags)).ok();
    assert_eq!(by_text.json()[0]["tokens"], 8);
    let chat = finish(program().arg("generate").arg(model()).args(["--prompt", "one two"]).args(flags)).ok();
    assert!(
        chat.json()[0]["prompt_rows"].as_u64() > by_text.json()[0]["prompt_rows"].as_u64(),
        "the template adds to it"
    );
}

#[test]
fn generate_refuses_what_is_no_prompt() {
    let refused = |flags: &[&str], says: &[&str]| on_model("generate", flags).refused(1, says);
    refused(&["--ids", "1,512"], &["512", "511"]);
    refused(&["--rows", "/nowhere.safetensors"], &["/nowhere.safetensors"]);
    refused(&["--prompt", "", "--raw"], &["nothing was fed"]);
}

#[test]
fn word_times_are_ordered_and_inside_the_recording() {
    let (wav, said) = demo().swap_remove(0);
    let flags = ["--timestamps", "--format", "json"];
    let ran = finish(program().arg("transcribe").arg(model()).arg(&wav).args(flags)).ok();
    let line = &ran.json()[0];
    let words = line["words"].as_array().unwrap();
    assert_eq!(words.len(), said.split_whitespace().count());
    let mut last = 0.0;
    for word in words {
        let (start, end) = (word["start_s"].as_f64().unwrap(), word["end_s"].as_f64().unwrap());
        assert!(last <= start && start < end && end <= line["audio_s"].as_f64().unwrap() + 0.04, "{word}");
        last = start;
    }
    let page = finish(program().arg("transcribe").arg(model()).arg(&wav).arg("--timestamps")).ok().stdout;
    assert_eq!(page.lines().count(), 1 + words.len(), "{page}");
}

#[test]
fn a_summary_of_times_is_told_where_it_is_asked_for() {
    let (wav, _) = demo().into_iter().next().unwrap();
    let told = |knobs: &[&str]| {
        let flags = ["--expert-gb", "0.000001", "--no-drafts"];
        let ran = finish(program().arg("transcribe").arg(model()).arg(&wav).args(flags).args(knobs)).ok();
        assert!(!ran.stderr.contains("no effect"), "{}", ran.stderr);
        ran.stderr
    };
    assert_eq!(told(&[]), "");
    let told = told(&["--knob", "prof=1"]);
    for lap in ["append", "flight", "handover", "complete", "answer", "cure", "stop"] {
        let line = told.lines().find(|line| line.starts_with(lap)).unwrap_or_else(|| panic!("no {lap}: {told}"));
        let number = |unit: &str| -> f64 {
            let before = line.split(unit).next().unwrap();
            before.split_whitespace().last().unwrap().parse().unwrap()
        };
        assert!(number(" times") > 0.0 && number(" ms") > 0.0, "{line}");
    }
}
