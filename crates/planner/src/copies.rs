//! What offload copies, and whether the copies hide behind computation.

use crate::on_paper::Paper;
use crate::rates::UTILISATION;
use crate::traffic::Crossing;
use kernels::{StepTraffic, Target, Traffic};
use memory::{Home, Homes, UpdateTime, Window, format_bytes};
use serde::Serialize;
use session::Result;
use settings::Settings;

/// The time that offload costs: a step on shapes at given rates, with the queues in the order of a real run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlannedOffload {
    /// Bytes that cross for the update in a step, each way: optimizer states, and offloaded gradients.
    pub optimizer_bytes: u64,
    /// Activations that cross in a step, each way.
    pub activation_bytes: u64,
    /// All bytes that cross in a step, by purpose.
    pub crossing: Crossing,
    /// The rate from the host to the device, in units of 10^9 bytes a second.
    pub h2d_gbps: f64,
    /// The rate from the device to the host.
    pub d2h_gbps: f64,
    /// The sum of the rates of both directions while both are busy.
    pub both_ways_gbps: f64,
    /// The rate of the disk, reads and writes together; null if nothing is on a disk.
    pub disk_gbps: Option<f64>,
    /// The assumed rate of matrix products, in units of 10^12 operations a second. Operations that are limited by bytes
    /// take the time of their bytes in the device's memory.
    pub assumed_tflops: f64,
    /// The time of a step at these rates if copies took no time, replays and updates included.
    pub compute_ms: f64,
    /// The time that copies add to it.
    pub exposed_ms: f64,
    /// Tokens a second, copies included.
    pub tokens_per_s: f64,
    /// The tokens of a micro-batch from which its forward pass takes as long as the copies of optimizer states, and of
    /// what else goes the same way. Null if more tokens do not help, or if more than states lives elsewhere. Even then,
    /// the wait of the model's first part stays exposed.
    pub hidden_from_tokens: Option<u64>,
}

impl PlannedOffload {
    /// `crossed` is what crosses in a step, `of_micro_batch` the offloaded activations of a micro-batch. None if
    /// nothing is offloaded, and on the CPU without a given rate: there, offload is only for tests.
    ///
    /// # Errors
    /// Only on a defect: shapes need no memory.
    pub(crate) fn new(
        settings: &Settings,
        target: Target,
        crossed: StepTraffic,
        of_micro_batch: u64,
        forward_flops_per_token: u64,
    ) -> Result<Option<PlannedOffload>> {
        let activation_bytes = of_micro_batch * settings.accum as u64;
        let offloads = settings.homes.streams_updates() || activation_bytes > 0;
        let is_known = target == Target::Cuda || settings.hardware.h2d_gbps.is_some();
        if !(offloads && is_known) {
            return Ok(None);
        }
        let paper = Paper::at_rates(settings, target);
        let (rates, step) = (paper.rates, paper.step(settings)?);
        let optimizer_bytes = crossed.update.h2d_bytes.max(crossed.update.d2h_bytes);
        let is_on_disk = matches!(settings.homes.states, Home::Disk(_));
        let mut offload = PlannedOffload {
            optimizer_bytes,
            activation_bytes,
            crossing: crossed.into(),
            h2d_gbps: rates.upload / 1e9,
            d2h_gbps: rates.download / 1e9,
            both_ways_gbps: rates.both_ways / 1e9,
            disk_gbps: is_on_disk.then_some(rates.disk / 1e9),
            assumed_tflops: rates.flops / 1e12,
            compute_ms: 1e3 * step.computing,
            exposed_ms: 1e3 * (step.seconds - step.computing).max(0.0),
            tokens_per_s: settings.tokens_a_step() as f64 / step.seconds,
            hidden_from_tokens: None,
        };
        if hides_states_behind_tokens(&settings.homes) {
            let micro_tokens = (settings.micro_batch * settings.own_seq()) as f64;
            let forward = forward_flops_per_token as f64 / rates.flops;
            let out = of_micro_batch as f64 / micro_tokens / rates.download;
            let states = optimizer_bytes as f64 / (rates.both_ways / 2.0);
            let tokens = states / (forward - out);
            offload.hidden_from_tokens = (forward > out).then_some(tokens.ceil() as u64);
        }
        Ok(Some(offload))
    }

    /// The time of copies that is not hidden, as a share of the rest of the step.
    pub(crate) fn exposed_fraction(&self) -> f64 {
        self.exposed_ms / self.compute_ms
    }

    /// The plan in words, for a step in which `traffic` crosses.
    pub(crate) fn note(&self, homes: &Homes, traffic: Traffic) -> String {
        let (exposed, compute) = (self.exposed_ms, self.compute_ms);
        let share = 100.0 * self.exposed_fraction();
        let moved = moved(traffic);
        let mut note = if exposed == 0.0 {
            format!("{moved}, all of it behind {} of computation", time(compute))
        } else {
            format!(
                "{moved}, of which {} do not hide behind {} of computation ({share:.0} %)",
                time(exposed),
                time(compute)
            )
        };
        note += &format!(
            "; that is {:.0} tokens/s, planned; {}",
            self.tokens_per_s,
            self.rates()
        );
        let is_only_states = hides_states_behind_tokens(homes);
        match self.hidden_from_tokens {
            Some(tokens) => {
                note += &format!(
                    "; optimizer states hide behind the forward pass of a micro-batch of {tokens} tokens or more"
                )
            }
            None if homes.streams_updates() && homes.window == Window::End => {
                note += "; with offload.window=end the update waits for what it needs, however many tokens there are";
            }
            None if !homes.streams_updates() && exposed > 0.0 => {
                note += "; activations grow with the tokens, so more of them do not help: offload fewer labels";
            }
            None if !is_only_states && exposed > 0.0 => {
                note += "; weights, gradients and states cross however many tokens there are, so more tokens a step hide more of it";
            }
            None => {}
        }
        note
    }

    fn rates(&self) -> String {
        let disk = self.disk_gbps.map_or_else(String::new, |gbps| {
            format!(", {gbps} GB/s from and to the disk")
        });
        format!(
            "at {} GB/s to the device, {} GB/s back, {} GB/s both ways at once{disk} and {:.0} % of {:.0} TFLOP/s (hardware.* \
             replaces these)",
            self.h2d_gbps,
            self.d2h_gbps,
            self.both_ways_gbps,
            100.0 * UTILISATION,
            self.assumed_tflops / UTILISATION
        )
    }
}

/// Whether only optimizer states cross for updates, and do so from pinned memory during forward passes.
fn hides_states_behind_tokens(homes: &Homes) -> bool {
    homes.states == Home::Pinned
        && homes.weights == Home::Device
        && homes.gradients == Home::Device
        && homes.update_time() == UpdateTime::NextForward
}

/// A time in milliseconds or seconds, with about three digits.
fn time(ms: f64) -> String {
    match ms {
        ms if ms < 10.0 => format!("{ms:.2} ms"),
        ms if ms < 1e4 => format!("{ms:.0} ms"),
        ms => format!("{:.1} s", ms / 1e3),
    }
}

/// The bytes that a step copies, in words.
fn moved(traffic: Traffic) -> String {
    let [up, down] = [traffic.h2d_bytes, traffic.d2h_bytes].map(format_bytes);
    let mut moved = match up == down {
        true => format!("offload moves {up} each way a step"),
        false => format!("offload moves {up} to the device and {down} back a step"),
    };
    if traffic.disk_read_bytes + traffic.disk_written_bytes > 0 {
        let [read, written] =
            [traffic.disk_read_bytes, traffic.disk_written_bytes].map(format_bytes);
        moved += &format!(", reads {read} from the disk and writes {written}");
    }
    moved
}
