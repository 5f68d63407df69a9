//! Options and tokens that do not go with a sound file: each fault has a sentence of its own.

use data::{Format, Options};
use safetensors::tensor::Dtype;

use crate::fixture::{
    Folder, assert_says, i32_bytes, i64_bytes, llmc_bytes, open_error, options, safetensors_bytes,
    step_error, with_format,
};

#[test]
fn zero_sizes() {
    let folder = Folder::new();
    let good = options(folder.file("a.txt", &[b'x'; 2000]));
    let cases = [
        (
            "batch.micro",
            Options {
                micro_batch: 0,
                ..good.clone()
            },
        ),
        (
            "batch.accum",
            Options {
                accum: 0,
                ..good.clone()
            },
        ),
        (
            "data.seq",
            Options {
                seq: Some(0),
                ..good.clone()
            },
        ),
        ("model.vocab", Options { vocab: 0, ..good }),
    ];
    for (key, options) in cases {
        assert_says(&open_error(&options), &[key, "is 0", "1 or more"]);
    }
}

#[test]
fn a_step_too_large_to_be_meant() {
    let folder = Folder::new();
    let good = options(folder.file("a.txt", &[b'x'; 2000]));
    for (micro_batch, accum) in [(usize::MAX, 1), (1, usize::MAX), (1 << 20, 1 << 20)] {
        let options = Options {
            micro_batch,
            accum,
            ..good.clone()
        };
        assert_says(&open_error(&options), &["batch.micro", "lower"]);
    }
}

#[test]
fn a_binary_format_without_a_path() {
    let options = Options {
        path: None,
        ..with_format(Format::U16, options("unused"))
    };
    assert_says(&open_error(&options), &["\"u16\"", "data.path is not set"]);
}

#[test]
fn sequences_longer_than_the_data() {
    let folder = Folder::new();
    let text = options(folder.file("a.txt", b"0123456789"));
    let exact = Options {
        seq: Some(10),
        ..text.clone()
    };
    assert_says(
        &open_error(&exact),
        &["10 tokens", "data.seq=10", "needs 11"],
    );
    assert_says(&open_error(&text), &["data.seq=256"]);
    let huge = Options {
        seq: Some(usize::MAX),
        ..text
    };
    assert_says(&open_error(&huge), &["lower data.seq"]);
    let one = with_format(Format::U16, options(folder.u16_tokens("one.bin", [1])));
    assert_says(&open_error(&one), &["holds 1 tokens"]);
}

#[test]
fn a_sequence_length_other_than_the_batch_file_s() {
    let folder = Folder::new();
    let path = folder.batches(&[1, 2, 3, 4], &[1, 2, 3, 4], 2);
    let options = Options {
        seq: Some(3),
        ..options(path)
    };
    assert_says(
        &open_error(&options),
        &["rows of 2 tokens", "data.seq=3", "set it to 2"],
    );
}

#[test]
fn tokens_outside_the_vocabulary() {
    let folder = Folder::new();
    let path = folder.u16_tokens("t.bin", [1, 2, 3, 999, 1000, 5, 6]);
    let bare = Options {
        seq: Some(2),
        ..with_format(Format::U16, options(path))
    };
    let message = step_error(&bare);
    assert_says(
        &message,
        &["t.bin", "token 1000 at position 4", "vocabulary of 1000"],
    );

    let bytes = llmc_bytes(20240801, 7, 3, &i32_bytes(&[1, 2, -1]));
    let wide = Options {
        seq: Some(2),
        ..options(folder.file("t.bin", &bytes))
    };
    assert_says(&step_error(&wide), &["token 4294967295 at position 2"]);
}

#[test]
fn batch_entries_outside_the_vocabulary() {
    let folder = Folder::new();
    let inputs = step_error(&options(folder.batches(&[1, 2, 3, -1], &[1; 4], 2)));
    assert_says(
        &inputs,
        &["`input_ids` holds -1 at row 1, column 1 (position 3)"],
    );
    // -100 masks a target, not an input.
    let masked = step_error(&options(folder.batches(&[1, 2, -100, 4], &[1; 4], 2)));
    assert_says(&masked, &["`input_ids` holds -100 at row 1, column 0"]);
    let targets = step_error(&options(folder.batches(&[1; 4], &[1, -99, 3, 4], 2)));
    assert_says(
        &targets,
        &["`targets` holds -99 at row 0, column 1", "only -100"],
    );
    let high = step_error(&options(folder.batches(&[1; 4], &[1, 2, 1000, 4], 2)));
    assert_says(&high, &["`targets` holds 1000", "vocabulary of 1000"]);

    let wide = |entry| i64_bytes(&[1, entry]);
    for entry in [1 << 32, i64::MIN, -100 - (1 << 32)] {
        let bytes = safetensors_bytes([
            ("input_ids", Dtype::I64, vec![1, 2], wide(0)),
            ("targets", Dtype::I64, vec![1, 2], wide(entry)),
        ]);
        let message = step_error(&options(folder.file("b.safetensors", &bytes)));
        assert_says(&message, &[&format!("`targets` holds {entry} ")]);
    }
}

#[test]
fn a_step_without_a_target_names_its_samples() {
    let folder = Folder::new();
    let path = folder.batches(&[1; 24], &[-100; 24], 2);
    let few = step_error(&Options {
        micro_batch: 3,
        ..options(&path)
    });
    assert_says(&few, &["samples 0, 1, 2 (epoch 0)", "raise batch.micro"]);
    let many = step_error(&Options {
        accum: 5,
        ..options(&path)
    });
    assert_says(&many, &["samples 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"]);
}
