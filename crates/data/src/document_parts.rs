//! Cuts documents into parts that fit a row.

use crate::{DataError, MicroBatch, Packing, shards::TokenShards};

/// Inputs in a row from one document, each with the next token as its target. 12 bytes. llm.c's header limits shards to
/// fewer than 2^31 tokens, and only shards of that layout have documents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DocumentPart {
    shard: u32,
    start: u32,
    pub(crate) inputs: u32,
}

impl DocumentPart {
    /// Appends the part to the row that is being read.
    pub(crate) fn read(
        self,
        shards: &TokenShards,
        vocab: usize,
        into: &mut MicroBatch,
    ) -> Result<(), DataError> {
        let start = into.input_ids.len() % into.seq;
        let file = &shards.files[self.shard as usize];
        file.read(self.start as usize, self.inputs as usize, vocab, into)?;
        if let Some(documents) = &mut into.documents {
            documents.resize(documents.len() + self.inputs as usize, start as i32);
        }
        Ok(())
    }
}

/// The parts of all documents, of at most `seq` inputs, in order; with [`Packing::Pad`] only the first of each. A
/// document that continues in the next shard counts as two. One of a single token has no target, so no part.
pub(crate) fn document_parts(
    shards: &TokenShards,
    packing: Packing,
    seq: usize,
) -> Result<Vec<DocumentPart>, DataError> {
    shards.check_documents(packing)?;
    let seq = u32::try_from(seq).unwrap_or(u32::MAX);
    let mut parts = Vec::new();
    for (number, index) in shards
        .files
        .iter()
        .filter_map(|file| file.index.as_ref())
        .enumerate()
    {
        let mut begin = 0;
        for &end in index.documents.iter().chain([&index.tokens]) {
            let mut left = (end - begin).saturating_sub(1) as u32;
            let mut start = begin as u32;
            while left > 0 {
                let inputs = left.min(seq);
                let shard = number as u32;
                parts.push(DocumentPart {
                    shard,
                    start,
                    inputs,
                });
                start += inputs;
                left = if packing == Packing::Pad {
                    0
                } else {
                    left - inputs
                };
            }
            begin = end;
        }
    }
    if parts.is_empty() {
        return Err(DataError::NoDocuments {
            file: shards.name.clone(),
            packing: packing.name(),
            reason: "has no document of two tokens",
        });
    }
    Ok(parts)
}
