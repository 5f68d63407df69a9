//! Small data files and the options to read them.

use std::{
    collections::HashMap,
    fs,
    ops::Range,
    path::{Path, PathBuf},
};

use data::{Batches, DataError, Dataset, Format, Options, Packing, ShardWriter, Split};
use safetensors::tensor::{Dtype, TensorView};
use tempfile::TempDir;

/// A folder that is removed at the end of the test.
pub struct Folder(TempDir);

impl Folder {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    pub fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    }

    pub fn u16_tokens(&self, name: &str, tokens: impl IntoIterator<Item = u16>) -> PathBuf {
        self.file(name, &u16_bytes(tokens))
    }

    /// An llm.c shard of u16 tokens, and its index.
    pub fn shard(
        &self,
        name: &str,
        tokens: &[u16],
        documents: &[u64],
        masked: &[Range<u64>],
    ) -> PathBuf {
        let stem = name.strip_suffix(".bin").unwrap();
        let mut shard = ShardWriter::create(self.path(), stem, 1 << 16).unwrap();
        let len = tokens.len() as u64;
        let mut start = 0;
        for &end in documents.iter().chain([&len]) {
            let masked = masked.iter().map(|range| {
                range.start.clamp(start, end) - start..range.end.clamp(start, end) - start
            });
            let piece: Vec<u32> = tokens[start as usize..end as usize]
                .iter()
                .map(|&token| token.into())
                .collect();
            shard.push(&piece, masked, 4 * (end - start)).unwrap();
            shard.start_document();
            start = end;
        }
        shard.finish().unwrap();
        self.path().join(name)
    }

    /// `input_ids` and `targets` of `seq` columns.
    pub fn batches(&self, input_ids: &[i32], targets: &[i32], seq: usize) -> PathBuf {
        let shape = vec![input_ids.len() / seq, seq];
        let tensors = [
            ("input_ids", Dtype::I32, shape.clone(), i32_bytes(input_ids)),
            ("targets", Dtype::I32, shape, i32_bytes(targets)),
        ];
        self.file("batches.safetensors", &safetensors_bytes(tensors))
    }
}

pub fn u16_bytes(tokens: impl IntoIterator<Item = u16>) -> Vec<u8> {
    tokens.into_iter().flat_map(u16::to_le_bytes).collect()
}

pub fn i32_bytes(values: &[i32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

pub fn i64_bytes(values: &[i64]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

pub fn safetensors_bytes<const N: usize>(
    tensors: [(&str, Dtype, Vec<usize>, Vec<u8>); N],
) -> Vec<u8> {
    let views: HashMap<_, _> = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| {
            let view = TensorView::new(*dtype, shape.clone(), bytes).unwrap();
            (*name, view)
        })
        .collect();
    safetensors::serialize(&views, None).unwrap()
}

/// llm.c's header, then `tokens` as they are.
pub fn llmc_bytes(magic: i32, version: i32, count: i32, tokens: &[u8]) -> Vec<u8> {
    let mut header = [0; 256];
    header[..3].copy_from_slice(&[magic, version, count]);
    [i32_bytes(&header), tokens.to_vec()].concat()
}

/// Rows of 4 tokens, 2 a micro-batch, 1 a step, in file order.
pub fn options(path: impl Into<PathBuf>) -> Options {
    Options {
        path: Some(path.into().into()),
        format: Format::Auto,
        seq: None,
        micro_batch: 2,
        accum: 1,
        shuffle: false,
        seed: 1,
        vocab: 1000,
        packing: Packing::Concatenate,
        pairs: false,
        split: Split::Train,
        tails: false,
    }
}

pub fn open(options: &Options) -> Batches {
    Dataset::open(options).unwrap().batches()
}

/// The message of the error that opening must end in.
pub fn open_error(options: &Options) -> String {
    Dataset::open(options).unwrap_err().to_string()
}

/// The message of the error that the first step must end in.
pub fn step_error(options: &Options) -> String {
    let mut batches = open(options);
    let error: DataError = batches.next_step().unwrap_err();
    let again = batches.next_step().unwrap_err();
    assert_eq!(error.to_string(), again.to_string());
    error.to_string()
}

/// Checks that a message names all of `parts`.
#[track_caller]
pub fn assert_says(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "no {part:?} in: {message}");
    }
}

pub fn with_format(format: Format, options: Options) -> Options {
    Options { format, ..options }
}
