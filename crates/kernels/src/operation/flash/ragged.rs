//! Packed documents as cuDNN's ragged layout has them.

use crate::AttentionShape;

/// Tokens for which a plan has room for one more document. Blocks of threads start for every document that there is room for, as
/// many as for a whole sequence, and end at once where there is none.
const TOKENS_A_DOCUMENT: usize = 256;

/// Numbers of a row begin at multiples of 16 bytes, as cuDNN's tensors do.
const ALIGNMENT: usize = 4;

/// Which documents a micro-batch has, `[4, n]` i32, in the order of their tokens: the length of each, then where its rows begin, in
/// elements of q and of the output, of k and of v, of the statistics. Documents that there is room for and that are not there have
/// no tokens, and begin where the last one ends.
pub struct RaggedDocuments;

impl RaggedDocuments {
    /// The shape of the numbers.
    pub fn dims(shape: AttentionShape) -> [usize; 2] {
        [4, RaggedDocuments::stride(shape.documents_max())]
    }

    /// Numbers from one row to the next, with room for so many documents and for the end of the last.
    pub(crate) fn stride(documents_max: usize) -> usize {
        (documents_max + 1).next_multiple_of(ALIGNMENT)
    }

    /// Whether a plan has room for so many documents. `starts` has, for each token, the position in its sequence at which its document
    /// begins, and `lengths`, for each sequence, how many tokens come before its padding, which is one more document.
    pub fn fits(shape: AttentionShape, starts: &[i32], lengths: Option<&[i32]>) -> bool {
        begins(shape.seq, starts, lengths).count() <= shape.documents_max()
    }

    /// The numbers, if the documents fit.
    pub fn numbers(
        shape: AttentionShape,
        starts: &[i32],
        lengths: Option<&[i32]>,
    ) -> Option<Vec<i32>> {
        if !RaggedDocuments::fits(shape, starts, lengths) {
            return None;
        }
        let begins: Vec<i32> = begins(shape.seq, starts, lengths).collect();
        let tokens = starts.len() as i32;
        let [_, stride] = RaggedDocuments::dims(shape);
        let ends = begins.iter().skip(1).chain([&tokens]);
        let lengths = begins.iter().zip(ends).map(|(begin, end)| end - begin);
        let mut numbers: Vec<i32> = lengths.collect();
        numbers.resize(stride, 0);
        let widths = [shape.q()[1], shape.k()[1], shape.heads].map(|width| width as i32);
        for (row, width) in widths.into_iter().enumerate() {
            numbers.extend(begins.iter().map(|begin| begin * width));
            numbers.resize((row + 2) * stride, tokens * width);
        }
        Some(numbers)
    }
}

/// The first token of each document, counted over all sequences.
fn begins<'a>(
    seq: usize,
    starts: &'a [i32],
    lengths: Option<&'a [i32]>,
) -> impl Iterator<Item = i32> + 'a {
    let tokens = starts.iter().enumerate().filter(move |(token, start)| {
        let (row, position) = (token / seq, (token % seq) as i32);
        let is_padding = lengths.is_some_and(|lengths| position > lengths[row]);
        **start == position && !is_padding
    });
    tokens.map(|(token, _)| token as i32)
}

impl AttentionShape {
    /// The most packed documents of a micro-batch that cuDNN's plans have room for: one for every 256 tokens of a sequence, and one
    /// for its padding. It follows from the shape, so that planned bytes do not depend on the data.
    pub fn documents_max(&self) -> usize {
        self.batch * (1 + self.seq.div_ceil(TOKENS_A_DOCUMENT))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two sequences of five tokens, with heads of 8: of two documents and padding, and of one document.
    #[test]
    fn documents_have_lengths_and_begin_where_their_rows_do() {
        let shape = AttentionShape::new([2, 5], [4, 2], 8);
        assert_eq!(shape.documents_max(), 4);
        let starts = [0, 0, 2, 3, 4, 0, 0, 0, 0, 0];
        let numbers = RaggedDocuments::numbers(shape, &starts, Some(&[3, 5])).unwrap();
        assert_eq!(RaggedDocuments::dims(shape), [4, 8]);
        let rows: Vec<&[i32]> = numbers.chunks(8).collect();
        assert_eq!(rows[0], [2, 1, 2, 5, 0, 0, 0, 0]);
        let begins = [0, 2, 3, 5, 10, 10, 10, 10];
        assert_eq!(rows[1], begins.map(|token| token * 32));
        assert_eq!(rows[2], begins.map(|token| token * 16));
        assert_eq!(rows[3], begins.map(|token| token * 4));
    }

    #[test]
    fn more_documents_than_there_is_room_for_are_told() {
        let shape = AttentionShape::new([2, 5], [4, 2], 8);
        let starts = [0, 0, 2, 3, 4, 0, 0, 0, 0, 0];
        assert_eq!(RaggedDocuments::numbers(shape, &starts, None), None);
        let whole = AttentionShape::new([1, 8192], [4, 2], 8);
        assert_eq!(whole.documents_max(), 33);
    }
}
