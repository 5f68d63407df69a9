//! Batch files that cannot be trained on: exit code 4, naming the file and the place in it.

use crate::batches::batch_file;
use crate::workplace::Workplace;
use safetensors::tensor::{Dtype, TensorView};

#[track_caller]
fn refused(contents: impl AsRef<[u8]>, words: &[&str]) {
    let place = Workplace::new();
    place.file("rows.safetensors", contents);
    let words = [&["data file rows.safetensors"], words].concat();
    place
        .trainer("--config small.toml --no-shuffle --data rows.safetensors")
        .fails(4, &words);
}

fn file_of(tensors: &[(&str, Dtype, [usize; 2])]) -> Vec<u8> {
    let bytes = [0; 1024];
    let views = tensors.iter().map(|(name, dtype, shape)| {
        let length = shape[0] * shape[1] * dtype.bitsize() / 8;
        (
            *name,
            TensorView::new(*dtype, shape.to_vec(), &bytes[..length]).unwrap(),
        )
    });
    safetensors::serialize(views, None).unwrap()
}

#[test]
fn files_that_hold_no_batches() {
    let whole = batch_file(&[1; 32], &[2; 32], 8);
    refused("", &["is empty"]);
    refused("hello", &["not a whole safetensors file"]);
    refused(
        "this is no safetensors file",
        &["not a whole safetensors file", "header"],
    );
    refused(
        &whole[..whole.len() - 4],
        &["not a whole safetensors file", "128 to 256", "252"],
    );
    let ids = ("input_ids", Dtype::I32, [4, 8]);
    refused(
        file_of(&[ids]),
        &["no tensor `targets`", "it holds: input_ids"],
    );
    refused(
        file_of(&[]),
        &["no tensor `input_ids`", "it holds: nothing"],
    );
    let floats = ("targets", Dtype::F32, [4, 8]);
    refused(file_of(&[ids, floats]), &["`targets` is F32", "I32 or I64"]);
    let turned = ("targets", Dtype::I32, [8, 4]);
    refused(file_of(&[ids, turned]), &["[4, 8]", "[8, 4]"]);
    let none = [
        ("input_ids", Dtype::I32, [0, 8]),
        ("targets", Dtype::I32, [0, 8]),
    ];
    refused(
        file_of(&none),
        &["`input_ids` has shape [0, 8]", "1 or more"],
    );
}

#[test]
fn tokens_outside_the_vocabulary_are_found_by_row_and_column() {
    let with = |value: i32| {
        let mut row = [1; 32];
        row[21] = value;
        row
    };
    let place = "row 2, column 5 (position 21)";
    let vocabulary = "vocabulary of 256";
    refused(
        batch_file(&with(256), &[2; 32], 8),
        &["`input_ids` holds 256", place, vocabulary],
    );
    refused(
        batch_file(&with(-1), &[2; 32], 8),
        &["`input_ids` holds -1", place, "only -100"],
    );
    refused(
        batch_file(&with(-100), &[2; 32], 8),
        &["`input_ids` holds -100", place],
    );
    refused(
        batch_file(&[1; 32], &with(999), 8),
        &["`targets` holds 999", place, vocabulary],
    );
    refused(
        batch_file(&[1; 32], &with(-1), 8),
        &["`targets` holds -1", place, "only -100"],
    );
}

/// A step whose targets are all masked has no loss; one target is enough.
#[test]
fn a_step_without_targets() {
    let words = ["every target is masked", "samples 0, 1, 2, 3"];
    refused(batch_file(&[1; 32], &[-100; 32], 8), &words);
    let mut targets = [-100; 32];
    targets[9] = 3;
    let place = Workplace::new();
    place.file("rows.safetensors", batch_file(&[1; 32], &targets, 8));
    place
        .trainer("--config small.toml --no-shuffle --data rows.safetensors --out run")
        .succeeds();
    let metrics = crate::metrics::Metrics::read(&place, "run");
    assert!(metrics.steps().iter().all(|step| step["tokens"] == 1));
}
