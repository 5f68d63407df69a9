//! What offload moves, and whether that hides behind computation.

use crate::on_paper::{Paper, UTILISATION};
use kernels::Target;
use kernels::timeline::Measured;
use serde::Serialize;
use session::SessionError;
use settings::{Settings, Window};

/// What offload costs in time: a step on shapes, in the order in which its queues would run it, at given rates.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlannedOffload {
    /// Optimizer states that cross in a step, each way.
    pub optimizer_bytes: u64,
    /// Activations that cross in a step, each way.
    pub activation_bytes: u64,
    /// The rate from the host to the device, in units of 10^9 bytes a second.
    pub h2d_gbps: f64,
    /// The rate from the device to the host.
    pub d2h_gbps: f64,
    /// The rate of both at a time, added up.
    pub both_ways_gbps: f64,
    /// The rate that matrix products are taken to run at, in units of 10^12 operations a second; what moves more bytes than
    /// that takes the time of its bytes in the device's memory.
    pub assumed_tflops: f64,
    /// A step at that rate, replays and updates included, if copies took no time.
    pub compute_ms: f64,
    /// What copies add to it.
    pub exposed_ms: f64,
    /// Tokens in a micro-batch from which its forward pass takes as long as the copies of optimizer states behind it, and
    /// of what else goes the same way; null where more tokens do not help. What the first part of the model waits for is
    /// exposed even then.
    pub hidden_from_tokens: Option<u64>,
}

impl PlannedOffload {
    /// Counts with the bytes of the optimizer in a step and of activations in a micro-batch. None if nothing is offloaded, or to
    /// the CPU's own memory, where offload is for tests.
    ///
    /// # Errors
    /// None but a defect: shapes need no memory.
    pub(crate) fn new(
        settings: &Settings,
        target: Target,
        optimizer_bytes: u64,
        of_micro_batch: u64,
        flops_per_token: u64,
    ) -> Result<Option<PlannedOffload>, SessionError> {
        let activation_bytes = of_micro_batch * settings.accum as u64;
        if target == Target::Cpu || optimizer_bytes + activation_bytes == 0 {
            return Ok(None);
        }
        let paper = Paper::new(settings, target, Measured::new());
        let (rates, step) = (paper.rates, paper.step(settings)?);
        let mut offload = PlannedOffload {
            optimizer_bytes,
            activation_bytes,
            h2d_gbps: rates.upload / 1e9,
            d2h_gbps: rates.download / 1e9,
            both_ways_gbps: rates.both_ways / 1e9,
            assumed_tflops: rates.flops / 1e12,
            compute_ms: 1e3 * step.computing,
            exposed_ms: 1e3 * (step.seconds - step.computing).max(0.0),
            hidden_from_tokens: None,
        };
        let window = settings.offload.as_ref().map(|offload| offload.window);
        if optimizer_bytes > 0 && window == Some(Window::Forward) {
            let micro_tokens = (settings.micro_batch * settings.seq) as f64;
            let forward = flops_per_token as f64 / 3.0 / rates.flops;
            let out = of_micro_batch as f64 / micro_tokens / rates.download;
            let states = optimizer_bytes as f64 / (rates.both_ways / 2.0);
            let tokens = states / (forward - out);
            offload.hidden_from_tokens = (forward > out).then_some(tokens.ceil() as u64);
        }
        Ok(Some(offload))
    }

    /// What does not hide, over what the step takes else.
    pub(crate) fn exposed_fraction(&self) -> f64 {
        self.exposed_ms / self.compute_ms
    }

    /// The same in words.
    pub(crate) fn note(&self) -> String {
        let rates = format!(
            "at {} GB/s to the device, {} GB/s back, {} GB/s both ways at once and {:.0} % of {:.0} TFLOP/s (hardware.* \
             replaces these)",
            self.h2d_gbps,
            self.d2h_gbps,
            self.both_ways_gbps,
            100.0 * UTILISATION,
            self.assumed_tflops / UTILISATION
        );
        let bytes = self.optimizer_bytes + self.activation_bytes;
        let bytes = memory::format_bytes(bytes);
        let (exposed, compute) = (self.exposed_ms, self.compute_ms);
        let share = 100.0 * self.exposed_fraction();
        let mut note = if exposed == 0.0 {
            format!(
                "offload moves {bytes} each way a step, all of it behind {compute:.0} ms of computation; {rates}"
            )
        } else {
            format!(
                "offload moves {bytes} each way a step, of which {exposed:.0} ms do not hide behind {compute:.0} ms of \
                 computation ({share:.0} %); {rates}"
            )
        };
        match self.hidden_from_tokens {
            Some(tokens) => {
                note += &format!(
                    "; optimizer states hide behind the forward pass of a micro-batch of {tokens} tokens or more"
                )
            }
            None if self.optimizer_bytes > 0 => {
                note += "; with offload.window=end the update waits for its states, however many tokens there are";
            }
            None if exposed > 0.0 => {
                note += "; activations grow with the tokens, so more of them do not help: offload fewer labels";
            }
            None => {}
        }
        note
    }
}
