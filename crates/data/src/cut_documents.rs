//! Counts documents that are longer than a row.

use crate::{Options, Packing, document_parts::whole_documents, shards::TokenShards};

/// Documents, or pairs of them, and how many are longer than a row.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CutDocuments {
    /// Documents of at least two tokens, or pairs.
    pub documents: usize,
    /// Those that are longer than a row; of pairs, those with such a text.
    pub cut: usize,
    /// Those of which a row has no token that is learnt, though the document has: only with [`Packing::Pad`].
    pub emptied: usize,
}

impl CutDocuments {
    /// Counts the documents of an input. With [`Packing::Concatenate`] none counts, since rows are cut anywhere.
    pub(crate) fn of(shards: &TokenShards, options: &Options, seq: usize) -> Self {
        let mut counts = Self::default();
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

    pub(crate) fn plus(self, other: Self) -> Self {
        Self {
            documents: self.documents + other.documents,
            cut: self.cut + other.cut,
            emptied: self.emptied + other.emptied,
        }
    }

    /// What happens to the documents that are longer than a row, and what to do; none if there are none.
    pub(crate) fn describe(self, options: &Options, seq: usize) -> Option<String> {
        let Self {
            documents,
            cut,
            emptied,
        } = self;
        if cut == 0 {
            return None;
        }
        let nothing_left = match emptied {
            0 => String::new(),
            emptied => format!(", and {emptied} of them keep no token that is learnt"),
        };
        Some(match (options.packing, options.pairs) {
            (Packing::Pad, true) => format!(
                "{cut} of {documents} pairs have a text longer than --seq {seq}, which loses its end{nothing_left}; all of them count \
                 in the means of losses and rewards; raise --seq, or leave such pairs out"
            ),
            (Packing::Pad, false) => format!(
                "{cut} of {documents} documents are longer than --seq {seq} and lose their ends{nothing_left}; raise --seq, or take \
                 --packing first-fit, which cuts them into parts"
            ),
            _ => format!(
                "{cut} of {documents} documents are longer than --seq {seq} and are cut into parts, of which none sees another; raise \
                 --seq to keep documents whole"
            ),
        })
    }
}
