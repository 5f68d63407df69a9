//! Final norm, output head and cross-entropy, forward and backward at once, in chunks of tokens: the logits of a
//! whole micro-batch never exist.

use super::Norm;
use crate::{
    Activation, HeadLoss, Linear, LossPart, ParameterId, Pass, PolicyGradient, Preferences, Result,
};
use kernels::Init;
use kernels::operation::{CrossEntropy, PolicyGradientLoss, PreferenceLoss, SoftCap, Sum};
use memory::{Buffer, In, Layer, Out, Phase};
use std::ops::Range;

/// What follows the last block.
pub struct Head {
    /// The final norm.
    pub norm: Norm,
    /// The output head: hidden width to vocabulary.
    pub linear: Linear,
    /// Logits are multiplied by this.
    pub logit_multiplier: f32,
    /// Logits z become c tanh(z / c), with this c; none: they stay.
    pub cap: Option<f32>,
}

/// What the chunks of a micro-batch read and write.
struct Whole {
    x: Buffer,
    losses: Buffer,
    dx: Buffer,
    factors: Factors,
}

/// What the gradients of losses are multiplied by.
enum Factors {
    /// The step's factor alone: the losses of targets are the step's.
    Step,
    /// `[b]` f32: a factor for each sequence, under preferences.
    Sequences(Buffer),
    /// `[b s]` f32: a factor for each token, of a policy.
    Tokens(Buffer),
}

/// What comes of some tokens of the head's input.
struct Normed {
    h: Buffer,
    statistics: Vec<Buffer>,
    logits: Buffer,
}

/// `tokens` rows in chunks.
fn chunks(tokens: usize, chunk: usize) -> impl Iterator<Item = Range<usize>> {
    let starts = (0..tokens).step_by(chunk);
    starts.map(move |start| start..(start + chunk).min(tokens))
}

/// Adds the rows of `marks [parts, n]` to the parts of the step's loss.
fn add_marks(pass: &mut Pass, parts: [LossPart; LossPart::MOST], marks: &Buffer) -> Result {
    let each = marks.dims()[1];
    for (row, part) in parts.into_iter().enumerate() {
        let of_part = marks.view().rows(row..row + 1);
        pass.add_to_loss(part, of_part.reshape([each]))?;
    }
    Ok(())
}

impl Factors {
    /// The parts of some tokens that have a factor in common, or one each.
    fn of_chunk<'f>(&'f self, pass: &'f Pass, rows: Range<usize>) -> Vec<(Range<usize>, In<'f>)> {
        match self {
            Factors::Step => vec![(rows, pass.gradient_scale())],
            Factors::Tokens(factors) => vec![(rows.clone(), factors.view().rows(rows))],
            Factors::Sequences(factors) => {
                let sequences = pass.batch().shape.sequences(rows);
                let factor = |row: usize| factors.view().rows(row..row + 1);
                sequences
                    .map(|(row, tokens)| (tokens, factor(row)))
                    .collect()
            }
        }
    }
}

impl Head {
    /// Width of its input.
    pub(crate) fn width(&self) -> usize {
        self.linear.inputs
    }

    /// The parameters that it uses.
    pub(crate) fn parameters(&self) -> Vec<ParameterId> {
        [self.norm.parameters(), self.linear.parameters()].concat()
    }

    /// Model FLOPs of forward and backward for one token.
    pub(crate) fn flops_per_token(&self) -> u64 {
        self.linear.flops_per_token()
    }

    /// Adds the loss of a micro-batch whose head's input is `x [b s, h]`, and returns the gradient of `x`. Chunks have
    /// `chunk` tokens.
    pub(crate) fn loss_and_gradient(
        &self,
        pass: &mut Pass,
        x: Buffer,
        chunk: usize,
    ) -> Result<Buffer> {
        let tokens = pass.tokens();
        let factors = match pass.step_loss().of_head {
            HeadLoss::NextTokens => Factors::Step,
            HeadLoss::Preferences(preferences) => {
                let of_pairs = self.preferences(pass, x.view(), chunk, preferences)?;
                Factors::Sequences(of_pairs)
            }
            HeadLoss::Policy(policy) => {
                Factors::Tokens(self.policy(pass, x.view(), chunk, policy)?)
            }
        };
        let mut whole = Whole {
            losses: pass.temporary_f32("losses", [tokens])?,
            dx: pass.temporary(Activation::X.gradient_name(), x.dims())?,
            x,
            factors,
        };
        for rows in chunks(tokens, chunk) {
            self.chunk(pass, rows, &mut whole)?;
        }
        if let Factors::Step = whole.factors {
            pass.add_to_loss(LossPart::Targets, whole.losses.view())?;
        }
        Ok(whole.dx)
    }

    /// Adds the loss of a micro-batch of pairs, and returns the factor of each sequence's gradients, `[b]` f32. It takes a pass
    /// over the chunks of its own, since a factor follows from all tokens of both sequences.
    fn preferences(
        &self,
        pass: &mut Pass,
        x: In,
        chunk: usize,
        Preferences { reference, beta }: Preferences,
    ) -> Result<Buffer> {
        let rows = pass.batch().shape.rows;
        let mut policy = pass.temporary_f32("sequence_losses", [rows])?;
        self.sequence_losses(pass, x, chunk, policy.view_mut())?;
        let mut factors = pass.temporary_f32("preference_factors", [rows])?;
        let mut marks = pass.temporary_f32("preference_marks", [LossPart::MOST, rows / 2])?;
        pass.kernels().run(PreferenceLoss {
            factors: factors.view_mut(),
            marks: marks.view_mut(),
            policy: policy.view(),
            reference,
            scale: pass.gradient_scale(),
            beta,
        })?;
        let parts = [
            LossPart::Targets,
            LossPart::Chosen,
            LossPart::Rejected,
            LossPart::Preferred,
        ];
        add_marks(pass, parts, &marks)?;
        Ok(factors)
    }

    /// Adds the loss of a micro-batch of a policy's sequences, and returns the factor of each token's gradients, `[b s]` f32. It takes a
    /// pass over the chunks of its own: of a whole sequence's ratio, every token has a share.
    fn policy(
        &self,
        pass: &mut Pass,
        x: In,
        chunk: usize,
        policy: PolicyGradient,
    ) -> Result<Buffer> {
        let shape = pass.batch().shape;
        let (tokens, by_rows) = (shape.tokens(), [shape.rows, shape.seq]);
        let losses = self.losses(pass, x, chunk)?;
        let mut factors = pass.temporary_f32("policy_factors", [tokens])?;
        let mut marks = pass.temporary_f32("policy_marks", [LossPart::MOST, shape.rows])?;
        pass.kernels().run(PolicyGradientLoss {
            factors: factors.view_mut().reshape(by_rows),
            marks: marks.view_mut(),
            losses: losses.view().reshape(by_rows),
            old: policy.old,
            reference: policy.reference,
            advantages: policy.advantages,
            weights: policy.weights,
            clip_low: policy.clip_low,
            clip_high: policy.clip_high,
            beta: policy.beta,
            by_sequence: policy.by_sequence,
        })?;
        let parts = [
            LossPart::Targets,
            LossPart::Kl,
            LossPart::Clipped,
            LossPart::Weights,
        ];
        add_marks(pass, parts, &marks)?;
        Ok(factors)
    }

    /// The loss of a micro-batch whose head's input is `x [b s, h]`, forward alone. Chunks have `chunk` tokens.
    pub(crate) fn loss(&self, pass: &mut Pass, x: Buffer, chunk: usize, sum: Out) -> Result {
        let losses = self.losses(pass, x.view(), chunk)?;
        Ok(pass.kernels().run(Sum {
            out: sum,
            x: losses.view(),
            init: Init::Overwrite,
        })?)
    }

    /// The sum of the losses of each sequence, `sums [b]` f32, forward alone, as [`Head::loss`].
    pub(crate) fn sequence_losses(
        &self,
        pass: &mut Pass,
        x: In,
        chunk: usize,
        mut sums: Out,
    ) -> Result {
        let losses = self.losses(pass, x, chunk)?;
        for (row, tokens) in pass.batch().shape.sequences(0..pass.tokens()) {
            pass.kernels().run(Sum {
                out: sums.reborrow().rows(row..row + 1),
                x: losses.view().rows(tokens),
                init: Init::Overwrite,
            })?;
        }
        Ok(())
    }

    /// The loss of each token, `[b s]` f32, forward alone.
    pub(crate) fn losses(&self, pass: &mut Pass, x: In, chunk: usize) -> Result<Buffer> {
        let mut losses = pass.temporary_f32("losses", [pass.tokens()])?;
        for rows in chunks(pass.tokens(), chunk) {
            let mut logits = self.normed(pass, x.rows(rows.clone()))?.logits;
            pass.kernels().run(CrossEntropy {
                losses: losses.view_mut().rows(rows.clone()),
                logits: logits.view_mut(),
                targets: pass.batch().targets.view().rows(rows),
                scale: None,
                cap: self.cap,
            })?;
        }
        Ok(losses)
    }

    /// The logits `[b, v]` of the last token of each sequence, where the head's input is `x [b s, h]`.
    pub(crate) fn next_logits(&self, pass: &mut Pass, x: &Buffer) -> Result<Buffer> {
        let shape = pass.batch().shape;
        assert!(
            shape.rows == 1 || shape.seq == 1,
            "the last tokens of sequences lie together"
        );
        let last = shape.tokens() - shape.rows..shape.tokens();
        let mut logits = self.normed(pass, x.view().rows(last))?.logits;
        if let Some(cap) = self.cap {
            let x = logits.view_mut();
            pass.kernels().run(SoftCap { x, cap })?;
        }
        Ok(logits)
    }

    /// Norm and logits of some tokens.
    fn normed(&self, pass: &mut Pass, x: In) -> Result<Normed> {
        let rows = x.dims()[0];
        let mut h = pass.temporary("final_norm", [rows, self.width()])?;
        let names = self.norm.statistics().iter();
        let statistics = names.map(|name| pass.temporary_f32(name, [rows]));
        let mut statistics = statistics.collect::<Result<Vec<Buffer>, _>>()?;
        let made = statistics.iter_mut().map(|of| Some(of.view_mut()));
        self.norm.forward(pass, Some(h.view_mut()), made, x)?;
        // The input is much narrower than the logits.
        super::multiply(pass.kernels(), h.view_mut(), self.logit_multiplier)?;
        let mut logits = pass.temporary("logits", [rows, self.linear.outputs()])?;
        self.linear.forward(pass, logits.view_mut(), h.view())?;
        Ok(Normed {
            h,
            statistics,
            logits,
        })
    }

    fn chunk(&self, pass: &mut Pass, rows: Range<usize>, whole: &mut Whole) -> Result {
        let x = whole.x.view().rows(rows.clone());
        let Normed {
            h,
            statistics,
            mut logits,
        } = self.normed(pass, x)?;
        let targets = pass.batch().targets.view();
        for (tokens, scale) in whole.factors.of_chunk(pass, rows.clone()) {
            let within = tokens.start - rows.start..tokens.end - rows.start;
            pass.kernels().run(CrossEntropy {
                losses: whole.losses.view_mut().rows(tokens.clone()),
                logits: logits.view_mut().rows(within),
                targets: targets.rows(tokens),
                scale: Some(scale),
                cap: self.cap,
            })?;
        }

        let _place = pass.enter(Phase::Backward, Layer::Head);
        let dh = self.through_the_product(pass, h, logits)?;
        let dx = (whole.dx.view_mut().rows(rows), Init::Overwrite);
        let statistics: Vec<In> = statistics.iter().map(Buffer::view).collect();
        self.norm.backward(pass, dx, dh.view(), x, &statistics)
    }

    /// The gradient of the normalised input, from that of the logits.
    fn through_the_product(&self, pass: &mut Pass, h: Buffer, dlogits: Buffer) -> Result<Buffer> {
        self.linear.add_gradient(pass, dlogits.view(), h.view())?;
        let shape = h.dims();
        drop(h);
        let mut dh = pass.temporary("d_final_norm", shape)?;
        self.linear
            .input_gradient(pass, dh.view_mut(), Init::Overwrite, (dlogits.view(), None))?;
        super::multiply(pass.kernels(), dh.view_mut(), self.logit_multiplier)?;
        Ok(dh)
    }
}
