//! The input of a training step.

use memory::{OwnParts, Rank};

/// The target at a position without a loss (`ignore_index` in Hugging Face and PyTorch).
pub const MASKED: i32 = -100;

/// The rows of one forward and backward pass, row-major `[rows, seq]`.
#[derive(Debug, Clone, PartialEq)]
pub struct MicroBatch {
    /// Token ids, `[rows, seq]`, each below the vocabulary size.
    pub input_ids: Vec<i32>,
    /// The token that is wanted after each input, `[rows, seq]`, or [`MASKED`].
    pub targets: Vec<i32>,
    /// Sequences in this micro-batch.
    pub rows: usize,
    /// Tokens in each sequence, or in the part of each.
    pub seq: usize,
    /// Which part of each sequence this is: that of one of the ranks that share sequences.
    pub part: Rank,
    /// For each token of whole sequences, `[rows, parts seq]`, the position in its row at which its document begins. `None` if each
    /// row is one document.
    pub documents: Option<Vec<i32>>,
    /// `[rows]`: how many tokens each whole row begins with that are not padding. `None`: padding is not told apart,
    /// as under `Packing::Concatenate`.
    pub lengths: Option<Vec<i32>>,
    /// Numbers beside the targets that the loss of preferences or of a policy takes; none for next tokens.
    pub beside: Option<BesideTargets>,
}

/// Numbers that come with targets.
#[derive(Debug, Clone, PartialEq)]
pub enum BesideTargets {
    /// For preferences, `[rows]`: the sum of each row's losses under the model that training began with.
    Reference(Vec<f32>),
    /// For a policy gradient.
    Policy(PolicyTargets),
}

/// The numbers of a policy gradient's targets, which an earlier policy wrote, and of its loss. Each of the former is `[rows, seq]`; where the weight is
/// 0, nothing else is read.
#[derive(Debug, Clone, PartialEq)]
pub struct PolicyTargets {
    /// The log-probability of each target under the policy that wrote it.
    pub old: Vec<f32>,
    /// The log-probability of each target under the policy that the model is to stay near.
    pub reference: Option<Vec<f32>>,
    /// How much better than expected each target is.
    pub advantages: Vec<f32>,
    /// The share of each target in the step's loss.
    pub weights: Vec<f32>,
    /// How far below 1 a ratio of probabilities may fall.
    pub clip_low: f32,
    /// How far above 1 it may rise.
    pub clip_high: f32,
    /// The factor on the distance from the reference.
    pub beta: f32,
    /// Whether a sequence has one ratio.
    pub by_sequence: bool,
}

impl PolicyTargets {
    /// So many targets, none of which counts.
    pub fn uncounted(tokens: usize) -> PolicyTargets {
        let zeros = || vec![0.0; tokens];
        PolicyTargets {
            old: zeros(),
            reference: Some(zeros()),
            advantages: zeros(),
            weights: zeros(),
            clip_low: 0.0,
            clip_high: 0.0,
            beta: 0.0,
            by_sequence: false,
        }
    }
}

impl MicroBatch {
    /// One part of each of its sequences. A micro-batch without tokens gives a part without tokens.
    ///
    /// # Panics
    /// If it is a part itself, or its sequences do not divide into equal parts.
    #[must_use]
    pub fn part(&self, part: Rank) -> MicroBatch {
        assert!(
            self.part == Rank::ALONE && self.seq.is_multiple_of(part.of),
            "{} tokens are no {} equal parts",
            self.seq,
            part.of
        );
        let seq = self.seq / part.of;
        let own = |tokens: &[i32]| -> Vec<i32> {
            let own = tokens.chunks(seq.max(1)).skip(part.number).step_by(part.of);
            own.flatten().copied().collect()
        };
        MicroBatch {
            input_ids: own(&self.input_ids),
            targets: own(&self.targets),
            rows: self.rows,
            seq,
            part,
            documents: self.documents.clone(),
            lengths: self.lengths.clone(),
            beside: self.beside.clone(),
        }
    }

    /// The shape of a part that another rank has.
    fn part_elsewhere(&self, part: Rank) -> MicroBatch {
        MicroBatch {
            part,
            ..MicroBatch::unread(self.rows, self.seq / part.of, self.documents.is_some())
        }
    }

    /// `[rows]`: how many tokens this part of each row has that are not padding.
    pub fn own_lengths(&self) -> Option<Vec<i32>> {
        let first = (self.part.number * self.seq) as i32;
        let own = |length: &i32| (length - first).clamp(0, self.seq as i32);
        Some(self.lengths.as_ref()?.iter().map(own).collect())
    }

    /// A micro-batch without tokens so far. [`Self::rows`] is already final.
    pub(crate) fn unread(rows: usize, seq: usize, documents: bool) -> Self {
        Self {
            input_ids: Vec::new(),
            targets: Vec::new(),
            rows,
            seq,
            part: Rank::ALONE,
            documents: documents.then(Vec::new),
            lengths: None,
            beside: None,
        }
    }

    /// Reserves memory for all of its rows.
    pub(crate) fn make_room(&mut self) {
        let documents = self.documents.as_mut();
        for tokens in [&mut self.input_ids, &mut self.targets]
            .into_iter()
            .chain(documents)
        {
            tokens.reserve_exact(self.rows * self.seq);
        }
    }

    /// Pads the last row to its end, without targets. Each padding token is a document of its own, so that it attends
    /// only to itself.
    pub(crate) fn fill_row(&mut self) {
        let whole = self.input_ids.len().next_multiple_of(self.seq);
        if let Some(documents) = &mut self.documents {
            documents.extend((documents.len()..whole).map(|token| (token % self.seq) as i32));
        }
        self.input_ids.resize(whole, 0);
        self.targets.resize(whole, MASKED);
    }

    /// Number of targets that are not [`MASKED`].
    pub fn target_count(&self) -> usize {
        self.targets.iter().filter(|&&t| t != MASKED).count()
    }
}

/// The micro-batches of all ranks whose gradients are summed for one optimizer step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepBatch {
    /// `accum` micro-batches with equal numbers of rows, in the order in which they are run. All have the dataset's
    /// `seq`; with [`Packing::Pad`](crate::Packing::Pad) each has its own length, at most that. Micro-batches that
    /// other ranks read have a shape here, but no tokens.
    pub micro: Vec<MicroBatch>,
    /// Targets of the micro-batches that other ranks read; 0 until those ranks have reported them.
    pub targets_elsewhere: usize,
}

impl FromIterator<MicroBatch> for StepBatch {
    /// A step without micro-batches of other ranks.
    fn from_iter<M: IntoIterator<Item = MicroBatch>>(micro: M) -> StepBatch {
        StepBatch {
            micro: micro.into_iter().collect(),
            targets_elsewhere: 0,
        }
    }
}

impl StepBatch {
    /// Number of targets of the whole step that are not [`MASKED`], by which the loss is divided. Never zero in a step
    /// whose micro-batches were all read by [`Batches::next_step`](crate::Batches::next_step).
    pub fn target_count(&self) -> usize {
        let here: usize = self.micro.iter().map(MicroBatch::target_count).sum();
        here + self.targets_elsewhere
    }

    /// The same step where sequences have parts: each part of a micro-batch counts as a micro-batch. Only the `own` ones have tokens.
    #[must_use]
    pub fn in_parts(self, own: OwnParts) -> StepBatch {
        let parts = |micro: MicroBatch| -> Vec<MicroBatch> {
            let part = |part: Rank| match own.each().any(|own| own == part) {
                true => micro.part(part),
                false => micro.part_elsewhere(part),
            };
            Rank::all(own.of).map(part).collect()
        };
        StepBatch {
            micro: self.micro.into_iter().flat_map(parts).collect(),
            ..self
        }
    }

    /// Number of pairs of the whole step, if every two rows are one.
    pub fn pairs(&self) -> usize {
        let rows = self.micro.iter().map(|micro| micro.rows);
        rows.sum::<usize>() / 2
    }
}

/// `token` as an id, if it is below `vocab`.
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
            part: Rank::ALONE,
            documents: None,
            lengths: None,
            beside: None,
        };
        let mut step = StepBatch::from_iter([
            micro(vec![MASKED, 0, 5]),
            micro(vec![MASKED, MASKED, MASKED]),
            micro(vec![1, 2, 3]),
        ]);
        let counts: Vec<_> = step.micro.iter().map(MicroBatch::target_count).collect();
        assert_eq!(counts, [2, 0, 3]);
        assert_eq!(step.target_count(), 5);
        step.targets_elsewhere = 3;
        assert_eq!(step.target_count(), 8);
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
