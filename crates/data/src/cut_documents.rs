//! Numbers of documents that are longer than a row.

/// Documents, or pairs of them, and how many are longer than a row.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CutDocuments {
    /// Documents of at least two tokens, or pairs.
    pub documents: usize,
    /// Those that are longer than a row; of pairs, those with such a text.
    pub cut: usize,
    /// Documents whose learnt tokens are all cut off: only with [`Packing::Pad`](crate::Packing::Pad).
    pub emptied: usize,
}

impl CutDocuments {
    pub(crate) fn plus(self, other: Self) -> Self {
        Self {
            documents: self.documents + other.documents,
            cut: self.cut + other.cut,
            emptied: self.emptied + other.emptied,
        }
    }
}
