//! A micro-batch through the model forward, for its loss or for its next tokens.

use crate::pass::{Pass, Work};
use crate::{Model, Result};
use memory::{Buffer, Layer, Phase};

impl Model {
    /// The sum of the losses of each part of a micro-batch, `sums [parts]` f32, without any backward pass, the head's included.
    ///
    /// # Errors
    /// `ModelError` if a lease is refused or the device fails.
    ///
    /// # Panics
    /// If the work is a training step's.
    pub fn loss<'a>(&'a self, work: Work<'a>, sums: &mut Buffer) -> Result {
        let (chunk, head) = (self.head_chunk(), &self.architecture().head);
        self.forward(work, |pass, x| {
            let sum = sums.view_mut().rows(pass.part()..pass.part() + 1);
            head.loss(pass, x, chunk, sum)
        })?;
        Ok(())
    }

    /// The sum of the losses of each sequence of a micro-batch, `sums [b]` f32, as [`Model::loss`].
    ///
    /// # Errors
    /// As [`Model::loss`].
    ///
    /// # Panics
    /// As [`Model::loss`].
    pub fn sequence_losses<'a>(&'a self, work: Work<'a>, sums: &mut Buffer) -> Result {
        let chunk = self.head_chunk();
        self.forward(work, |pass, x| {
            let head = &self.architecture().head;
            head.sequence_losses(pass, x.view(), chunk, sums.view_mut())
        })?;
        Ok(())
    }

    /// The loss of each token of a micro-batch, `[b s]` f32, as [`Model::loss`]; 0 where it is masked.
    ///
    /// # Errors
    /// As [`Model::loss`].
    ///
    /// # Panics
    /// As [`Model::loss`], and if the micro-batch has several parts.
    pub fn token_losses<'a>(&'a self, work: Work<'a>) -> Result<Buffer> {
        let chunk = self.head_chunk();
        let losses = self.forward(work, |pass, x| {
            self.architecture().head.losses(pass, x.view(), chunk)
        })?;
        let [losses] = losses.try_into().expect("sequences are whole");
        Ok(losses)
    }

    /// The logits `[b, v]` for the token after the last one of each sequence. There may be several sequences of one
    /// token, or one sequence of several.
    ///
    /// # Errors
    /// As [`Model::loss`].
    ///
    /// # Panics
    /// As [`Model::loss`], and if several sequences have several tokens.
    pub fn next_logits<'a>(&'a self, work: Work<'a>) -> Result<Buffer> {
        let logits = self.forward(work, |pass, x| {
            self.architecture().head.next_logits(pass, &x)
        })?;
        Ok(logits
            .into_iter()
            .next()
            .expect("a micro-batch has one part at least"))
    }

    fn forward<'a, T>(
        &'a self,
        work: Work<'a>,
        mut head: impl FnMut(&mut Pass, Buffer) -> Result<T>,
    ) -> Result<Vec<T>> {
        let phase = work.purpose.forward_phase();
        assert_eq!(phase, Phase::Eval, "a training step goes backward too");
        let mut pass = Pass::new(self, work);
        let outcome = pass.forward().and_then(|()| {
            let _place = pass.enter(phase, Layer::Head);
            let outcome = pass.each_part(|pass| {
                let x = pass.take_head_input()?;
                head(pass, x)
            })?;
            pass.work.weights.end_pass(pass.work.kernels)?;
            Ok(outcome)
        });
        if outcome.is_err() {
            pass.abandon()?;
        }
        let is_empty = pass.each_part(|pass| Ok(pass.work.saved.is_empty()))?;
        assert!(
            is_empty.into_iter().all(|is_empty| is_empty),
            "every activation goes after its last reader"
        );
        outcome
    }
}
