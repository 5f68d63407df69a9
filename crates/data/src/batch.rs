//! What a training step consumes.

/// The target that asks for no loss at its place (Hugging Face's and PyTorch's `ignore_index`).
pub const MASKED: i32 = -100;

/// The rows of one forward and backward pass, row-major `[rows, seq]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MicroBatch {
    /// Token ids, `[rows, seq]`, each below the vocabulary size.
    pub input_ids: Vec<i32>,
    /// The token wanted after each input, `[rows, seq]`, or [`MASKED`].
    pub targets: Vec<i32>,
    /// Sequences in this micro-batch.
    pub rows: usize,
    /// Tokens in each sequence.
    pub seq: usize,
}

impl MicroBatch {
    /// A micro-batch with room for `rows` rows and none read yet; [`Self::rows`] is already final.
    pub(crate) fn with_room(rows: usize, seq: usize) -> Self {
        Self {
            input_ids: Vec::with_capacity(rows * seq),
            targets: Vec::with_capacity(rows * seq),
            rows,
            seq,
        }
    }

    /// How many targets are not [`MASKED`].
    pub fn target_count(&self) -> usize {
        self.targets.iter().filter(|&&t| t != MASKED).count()
    }
}

/// The micro-batches whose gradients are summed for one optimizer step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepBatch {
    /// `accum` micro-batches of equal shape, in the order in which they are to be run.
    pub micro: Vec<MicroBatch>,
}

impl StepBatch {
    /// How many targets of the whole step are not [`MASKED`]: what the loss is divided by. Never
    /// zero in a step that came from [`Batches::next_step`](crate::Batches::next_step).
    pub fn target_count(&self) -> usize {
        self.micro.iter().map(MicroBatch::target_count).sum()
    }
}

/// `token` as an id, where it is one of `vocab` ids.
pub(crate) fn token_id(token: i64, vocab: usize) -> Option<i32> {
    let id = i32::try_from(token).ok()?;
    let index = usize::try_from(id).ok()?;
    (index < vocab).then_some(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masked_targets_are_not_counted() {
        let micro = |targets: Vec<i32>| MicroBatch {
            input_ids: vec![0; targets.len()],
            rows: 1,
            seq: targets.len(),
            targets,
        };
        let step = StepBatch {
            micro: vec![
                micro(vec![MASKED, 0, 5]),
                micro(vec![MASKED, MASKED, MASKED]),
                micro(vec![1, 2, 3]),
            ],
        };
        let counts: Vec<_> = step.micro.iter().map(MicroBatch::target_count).collect();
        assert_eq!(counts, [2, 0, 3]);
        assert_eq!(step.target_count(), 5);
    }

    #[test]
    fn ids_end_below_the_vocabulary() {
        assert_eq!(token_id(0, 7), Some(0));
        assert_eq!(token_id(6, 7), Some(6));
        assert_eq!(token_id(7, 7), None);
        assert_eq!(token_id(-1, 7), None);
        assert_eq!(token_id(1 << 31, usize::MAX), None);
    }
}
