//! What offload moves, and whether that hides behind computation.

use crate::offload::Window;
use crate::settings::Settings;
use kernels::Target;
use serde::Serialize;

/// What offload costs in time, by arithmetic on bytes and rates.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlannedOffload {
    /// Optimizer states that cross in a step, each way.
    pub optimizer_bytes: u64,
    /// Activations that cross in a step, each way.
    pub activation_bytes: u64,
    /// From the host to the device, in units of 10^9 bytes a second.
    pub h2d_gbps: f64,
    /// From the device to the host.
    pub d2h_gbps: f64,
    /// The rate that forward and backward are taken to run at, in units of 10^12 operations a second.
    pub assumed_tflops: f64,
    /// Forward and backward of a step at that rate.
    pub compute_ms: f64,
    /// What does not hide behind them.
    pub exposed_ms: f64,
    /// Tokens in a micro-batch from which optimizer states hide behind its forward pass; null where more tokens do not
    /// help.
    pub hidden_from_tokens: Option<u64>,
}

/// A PCIe Gen5 slot with 16 lanes, pinned memory: measured on H100 hosts.
const GBPS: f64 = 55.0;

/// H100 and H200 by data sheet, dense bf16.
const PEAK_TFLOPS: f64 = 989.0;

/// The share of the peak that training reaches.
const UTILISATION: f64 = 0.5;

impl PlannedOffload {
    /// From the bytes of the optimizer in a step and of activations in a micro-batch. None if nothing is offloaded, or to the CPU's own memory, where offload is for tests.
    pub(super) fn new(
        settings: &Settings,
        target: Target,
        optimizer_bytes: u64,
        of_micro_batch: u64,
        flops_per_token: u64,
    ) -> Option<PlannedOffload> {
        let activation_bytes = of_micro_batch * settings.accum as u64;
        if target == Target::Cpu || optimizer_bytes + activation_bytes == 0 {
            return None;
        }
        let hardware = &settings.hardware;
        let h2d_gbps = hardware.h2d_gbps.unwrap_or(GBPS);
        let d2h_gbps = hardware.d2h_gbps.unwrap_or(GBPS);
        let assumed_tflops = hardware.peak_tflops.unwrap_or(PEAK_TFLOPS) * UTILISATION;
        let milliseconds = |bytes: u64, gbps: f64| bytes as f64 / gbps / 1e6;
        let forward_ms = |tokens: f64| tokens * flops_per_token as f64 / 3.0 / assumed_tflops / 1e9;
        let micro_tokens = (settings.micro_batch * settings.seq) as f64;
        let forward = forward_ms(micro_tokens);

        let optimizer = milliseconds(optimizer_bytes, h2d_gbps.min(d2h_gbps));
        let window = settings.offload.as_ref().map(|offload| offload.window);
        let out = milliseconds(of_micro_batch, d2h_gbps);
        let back = milliseconds(of_micro_batch, h2d_gbps);
        let exposed = |copies: f64, behind: f64| (copies - behind).max(0.0);
        let activations = exposed(out, forward) + exposed(back, 2.0 * forward);
        let first = match window {
            // In the first micro-batch states go back in the queue in which activations leave.
            Some(Window::Forward) => {
                exposed(optimizer + out, forward) + exposed(back, 2.0 * forward)
            }
            _ => optimizer + activations,
        };
        let helps = optimizer_bytes > 0 && window == Some(Window::Forward);
        Some(PlannedOffload {
            optimizer_bytes,
            activation_bytes,
            h2d_gbps,
            d2h_gbps,
            assumed_tflops,
            compute_ms: 3.0 * forward * settings.accum as f64,
            exposed_ms: first + activations * (settings.accum - 1) as f64,
            hidden_from_tokens: helps.then(|| (optimizer / forward_ms(1.0)).ceil() as u64),
        })
    }

    /// What does not hide, over forward and backward.
    pub(crate) fn exposed_fraction(&self) -> f64 {
        self.exposed_ms / self.compute_ms
    }

    /// The same in words.
    pub(super) fn note(&self) -> String {
        let rates = format!(
            "at {} GB/s to the device, {} GB/s back and {:.0} % of {:.0} TFLOP/s (hardware.* replaces these)",
            self.h2d_gbps,
            self.d2h_gbps,
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
