//! What a run does between steps: it evaluates, writes a sample of text, and saves.

use super::Run;
use crate::failure::{Failure, Result};
use crate::samples::refuse_nothing;
use checkpoint::Best;
use report::{EvalRecord, SampleRecord, milliseconds};
use session::{Generation, Sampling, Session};
use std::collections::BTreeSet;
use std::time::Instant;

/// What is to be done after a step.
struct Due {
    evaluation: bool,
    sample: bool,
    checkpoint: bool,
}

impl Due {
    fn nothing(&self) -> bool {
        !(self.evaluation || self.sample || self.checkpoint)
    }
}

impl Run {
    /// Does what is due after a step.
    pub(super) fn between_steps(&mut self, session: &mut Session, step: usize) -> Result {
        let due = self.due(step);
        if due.nothing() {
            return Ok(());
        }
        let last = session.finish_step()?;
        self.record(last)?;
        let is_best = due.evaluation && self.evaluate(session, step)?;
        if self.is_pending {
            return Ok(());
        }
        if due.sample {
            self.sample(session, step)?;
        }
        let keeps_best = is_best && self.decided.config.checkpoint.keep_best;
        if due.checkpoint || keeps_best {
            self.save(session)?;
        }
        // The time of this is not part of the next step's.
        self.made.until = Instant::now();
        Ok(())
    }

    fn due(&self, step: usize) -> Due {
        let config = &self.decided.config;
        let is_due = |every: Option<usize>| {
            every.is_some_and(|every| step.is_multiple_of(every) || step == config.train.steps)
        };
        Due {
            evaluation: is_due(config.eval.every),
            sample: is_due(config.log.sample_every),
            checkpoint: config.checkpoint.is_due(step, config.train.steps),
        }
    }

    /// Evaluates; returns whether the loss is lower than that of every earlier evaluation. An evaluation that a signal
    /// interrupts is not recorded, and is made again when the run is resumed.
    fn evaluate(&mut self, session: &mut Session, step: usize) -> Result<bool> {
        let data = self.evaluation_inputs.evaluation.as_ref();
        let data = data.expect("it was opened, since evaluations are asked for");
        let config = &self.decided.config;
        let begun = Instant::now();
        let batches = data.once(config.eval.samples);
        // Ranks do not stop here, but together at the end of a step.
        let breaks_off = || !self.job.has_ranks() && self.interrupt.signal().is_some();
        let batches = batches.take_while(|_| !breaks_off());
        let mut shapes = BTreeSet::new();
        let batches = batches.map(|micro| {
            let micro = micro?;
            shapes.insert((micro.rows, micro.seq));
            Ok::<_, Failure>(micro)
        });
        let found = session.forward()?.evaluate(batches)?;
        self.is_pending = breaks_off();
        if self.is_pending {
            return Ok(false);
        }
        refuse_nothing(&found, data)?;
        let (loss, best) = (found.loss(), self.saver.best.as_ref());
        let is_best = loss.is_finite() && best.is_none_or(|best| (loss as f32) < best.loss);
        // All ranks save the best one, or none does.
        let is_best = self.job.word_of_first(&is_best.to_string())? == true.to_string();
        if is_best {
            self.saver.best = Some(Best {
                step: step as u64,
                loss: loss as f32,
                data: data.fingerprint(),
            });
        }
        let bytes = data.bytes_per_token();
        let record = EvalRecord {
            step,
            loss,
            perplexity: found.perplexity(),
            bits_per_byte: bytes.map(|bytes| found.bits_per_byte(bytes)),
            targets: found.targets as u64,
            is_best,
            peak_bytes: found.peak_bytes,
            planned_peak_bytes: self.peaks.of_evaluation(&shapes)?,
            eval_ms: milliseconds(begun.elapsed()),
        };
        self.records.evaluation(&record);
        Ok(is_best)
    }

    /// Writes a sample of the model's text.
    fn sample(&mut self, session: &mut Session, step: usize) -> Result {
        let with = self.evaluation_inputs.sample.as_ref();
        let with = with.expect("it was opened, since samples are asked for");
        let log = &self.decided.config.log;
        let wanted = Generation {
            max_tokens: log.sample_tokens,
            window: with.window,
            ends: with.tokenizer.end_of_text().into_iter().collect(),
            sampling: Sampling {
                temperature: 0.8,
                top_k: Some(40),
                top_p: 1.0,
                seed: self.decided.config.train.seed.wrapping_add(step as u64),
            },
            uses_cache: true,
        };
        let made =
            session
                .forward()?
                .generate(std::slice::from_ref(&with.prompt), &wanted, |_, _| {})?;
        let record = SampleRecord {
            step,
            prompt: log.sample_prompt.clone(),
            text: with.tokenizer.decode_after(&with.prompt, &made[0].tokens),
        };
        self.records.sample(&record);
        Ok(())
    }
}
