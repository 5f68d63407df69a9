//! The default run learns.

use clap::Parser;
use data::{Dataset, Format, Options};
use settings::Settings;
use trainer::cli::Cli;

/// The settings of `trainer` without arguments, on the text that ships in the binary: after 60 of its 200 steps the
/// loss is at least 40 % below the first, which is that of guessing among 256 bytes.
#[test]
fn tiny_learns_the_built_in_text() {
    let resolved = Cli::try_parse_from(["trainer"]).unwrap().resolve().unwrap();
    let settings = Settings::new(&resolved.decided(resolved.config.data.seq)).unwrap();
    let dataset = Dataset::open(&Options {
        path: None,
        format: Format::Auto,
        seq: Some(settings.seq),
        micro_batch: settings.micro_batch,
        accum: settings.accum,
        shuffle: resolved.config.data.shuffle,
        seed: resolved.config.train.seed,
        vocab: settings.model.vocab,
        packing: data::Packing::Concatenate,
        pairs: false,
        split: data::Split::Train,
        tails: false,
    });
    let mut batches = dataset.unwrap().batches();
    let mut session = crate::common::session(&settings);
    let losses: Vec<f32> = (0..60)
        .map(|_| session.step(&batches.next_step().unwrap()).unwrap().loss)
        .collect();
    let (first, last) = (losses[0], losses[losses.len() - 1]);
    println!("{first} to {last}");
    assert!((first - 256f32.ln()).abs() < 0.1, "{first}");
    assert!(last < 0.6 * first, "{first} to {last}");
}
