//! The caller's choices: the settings `data.*` and `batch.*`.

use choices::choices;

use crate::{DataError, Inputs, Result};

/// Tokens in a sequence if neither [`Options::seq`] nor the file sets them.
pub const DEFAULT_SEQ: usize = 256;

/// The most tokens in a step. More must be a mistyped setting.
const MAX_STEP_TOKENS: usize = i32::MAX as usize;

/// Says which data a run reads, and how it is divided into steps.
#[derive(Debug, Clone)]
pub struct Options {
    /// `data.path`; `None` reads the built-in text.
    pub path: Option<Inputs>,
    /// `data.format`.
    pub format: Format,
    /// `data.seq`: tokens in a sequence. `None` takes a batch file's own, else [`DEFAULT_SEQ`].
    pub seq: Option<usize>,
    /// `batch.micro`: rows in a micro-batch.
    pub micro_batch: usize,
    /// `batch.accum`: micro-batches in a step.
    pub accum: usize,
    /// `data.shuffle`: a new order each epoch; without it, file order.
    pub shuffle: bool,
    /// `train.seed`: the shuffled order depends only on it and the epoch.
    pub seed: u64,
    /// `model.vocab`: every token must be below it.
    pub vocab: usize,
    /// `data.packing`: how documents become rows.
    pub packing: Packing,
    /// Whether every two rows are a pair, of which the first is preferred. They stay together, and [`Self::micro_batch`] is
    /// even.
    pub pairs: bool,
    /// Which shards of a folder to read.
    pub split: Split,
    /// Also read the rest of each file after its last whole row, as one padded row. Evaluations do. Only with
    /// [`Packing::Concatenate`].
    pub tails: bool,
}

impl Options {
    /// Rows that stay together.
    pub(crate) fn rows_together(&self) -> usize {
        if self.pairs { 2 } else { 1 }
    }

    /// Refuses settings that are invalid for every file.
    pub(crate) fn validate(&self) -> Result {
        let sizes = [
            ("batch.micro", self.micro_batch),
            ("batch.accum", self.accum),
            ("data.seq", self.seq.unwrap_or(1)),
            ("model.vocab", self.vocab),
        ];
        if let Some((key, _)) = sizes.into_iter().find(|&(_, size)| size == 0) {
            return Err(DataError::Zero { key });
        }
        Ok(())
    }

    /// Refuses a step that is too large to be intended. `seq` is the resolved length.
    pub(crate) fn check_step_size(&self, seq: usize) -> Result {
        self.micro_batch
            .checked_mul(self.accum)
            .and_then(|rows| rows.checked_mul(seq))
            .filter(|&tokens| tokens <= MAX_STEP_TOKENS)
            .map(drop)
            .ok_or_else(|| {
                DataError::Setting(format!(
                    "a step of {} micro-batches of {} rows of {seq} tokens is more than {MAX_STEP_TOKENS} tokens; lower batch.accum, \
                     batch.micro or data.seq",
                    self.accum, self.micro_batch
                ))
            })
    }
}

choices! {
    /// The layout of a data file: the values of `data.format`.
    Format {
        /// `.safetensors` is [`Batches`](Self::Batches). `.bin`, and what begins like it, is [`LlmC`](Self::LlmC).
        /// Other files are [`Text`](Self::Text), if they are text ([`FileKind`](crate::FileKind)).
        Auto = "auto",
        /// safetensors with `input_ids` and `targets`, integers `[N, seq]`.
        Batches = "batches",
        /// llm.c's 1024-byte header, then u16 tokens, or u32 in its Llama-3 variant.
        LlmC = "llmc",
        /// Little-endian u16 tokens and nothing else (nanoGPT's `train.bin`).
        U16 = "u16",
        /// Each byte is a token, vocabulary 256.
        Text = "text",
    }
}

choices! {
    /// How documents become the rows of micro-batches: the values of `data.packing`.
    Packing {
        /// [`FirstFit`](Self::FirstFit) for documents with tokens that are never targets, such as chats, [`Pad`](Self::Pad) for
        /// pairs, else [`Concatenate`](Self::Concatenate).
        Auto = "auto",
        /// Documents one after the other without gaps. Rows begin and end anywhere.
        Concatenate = "concatenate",
        /// Whole documents side by side in a row, kept apart by attention. Documents longer than a row are cut.
        FirstFit = "first-fit",
        /// One document in each row, cut if it is longer. Micro-batches are as long as their longest row.
        Pad = "pad",
    }
}

choices! {
    /// Which shards of a folder are read.
    Split {
        /// All `.bin` files except those of [`Validation`](Self::Validation).
        Train = "train",
        /// The `.bin` files whose name begins with `validation` or contains `_val_`; all files if there are none.
        Validation = "validation",
        /// The same files, which must exist.
        HeldOut = "held-out",
    }
}
