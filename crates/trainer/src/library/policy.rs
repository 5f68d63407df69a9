//! Steps on a policy gradient: reinforcement learning, in a program that writes texts and judges them.

use super::Trainer;
use super::token_rows::TokenRows;
use crate::failure::{Failure, Result};
use data::{BesideTargets, MASKED, PolicyTargets};
use session::{SessionError, StepOutcome, WhichModel};

/// The rows of a step on a policy gradient, whose targets are masked where the policy did not write them. Numbers are `[rows, tokens]`, at the
/// places of the targets; at masked ones they are not read.
#[derive(Clone, Copy, Debug)]
pub struct PolicyBatch<'a> {
    /// Tokens and targets.
    pub rows: &'a TokenRows,
    /// How much better than expected each target is.
    pub advantages: &'a [f32],
    /// The log-probability of each target under the policy that wrote it.
    pub old: &'a [f32],
    /// The log-probability of each target under the policy that the model is to stay near.
    pub reference: Option<&'a [f32]>,
}

/// The loss of a policy gradient, as TRL computes it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PolicyLoss {
    /// How tokens count, and what has a ratio.
    pub kind: PolicyLossKind,
    /// How far below 1 a ratio may fall before it is clipped.
    pub clip_low: f32,
    /// How far above 1 it may rise.
    pub clip_high: f32,
    /// The factor on the distance from the reference.
    pub beta: f32,
}

/// How tokens count in the loss of a policy gradient, and what has a ratio of probabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyLossKind {
    /// The mean over rows of the mean over each row's targets (Shao et al. 2024).
    Grpo,
    /// The sum over targets, divided by the rows and by the most targets that a row may have (Liu et al. 2025).
    DrGrpo {
        /// The most targets of a row.
        longest: usize,
    },
    /// As `Grpo`, with one ratio for each row (Zheng et al. 2025).
    Gspo,
    /// The mean over all targets of the step (Schulman et al. 2017).
    Ppo,
}

impl PolicyLossKind {
    /// The weight of each target of the step.
    fn weights(self, rows: &TokenRows) -> Vec<f32> {
        let is_target = |target: &&i64| **target != i64::from(MASKED);
        let count = |targets: &[i64]| targets.iter().filter(is_target).count();
        let ([number, width], all) = (rows.dims, count(&rows.targets));
        let of_row = |row: &[i64]| match self {
            PolicyLossKind::Grpo | PolicyLossKind::Gspo => number as f64 * count(row) as f64,
            PolicyLossKind::DrGrpo { longest } => number as f64 * longest as f64,
            PolicyLossKind::Ppo => all as f64,
        };
        let rows = rows.targets.chunks(width).map(|row| (row, of_row(row)));
        rows.flat_map(|(row, divisor)| {
            let weight = move |target: &i64| match is_target(&target) {
                false => 0.0,
                true => (1.0 / divisor) as f32,
            };
            row.iter().map(weight)
        })
        .collect()
    }
}

impl Trainer {
    /// The log-probability of each target of `rows` after the tokens up to its place, `[rows, tokens]`, 0 where it is masked; without training. The
    /// model is the one that is trained, or the one under its adapters. There may be any number of rows.
    ///
    /// # Errors
    /// As [`Trainer::policy_step`].
    pub fn log_probs(&mut self, rows: &TokenRows, which: WhichModel) -> Result<Vec<f32>> {
        if which == WhichModel::Reference && self.base.is_none() {
            return Err(Failure::Usage(
                "the model has no adapters, so there is no model under them; set lora.rank, or keep log_probs of the model as it began".into(),
            ));
        }
        let micro_batches = rows.micro_batches(&self.config)?;
        self.enter()?;
        let stop = self.stop.clone();
        let micro_batches = micro_batches.into_iter().map(|micro| match stop() {
            true => Err(SessionError::Stopped),
            false => Ok(micro),
        });
        let mut forward = self.session.awake_mut()?.forward()?;
        let (losses, _) = forward.token_losses(which, micro_batches)?;
        let mut made = Vec::with_capacity(rows.ids.len());
        let mut rest = &losses[..];
        for place in rows.places(&self.config) {
            let (own, behind) = rest.split_at(place.tokens());
            made.extend(place.own_of(own).map(|loss| 0.0 - loss));
            rest = behind;
        }
        Ok(made)
    }

    /// One training step on a policy gradient: forward and backward passes of every micro-batch, then the update. `train.objective` is
    /// `policy`; rows may be fewer and shorter, as for [`Trainer::step_rows`], and those of all micro-batches have one loss. Nothing is dropped out.
    /// [`StepOutcome::policy`] tells how far the policy was from the reference, and what was clipped.
    ///
    /// Where `beta` is above 0 and the batch has no `reference`, that is the model under the adapters: a pass without them comes before the
    /// step.
    ///
    /// ```
    /// use trainer::{PolicyBatch, PolicyLoss, PolicyLossKind, TokenRows, Trainer, WhichModel, configuration};
    ///
    /// let set = ["train.objective=policy", "data.seq=8", "batch.micro=2"];
    /// let mut trainer = Trainer::new(configuration("tiny", &set)?)?;
    /// // Each row has a prompt of four tokens, and an answer.
    /// let targets = (1..17).map(|id| if (id - 1) % 8 < 3 { -100 } else { id });
    /// let rows = TokenRows { dims: [2, 8], ids: (0..16).collect(), targets: targets.collect(), positions: None };
    /// let old = trainer.log_probs(&rows, WhichModel::Trained)?;
    /// // The first answer is better than the second.
    /// let advantages = [[1.0; 8], [-1.0; 8]].concat();
    /// let batch = PolicyBatch { rows: &rows, advantages: &advantages, old: &old, reference: None };
    /// let loss = PolicyLoss { kind: PolicyLossKind::Grpo, clip_low: 0.2, clip_high: 0.2, beta: 0.0 };
    /// let outcome = trainer.policy_step(&batch, &loss)?;
    /// assert_eq!(outcome.policy.unwrap().clip_share, 0.0);
    /// # Ok::<(), trainer::Failure>(())
    /// ```
    ///
    /// # Errors
    /// [`Failure::Usage`] for another objective, rows that were not planned, tokens outside the vocabulary and numbers that are not finite,
    /// with their place; and where `beta` is above 0 without any reference. Else as [`Trainer::step`].
    pub fn policy_step(&mut self, batch: &PolicyBatch, loss: &PolicyLoss) -> Result<StepOutcome> {
        loss.check()?;
        self.check_objective(true)?;
        let mut step = batch.rows.batch(&self.config)?;
        batch.check()?;
        let reference = self.reference_of(batch, loss)?;
        let weights = loss.kind.weights(batch.rows);
        for (place, micro) in batch.rows.places(&self.config).iter().zip(&mut step.micro) {
            let own = |values: &[f32]| place.filled(&|at| values[at], &|_| 0.0);
            micro.beside = Some(BesideTargets::Policy(PolicyTargets {
                old: own(batch.old),
                reference: reference.as_deref().map(own),
                advantages: own(batch.advantages),
                weights: own(&weights),
                clip_low: loss.clip_low,
                clip_high: loss.clip_high,
                beta: loss.beta,
                by_sequence: loss.kind == PolicyLossKind::Gspo,
            }));
        }
        self.make(step, None)
    }

    /// Refuses a kind of step that the trainer was not planned with.
    pub(super) fn check_objective(&self, learns_policy: bool) -> Result {
        if self.config.has_policy() == learns_policy {
            return Ok(());
        }
        let objective = self.config.train.objective;
        Err(Failure::Usage(match learns_policy {
            true => format!(
                "policy_step learns a policy, and train.objective is {objective}; open the trainer with train.objective=policy"
            ),
            false => format!(
                "step learns next tokens, and train.objective is {objective}; take policy_step, or leave the objective out"
            ),
        }))
    }

    /// The log-probabilities of the reference: the batch's, or else those of the model under the adapters, if the loss takes them.
    fn reference_of(&mut self, batch: &PolicyBatch, loss: &PolicyLoss) -> Result<Option<Vec<f32>>> {
        match batch.reference {
            Some(reference) => Ok(Some(reference.to_vec())),
            None if loss.beta == 0.0 => Ok(None),
            None if self.base.is_some() => {
                Ok(Some(self.log_probs(batch.rows, WhichModel::Reference)?))
            }
            None => Err(Failure::Usage(format!(
                "`beta` is {}, and there is no `reference` to stay near: pass the log_probs of the model as it began, train adapters \
                 (lora.rank), or make `beta` 0",
                loss.beta
            ))),
        }
    }
}

impl PolicyLoss {
    fn check(&self) -> Result {
        let numbers = [
            ("clip_low", self.clip_low),
            ("clip_high", self.clip_high),
            ("beta", self.beta),
        ];
        for (name, number) in numbers {
            if !(number.is_finite() && number >= 0.0) {
                return Err(Failure::Usage(format!(
                    "`{name}` is {number}; it takes a finite number of at least 0"
                )));
            }
        }
        if self.kind == (PolicyLossKind::DrGrpo { longest: 0 }) {
            return Err(Failure::Usage(
                "the most targets of a row are 0; dr_grpo divides by them: pass the longest completion that is sampled".into(),
            ));
        }
        Ok(())
    }
}

impl PolicyBatch<'_> {
    fn check(&self) -> Result {
        let numbers = [
            ("advantages", Some(self.advantages)),
            ("old", Some(self.old)),
            ("reference", self.reference),
        ];
        let mut given = numbers
            .into_iter()
            .filter_map(|(name, values)| Some((name, values?)));
        given.try_for_each(|(name, values)| check_numbers(name, values, self.rows))
    }
}

/// Refuses numbers of targets that are not finite.
fn check_numbers(name: &str, values: &[f32], rows: &TokenRows) -> Result {
    if values.len() != rows.targets.len() {
        return Err(Failure::Usage(format!(
            "there are {} `{name}` and {} `ids`; each id has one",
            values.len(),
            rows.targets.len()
        )));
    }
    let mut counted = values.iter().zip(&rows.targets).enumerate();
    let wrong =
        counted.find(|(_, (value, target))| **target != i64::from(MASKED) && !value.is_finite());
    match wrong {
        None => Ok(()),
        Some((at, (value, _))) => Err(Failure::Usage(format!(
            "`{name}` at [{}, {}] is {value}; a step learns from finite numbers",
            at / rows.dims[1],
            at % rows.dims[1]
        ))),
    }
}
