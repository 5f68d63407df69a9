//! Files that cannot be opened: each fault has a sentence that says what, where, and what to do.

use data::Format;
use safetensors::tensor::Dtype;

use crate::fixture::{
    Folder, assert_says, i32_bytes, llmc_bytes, open_error, options, safetensors_bytes, u16_bytes,
    with_format,
};

#[test]
fn paths_that_are_no_file() {
    let folder = Folder::new();
    let missing = options(folder.path().join("nothing.txt"));
    assert_says(
        &open_error(&missing),
        &["nothing.txt", "does not exist", "data.path"],
    );
    let empty = options(folder.file("empty.bin", b""));
    assert_says(&open_error(&empty), &["empty.bin", "is empty"]);
}

#[test]
fn llmc_headers() {
    let folder = Folder::new();
    let error = |bytes: &[u8]| open_error(&options(folder.file("t.bin", bytes)));
    let tokens = u16_bytes([1, 2, 3, 4]);

    let bare = error(&u16_bytes([7, 0, 1, 2]));
    assert_says(&bare, &["magic 7,", "20240520", "data.format=\"u16\""]);
    let short = llmc_bytes(20240520, 1, 4, &tokens);
    assert_says(&error(&short[..1023]), &["1023 bytes", "1024"]);
    assert_says(&error(&short[..2]), &["2 bytes", "1024"]);
    let version = error(&llmc_bytes(20240520, 7, 4, &tokens));
    assert_says(&version, &["20240520", "version 7", "version 1"]);
    let version = error(&llmc_bytes(20240801, 1, 2, &tokens));
    assert_says(&version, &["20240801", "version 1", "version 7"]);
}

#[test]
fn llmc_lengths() {
    let folder = Folder::new();
    let error = |bytes: &[u8]| open_error(&options(folder.file("t.bin", bytes)));
    let tokens = u16_bytes([1, 2, 3, 4]);

    let cut = error(&llmc_bytes(20240520, 1, 5, &tokens));
    assert_says(&cut, &["says 5 tokens", "holds 4", "cut short"]);
    let longer = error(&llmc_bytes(20240520, 1, 3, &tokens));
    assert_says(&longer, &["says 3 tokens", "holds 4"]);
    let negative = error(&llmc_bytes(20240520, 1, -4, &tokens));
    assert_says(&negative, &["says -4 tokens"]);
    let half = error(&llmc_bytes(20240520, 1, 3, &tokens[..7]));
    assert_says(&half, &["holds 3", "7 bytes after the header"]);
}

#[test]
fn an_odd_number_of_bytes_is_no_row_of_u16() {
    let folder = Folder::new();
    let options = with_format(Format::U16, options(folder.file("t.bin", b"12345")));
    assert_says(&open_error(&options), &["5 bytes", "odd", "data.format"]);
}

#[test]
fn files_that_are_not_safetensors() {
    let folder = Folder::new();
    let error = |bytes: &[u8]| open_error(&options(folder.file("b.safetensors", bytes)));
    assert_says(
        &error(b"short"),
        &["not a whole safetensors file", "8 bytes"],
    );
    assert_says(&error(b"not a safetensors file"), &["header should be"]);
    assert_says(&error(b"\x02\0\0\0\0\0\0\0[]"), &["header cannot be read"]);

    let shape = vec![1, 2];
    let whole = safetensors_bytes([
        ("input_ids", Dtype::I32, shape.clone(), i32_bytes(&[1, 2])),
        ("targets", Dtype::I32, shape, i32_bytes(&[1, 2])),
    ]);
    let cut = error(&whole[..whole.len() - 1]);
    assert_says(
        &cut,
        &[
            "should be at bytes 8 to 16 of the 15",
            "copy or write it again",
        ],
    );
}

#[test]
fn safetensors_lengths_that_overflow() {
    let folder = Folder::new();
    // Eight tensors of 2^61 - 1 bytes: their sum and the header's length exceed 64 bits.
    let size = (1_u64 << 61) - 1;
    let tensors: Vec<_> = (0..8)
        .map(|i| {
            let offsets = [i * size, (i + 1) * size];
            format!(r#""t{i}":{{"dtype":"U8","shape":[{size}],"data_offsets":{offsets:?}}}"#)
        })
        .collect();
    let header = format!("{{{}}}", tensors.join(","));
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    let message = open_error(&options(folder.file("b.safetensors", &bytes)));
    assert_says(
        &message,
        &["`t0` should be at bytes 0 to 2305843009213693951 of the 0"],
    );
}

#[test]
fn batch_tensors_of_the_wrong_kind() {
    let folder = Folder::new();
    let error = |tensors: [_; 2]| {
        let bytes = safetensors_bytes(tensors);
        open_error(&options(folder.file("b.safetensors", &bytes)))
    };
    let good = |name| (name, Dtype::I32, vec![2, 3], i32_bytes(&[1; 6]));

    let missing = error([good("input_ids"), good("labels")]);
    assert_says(&missing, &["no tensor `targets`", "input_ids, labels"]);
    let floats = error([
        good("input_ids"),
        ("targets", Dtype::F32, vec![2, 3], vec![0; 24]),
    ]);
    assert_says(&floats, &["`targets` is F32", "I32 or I64"]);
    let flat = error([
        ("input_ids", Dtype::I32, vec![6], vec![0; 24]),
        good("targets"),
    ]);
    assert_says(&flat, &["`input_ids` has shape [6]", "[rows, seq]"]);
    let empty = error([
        ("input_ids", Dtype::I32, vec![0, 3], vec![]),
        good("targets"),
    ]);
    assert_says(&empty, &["shape [0, 3]", "1 or more"]);
    let turned = error([
        good("input_ids"),
        ("targets", Dtype::I32, vec![3, 2], vec![0; 24]),
    ]);
    assert_says(&turned, &["[2, 3]", "[3, 2]"]);
}
