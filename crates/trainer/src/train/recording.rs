//! The records that a run writes of its steps.

use super::Run;
use super::totals::StepInputs;
use crate::failure::Result;
use crate::job::long_wait;
use kernels::cuda::KernelKind;
use memory::GRANULARITY_BYTES;
use model::UnderflowShare;
use report::{
    METRICS_SCHEMA_VERSION, PolicyMarks, ProcessRecord, RewardMarks, RouterMarks, RunRecord,
    StepRecord, Timing, UnderflowMarks, resident_bytes,
};
use session::{Rewards, StepOutcome};
use std::time::Duration;

impl Run {
    /// Writes down a step that is done, if there is one, and ends a run that has been skipping steps for too long.
    pub(super) fn record(&mut self, finished: Option<StepOutcome>) -> Result {
        let Some(outcome) = finished else {
            return Ok(());
        };
        let elapsed = self.made.lap(outcome.done_at);
        let asked = self.asked.pop_front().unwrap_or_default();
        let planned_peak_bytes = self.peaks.of_step(&asked.own_lengths)?;
        let record = self.step_record(&outcome, elapsed, &asked, planned_peak_bytes);
        self.records.step(&record, asked.own_targets);
        self.made.add(&outcome, asked.tokens, elapsed);
        self.device.wait_at_least(long_wait(elapsed.as_secs_f64()));
        let marks = outcome.memory.device;
        let in_use = marks.map(|marks| marks.device_total_used_bytes);
        for sentence in self.records.growth.note(resident_bytes(), in_use) {
            tracing::warn!("{sentence}");
        }
        self.say_collapse(&outcome);
        if !outcome.is_finite() {
            let (step, loss, norm) = (outcome.step, outcome.loss, outcome.grad_norm);
            tracing::warn!("step {step} was skipped: loss {loss}, gradient norm {norm}");
        }
        if self.made.skipped_in_a_row > self.decided.config.train.max_skipped {
            return Err(self.diverged(&outcome));
        }
        Ok(())
    }

    /// Says once that a router sends nearly all tokens to the same experts: the others learn nothing.
    fn say_collapse(&mut self, outcome: &StepOutcome) {
        let model = &self.decided.config.model;
        let (Some(experts), Some(choices)) = (&model.experts, &outcome.router_choices) else {
            return;
        };
        // An expert cannot be chosen more often than by every token.
        let most = experts.count as f64 / experts.chosen as f64;
        let collapsed = choices
            .max_over_mean()
            .iter()
            .position(|load| *load > 0.95 * most);
        let mut layers = (0..model.layers).filter(|layer| model.has_experts(*layer));
        let layer = collapsed.and_then(|router| layers.nth(router));
        if let Some(layer) = layer.filter(|_| most >= 2.0 && !self.records.said_collapse) {
            self.records.said_collapse = true;
            tracing::warn!(
                "step {}: the router of layer {layer} sends nearly every token to the same expert, so the others learn little. \
                 Raise model.router_aux, or optim.router_bias_rate where choices have a bias; \
                 `expert_load_max_over_mean` in metrics.jsonl shows every layer",
                outcome.step
            );
        }
    }

    fn step_record(
        &self,
        outcome: &StepOutcome,
        elapsed: Duration,
        asked: &StepInputs,
        planned_peak_bytes: u64,
    ) -> StepRecord {
        let config = &self.decided.config;
        let known_peak = || self.device.peak_tflops(self.plan.dtype);
        let peak_tflops = config.hardware.peak_tflops.or_else(known_peak);
        let of_all = |peak: f64| peak * self.job.size() as f64;
        let flops = (self.plan.flops_per_token, peak_tflops.map(of_all));
        StepRecord {
            sent_bytes: self.plan.ranks.as_ref().map(|_| outcome.traffic.sent_bytes),
            ..step_record(outcome, (elapsed, asked), planned_peak_bytes, flops)
        }
    }

    pub(super) fn run_record(&self) -> RunRecord {
        let kinds = self.device.kernel_kinds();
        RunRecord {
            schema_version: METRICS_SCHEMA_VERSION,
            version: env!("CARGO_PKG_VERSION"),
            device: self.decided.device().to_string(),
            dtype: self.plan.dtype,
            attention: self.plan.attention.name(),
            model: self.decided.name.clone(),
            parameters: self.plan.parameters,
            flops_per_token: self.plan.flops_per_token,
            granularity_bytes: GRANULARITY_BYTES,
            untracked_host_bytes_max: self.device.untracked_host_bytes_max()
                + self.plan.host_beside_bytes(),
            algorithms: self.plan.algorithms.clone(),
            attention_kernels: kinds.taken.attention.map(KernelKind::name),
            experts_kernels: kinds.taken.experts.map(KernelKind::name),
            kernels_given_up: kinds.reason(),
            graphs: self.plan.graphs,
            graphs_off: self.plan.graphs_off,
            process: ProcessRecord::current(),
        }
    }
}

/// The record of a step of one process. The last two are the model's FLOPs for one token, and the device's peak in units of 10^12, if it is
/// known.
pub(crate) fn step_record(
    outcome: &StepOutcome,
    (elapsed, asked): (Duration, &StepInputs),
    planned_peak_bytes: u64,
    (flops_per_token, peak_tflops): (u64, Option<f64>),
) -> StepRecord {
    let (memory, traffic) = (&outcome.memory, &outcome.traffic);
    StepRecord {
        step: outcome.step,
        loss: outcome.loss,
        grad_norm: outcome.grad_norm,
        finite: outcome.is_finite(),
        lr: outcome.lr as f32,
        lr_matrices: outcome.lr_matrices.map(|rate| rate as f32),
        routers: router_marks(outcome),
        fp8_underflows: underflow_marks(outcome),
        rewards: outcome.rewards.map(reward_marks),
        policy: outcome.policy.map(|numbers| PolicyMarks {
            policy_kl: numbers.kl,
            policy_clip_share: numbers.clip_share,
        }),
        epoch: asked.epoch,
        tokens: outcome.targets,
        timing: Timing::new(
            elapsed,
            asked.data_wait,
            &memory.phase_time.read(),
            asked.tokens,
            flops_per_token,
            peak_tflops,
        ),
        peak_bytes: memory.peak.bytes,
        planned_peak_bytes,
        peak_by_category: memory.peak.by_category,
        peak_phase: memory.peak.place.phase,
        peak_layer: memory.peak.place.layer,
        phase_peak_bytes: memory.phase_peaks,
        slab_bytes: memory.slab_bytes,
        host_pinned_bytes: memory.host_pinned_bytes,
        replayed: outcome.replayed.clone(),
        h2d_bytes: traffic.h2d_bytes,
        d2h_bytes: traffic.d2h_bytes,
        disk_read_bytes: traffic.disk_read_bytes,
        disk_written_bytes: traffic.disk_written_bytes,
        sent_bytes: None,
        device: memory.device,
    }
}

fn reward_marks(rewards: Rewards) -> RewardMarks {
    RewardMarks {
        rewards_chosen: rewards.chosen,
        rewards_rejected: rewards.rejected,
        rewards_margin: rewards.margin,
        rewards_accuracy: rewards.accuracy,
    }
}

/// Of each operand in FP8, the block where the largest share underflowed.
fn underflow_marks(outcome: &StepOutcome) -> Vec<UnderflowMarks> {
    let mut marks: Vec<UnderflowMarks> = Vec::new();
    for UnderflowShare { site, share } in &outcome.fp8_underflows {
        let of_block = UnderflowMarks {
            layer: site.layer.name(),
            operand: site.operand.name(),
            share: (share * 1e6).round() / 1e6,
            block: site.block,
        };
        let names = |mark: &UnderflowMarks| (mark.layer, mark.operand);
        let mut others = marks.iter_mut();
        match others.find(|mark| names(mark) == names(&of_block)) {
            Some(largest) if largest.share < of_block.share => *largest = of_block,
            Some(_) => {}
            None => marks.push(of_block),
        }
    }
    marks
}

/// What the routers of a step did, if the model has some.
fn router_marks(outcome: &StepOutcome) -> Option<RouterMarks> {
    let choices = outcome.router_choices.as_ref()?;
    let rounded = |numbers: Vec<f64>| {
        let four = |number: f64| (number * 1e4).round() / 1e4;
        numbers.into_iter().map(four).collect()
    };
    Some(RouterMarks {
        router_aux: outcome.router_losses.map(|[aux, _]| aux),
        router_z_loss: outcome.router_losses.map(|[_, z]| z),
        expert_load_max_over_mean: rounded(choices.max_over_mean()),
        expert_load_entropy: rounded(choices.entropy()),
    })
}
