//! The `profile` command: the times of a step's operations, beside the shortest times that the device allows.

use crate::commands::doctor::{DeviceRates, RateWork};
use crate::decisions;
use crate::device::{DeviceStep, OpenDevice};
use crate::failure::Result;
use crate::gpu_watch::{GpuFigures, watched};
use crate::limits::{limit, refuse_without_room};
use crate::stdout::{print, print_json};
use crate::tracer::{Tracer, trace_folder};
use data::{MicroBatch, StepBatch};
use kernels::random::random_u32;
use kernels::timed::Timing;
use planner::{MeasuredFor, Plan};
use report::Align::{Left, Right};
use report::Table;
use serde::Serialize;
use session::{Session, shape_of_a_micro_batch};
use settings::{Completed, PerFamily, Settings};
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// Steps. The first one warms up; for each operation the best of the others counts.
const STEPS: usize = 4;

/// A step, operation by operation: the output of `profile --json`.
#[derive(Clone, Debug, Serialize)]
struct Profile {
    /// `cpu` or `cuda`.
    device: &'static str,
    /// Compute type.
    dtype: &'static str,
    /// The settings that decide the operations. The times hold for runs with the same settings (`--costs`).
    measured_for: MeasuredFor,
    /// Peak rate of matrix products that floors are computed with, in units of 10^12 operations a second:
    /// `hardware.peak_tflops`, or the data sheet's, or else the rate measured on large products.
    peak_tflops: f64,
    /// Bandwidth that floors are computed with, in units of 10^9 bytes a second: measured on large copies.
    bandwidth_gbps: f64,
    /// The sum of all operations' times.
    total_ms: f64,
    /// The sum of their floors.
    floor_ms: f64,
    /// Clocks and power of the GPU meanwhile, where NVML gives them.
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu: Option<GpuFigures>,
    /// The operations, longest first.
    operations: Vec<Operations>,
}

/// All operations of a step with the same name and sizes.
#[derive(Clone, Debug, Serialize)]
struct Operations {
    /// The name in `Kernels`.
    operation: &'static str,
    /// m, k, n of a product; dimensions of the first operand of others.
    sizes: Vec<usize>,
    /// Number of calls.
    calls: usize,
    /// Time of all calls; on the CPU each with the wait for its end.
    ms: f64,
    /// FLOPs of their products divided by the peak rate.
    flops_floor_ms: f64,
    /// Bytes of their operands divided by the bandwidth.
    bytes_floor_ms: f64,
}

impl Operations {
    /// The larger floor.
    fn floor_ms(&self) -> f64 {
        self.flops_floor_ms.max(self.bytes_floor_ms)
    }
}

/// Makes some steps and prints the times of their operations.
pub(crate) fn profile(command: &Completed) -> Result {
    let folder = trace_folder(command)?;
    let (resolved, device) = decisions::on_device(command, None, None, PerFamily::default())?;
    let step = device.step(Settings::new(&resolved.config)?)?;
    let plan = Plan::new(&step.settings, device.target())?;
    let limit = limit(&resolved.config, &device)?;
    refuse_without_room(&resolved.config, &plan, device.target(), limit)?;
    let rates = measure(&device, &step)?;
    let dtype = step.settings.dtype.as_str();
    let known = resolved.config.hardware.peak_tflops;
    let peak_tflops = known.or_else(|| device.peak_tflops(dtype));
    let mut tracer = Tracer::new(&device.memory());
    let (timed, gpu) = watched(resolved.device(), || {
        timed_steps(&device, &step, limit, plan.slab_bytes, &mut tracer)
    });
    let timed = timed?;
    let (peak_tflops, bandwidth_gbps) = (
        peak_tflops.unwrap_or(rates.gemm_tflops()),
        rates.copy_gbps(),
    );
    let operations = sum_up(&timed, peak_tflops, bandwidth_gbps);
    let profile = Profile {
        device: device.target().name(),
        dtype,
        measured_for: MeasuredFor::new(&step.settings, device.target()),
        peak_tflops,
        bandwidth_gbps,
        total_ms: operations.iter().map(|operation| operation.ms).sum(),
        floor_ms: operations.iter().map(Operations::floor_ms).sum(),
        gpu,
        operations,
    };
    match resolved.options.json {
        true => print_json(&profile)?,
        false => print(format_args!("{profile}"))?,
    }
    if let Some(folder) = folder {
        let device = resolved.device().to_string();
        let folder = tracer.write(&device, None, folder)?;
        tracing::info!("{} has pictures of a step", folder.display());
    }
    Ok(())
}

/// Measures the rates of large products and copies.
fn measure(device: &OpenDevice, step: &DeviceStep) -> Result<DeviceRates> {
    let memory = device.memory();
    let kernels = device.kernels(step, &memory)?;
    DeviceRates::measure(
        &*kernels,
        &memory,
        step.settings.dtype,
        RateWork::of(device.target()),
    )
}

/// The operations of each step except the first.
fn timed_steps(
    device: &OpenDevice,
    step: &DeviceStep,
    limit: Option<u64>,
    slab_bytes: u64,
    tracer: &mut Tracer,
) -> Result<Vec<Vec<Timing>>> {
    let memory = tracer.memory.clone();
    memory.set_limit(limit);
    let (settings, kernels) = (&step.settings, tracer.kernels(device, step)?);
    let mut session = Session::on_kernels(settings.clone(), &memory, kernels)?;
    session.initialise(settings.seed)?;
    memory.reserve_slab(slab_bytes)?;
    let batch = random_batch(settings);
    let steps = (0..STEPS).map(|_| {
        tracer.begin_step();
        session.step(&batch)?;
        Ok(tracer.timings.take())
    });
    let steps = steps.collect::<Result<Vec<_>>>()?;
    // Before the session is dropped and releases what lives across steps.
    tracer.stop();
    Ok(steps.into_iter().skip(1).collect())
}

/// A step of the run's shape, with pseudo-random tokens.
fn random_batch(settings: &Settings) -> StepBatch {
    let (rows, seq) = (settings.micro_batch, settings.seq);
    let vocab = settings.model.vocab as u32;
    let micro = |index: usize| {
        let token = |token: usize| (random_u32(index as u64, token as u64) % vocab) as i32;
        let tokens: Vec<i32> = (0..=rows * seq).map(token).collect();
        MicroBatch {
            input_ids: tokens[..rows * seq].to_vec(),
            targets: tokens[1..].to_vec(),
            rows,
            seq,
            part: memory::Rank::ALONE,
            documents: None,
            lengths: None,
            beside: shape_of_a_micro_batch(settings, rows, seq).beside,
        }
    };
    let step: StepBatch = (0..settings.accum).map(micro).collect();
    step.in_parts(settings.own_parts())
}

/// Takes each operation's best time, and adds up operations with the same name and sizes.
fn sum_up(steps: &[Vec<Timing>], peak_tflops: f64, bandwidth_gbps: f64) -> Vec<Operations> {
    let mut sums = BTreeMap::new();
    for (index, first) in steps[0].iter().enumerate() {
        let times = steps.iter().map(|step| step[index].time);
        let best = times.min().unwrap_or(Duration::ZERO);
        let key = (first.operation, first.sizes.clone());
        let sum = sums.entry(key).or_insert_with(|| Operations {
            operation: first.operation,
            sizes: first.sizes.clone(),
            calls: 0,
            ms: 0.0,
            flops_floor_ms: 0.0,
            bytes_floor_ms: 0.0,
        });
        sum.calls += 1;
        sum.ms += 1e3 * best.as_secs_f64();
        sum.flops_floor_ms += first.cost.flops as f64 / peak_tflops / 1e9;
        sum.bytes_floor_ms += first.cost.bytes as f64 / bandwidth_gbps / 1e6;
    }
    let mut operations: Vec<Operations> = sums.into_values().collect();
    operations.sort_by(|a, b| b.ms.total_cmp(&a.ms));
    operations
}

impl fmt::Display for Profile {
    #[rustfmt::skip]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sizes = |operation: &Operations| {
            let sizes: Vec<String> = operation.sizes.iter().map(ToString::to_string).collect();
            sizes.join(" x ")
        };
        let share = |operation: &Operations| 100.0 * operation.ms / self.total_ms;
        let floors = |operation: &Operations| operation.ms / operation.floor_ms();
        let table = Table::of_items(&self.operations, &[
            ("operation", Left, &|one| one.operation.to_string()),
            ("sizes", Left, &sizes),
            ("calls", Right, &|one| one.calls.to_string()),
            ("ms", Right, &|one| format!("{:.3}", one.ms)),
            ("share", Right, &|one| format!("{:.1} %", share(one))),
            ("by FLOPs", Right, &|one| format!("{:.3}", one.flops_floor_ms)),
            ("by bytes", Right, &|one| format!("{:.3}", one.bytes_floor_ms)),
            ("times its floor", Right, &|one| format!("{:.2}", floors(one))),
        ]);
        writeln!(
            f,
            "a step on {} in {}, each operation waited for: {:.1} ms, of which {:.1} at the least; {:.3} TFLOP/s, {:.1} \
             GB/s\n",
            self.device,
            self.dtype,
            self.total_ms,
            self.floor_ms,
            self.peak_tflops,
            self.bandwidth_gbps
        )?;
        let clock = self.gpu.as_ref().and_then(|gpu| gpu.sm_clock_mhz);
        if let Some(clock) = clock {
            writeln!(
                f,
                "clock {} MHz ({} to {})\n",
                clock.median, clock.min, clock.max
            )?;
        }
        write!(f, "{table}")
    }
}
