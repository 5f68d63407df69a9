//! Cuts documents into parts that fit a row.

use crate::{CutDocuments, DataError, MicroBatch, Options, Packing, Result, shards::TokenShards};

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
    pub(crate) fn read(self, shards: &TokenShards, vocab: usize, into: &mut MicroBatch) -> Result {
        let start = into.input_ids.len() % into.seq;
        let file = &shards.files[self.shard as usize];
        file.read(self.start as usize, self.inputs as usize, vocab, into)?;
        if let Some(documents) = &mut into.documents {
            documents.resize(documents.len() + self.inputs as usize, start as i32);
        }
        Ok(())
    }

    /// Its first `inputs` inputs, if it has more.
    pub(crate) fn up_to(self, inputs: usize) -> Self {
        let inputs = u32::try_from(inputs).unwrap_or(u32::MAX);
        Self {
            inputs: self.inputs.min(inputs),
            ..self
        }
    }

    /// Number of its targets.
    pub(crate) fn targets(self, shards: &TokenShards) -> usize {
        shards.files[self.shard as usize].targets(self.start as usize, self.inputs as usize)
    }
}

/// The parts of all documents, of at most `seq` inputs, in order; with [`Packing::Pad`] only the first of each. A
/// document that continues in the next shard counts as two. One of a single token has no target, so no part.
pub(crate) fn document_parts(
    shards: &TokenShards,
    packing: Packing,
    seq: usize,
) -> Result<Vec<DocumentPart>> {
    shards.check_documents(packing)?;
    let seq = u32::try_from(seq).unwrap_or(u32::MAX);
    let mut parts = Vec::new();
    for document in whole_documents(shards) {
        let mut part = document;
        let mut left = document.inputs;
        while left > 0 {
            part.inputs = left.min(seq);
            parts.push(part);
            part.start += part.inputs;
            left = match packing {
                Packing::Pad => 0,
                _ => left - part.inputs,
            };
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

/// All documents of two tokens or more, each as one part of any length.
pub(crate) fn whole_documents(shards: &TokenShards) -> impl Iterator<Item = DocumentPart> {
    let indices = shards.files.iter().filter_map(|file| file.index.as_ref());
    indices.zip(0..).flat_map(|(index, shard)| {
        let mut begin = 0;
        let ends = index.documents.iter().chain([&index.tokens]);
        let whole = ends.map(move |&end| {
            let start = std::mem::replace(&mut begin, end);
            DocumentPart {
                shard,
                start: start as u32,
                inputs: (end - start).saturating_sub(1) as u32,
            }
        });
        whole.filter(|part| part.inputs > 0)
    })
}

/// Counts the documents of an input. With [`Packing::Concatenate`] none counts, since rows are cut anywhere.
pub(crate) fn cut_documents(shards: &TokenShards, options: &Options, seq: usize) -> CutDocuments {
    let mut counts = CutDocuments::default();
    if options.packing == Packing::Concatenate {
        return counts;
    }
    let is_pad = options.packing == Packing::Pad;
    let (mut is_cut, mut is_emptied) = (false, false);
    for (number, document) in whole_documents(shards).enumerate() {
        if document.inputs as usize > seq {
            is_cut = true;
            let row = document.up_to(seq);
            is_emptied |= is_pad && row.targets(shards) == 0 && document.targets(shards) > 0;
        }
        if (number + 1).is_multiple_of(options.rows_together()) {
            counts.documents += 1;
            counts.cut += usize::from(std::mem::take(&mut is_cut));
            counts.emptied += usize::from(std::mem::take(&mut is_emptied));
        }
    }
    counts
}
