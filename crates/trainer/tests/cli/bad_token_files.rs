//! Token and text files that cannot be trained on: exit code 4, naming the file and what is wrong in it.

use crate::batches::{bare_u16, llmc_header, llmc_u16};
use crate::metrics::Metrics;
use crate::workplace::Workplace;

/// Trains on the file `name` with these contents.
#[track_caller]
fn refused(name: &str, contents: impl AsRef<[u8]>, settings: &str, words: &[&str]) {
    let place = Workplace::new();
    place.file(name, contents);
    let words = [&[name], words].concat();
    place
        .trainer(&format!(
            "--config small.toml --data {name} --out run {settings}"
        ))
        .fails(4, &words);
    assert!(!place.path("run").exists(), "nothing is left behind");
}

#[test]
fn files_that_are_not_there() {
    let place = Workplace::new();
    place.folder("tokens");
    let command = |data: &str| place.trainer(&format!("--config small.toml --data {data}"));
    command("nowhere.bin").fails(4, &["nowhere.bin does not exist"]);
    command("nowhere/tokens.txt").fails(4, &["nowhere/tokens.txt does not exist"]);
    command("tokens").fails(4, &["tokens holds no .bin shards", "trainer prepare"]);
    command("/dev/null").fails(4, &["/dev/null is not a file"]);
    command("small.toml/tokens.bin").fails(4, &["cannot read data file small.toml/tokens.bin"]);
    assert!(!place.path("runs").exists(), "nothing is left behind");
}

#[test]
fn empty_truncated_and_foreign_files() {
    refused("empty.txt", "", "", &["is empty"]);
    refused("empty.bin", "", "", &["is empty"]);
    refused(
        "short.bin",
        [1, 2, 3],
        "",
        &["holds 3 bytes", "llm.c header"],
    );
    refused(
        "zeros.bin",
        [0; 2048],
        "",
        &["magic 0", "20240520", "data.format=\"u16\""],
    );
    let header = llmc_header(20240520, 1, 600);
    refused("head.bin", &header[..100], "", &["holds 100 bytes", "1024"]);
    let cut = [header, vec![0; 1000]].concat();
    refused(
        "cut.bin",
        cut,
        "",
        &["header says 600 tokens", "holds 500", "cut short"],
    );
    let newer = [llmc_header(20240520, 2, 500), vec![0; 1000]].concat();
    refused("newer.bin", newer, "", &["version 2", "version 1 only"]);
    let narrow = [llmc_header(20240801, 7, 500), vec![0; 1000]].concat();
    refused(
        "narrow.bin",
        narrow,
        "",
        &["500 tokens of 4 bytes", "holds 250"],
    );
    let u16 = "--set data.format=u16";
    refused(
        "odd.bin",
        [0; 101],
        u16,
        &["holds 101 bytes", "cut in half"],
    );
    refused("text.txt", "hello", "--set data.format=llmc", &["magic"]);
}

#[test]
fn a_sequence_longer_than_the_data() {
    refused(
        "short.txt",
        [b'a'; 32],
        "",
        &["holds 32 tokens", "data.seq=32 needs 33"],
    );
    let tokens = llmc_u16(&[1; 500]);
    refused(
        "short.bin",
        tokens,
        "--seq 500",
        &["holds 500 tokens", "needs 501", "lower data.seq"],
    );
    Workplace::new()
        .trainer("--config small.toml --seq 300000")
        .fails(4, &["(built-in text)", "data.seq=300000 needs 300001"]);
}

#[test]
fn a_token_outside_the_vocabulary_is_found_by_its_position() {
    let mut tokens = vec![1; 500];
    tokens[77] = 256;
    let place = Workplace::new();
    place.file("llmc.bin", llmc_u16(&tokens));
    place.file("bare.bin", bare_u16(&tokens));
    place.file("text.txt", [1; 500]);
    for (data, vocab, token) in [
        ("llmc.bin", 256, 256),
        ("bare.bin --set data.format=u16", 256, 256),
        ("text.txt --set model.vocab=1", 1, 1),
    ] {
        let name = data.split(' ').next().unwrap();
        let position = if vocab == 1 { 0 } else { 77 };
        let expected = format!(
            "data file {name}: token {token} at position {position} is outside the vocabulary of {vocab}"
        );
        place
            .trainer(&format!(
                "--config small.toml --no-shuffle --data {data} --out {name}-run"
            ))
            .fails(4, &[&expected, "model.vocab"]);
        let metrics = Metrics::read(&place, &format!("{name}-run"));
        assert_eq!(metrics.end_reason(), "failed");
    }
}
