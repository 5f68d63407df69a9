//! Summarises the readings of a run, and the runs of a strategy.

use super::tenants::Tenants;
use planner::OtherProcess;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::BTreeSet;

/// A GPU's state at one moment.
#[derive(Clone, Debug)]
pub(super) struct GpuReading {
    pub(super) sm_clock_mhz: Option<u32>,
    pub(super) memory_clock_mhz: Option<u32>,
    pub(super) power_w: Option<u32>,
    pub(super) temperature_c: Option<u32>,
    /// Why clocks are below their limit, in NVML's words.
    pub(super) reasons: BTreeSet<String>,
}

/// A GPU's limits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) sm_clock_mhz: Option<u32>,
    pub(super) power_w: Option<u32>,
}

/// The state of a GPU during a run, or during all runs of a strategy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct GpuFigures {
    /// Clock of the multiprocessors, while the GPU was not idle.
    pub(crate) sm_clock_mhz: Option<Spread>,
    /// The highest possible clock.
    pub(crate) sm_clock_max_mhz: Option<u32>,
    /// Clock of the memory.
    pub(crate) memory_clock_mhz: Option<Spread>,
    /// Power drawn.
    pub(crate) power_w: Option<Spread>,
    /// The limit on power.
    pub(crate) power_limit_w: Option<u32>,
    /// The highest temperature.
    pub(crate) temperature_c_max: Option<u32>,
    /// Why clocks were below their limit, in NVML's words.
    pub(crate) throttle_reasons: BTreeSet<String>,
    /// Processes that used it before or after the run.
    pub(crate) other_processes: Vec<OtherProcess>,
    /// Memory in use before and after the run that no process owned.
    pub(crate) unowned_bytes: Option<u64>,
}

/// Values over time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Spread {
    pub(crate) min: u32,
    pub(crate) median: u32,
    pub(crate) max: u32,
}

impl Spread {
    /// None without values. The median of an even number of values is the larger of the two in the middle.
    fn new(values: impl IntoIterator<Item = u32>) -> Option<Spread> {
        let mut values: Vec<u32> = values.into_iter().collect();
        values.sort_unstable();
        Some(Spread {
            min: *values.first()?,
            median: values[values.len() / 2],
            max: *values.last()?,
        })
    }

    fn of_runs(runs: impl Iterator<Item = Spread> + Clone) -> Option<Spread> {
        Some(Spread {
            min: runs.clone().map(|run| run.min).min()?,
            median: Spread::new(runs.clone().map(|run| run.median))?.median,
            max: runs.map(|run| run.max).max()?,
        })
    }
}

impl GpuFigures {
    /// Summarises a run, from its readings and from who used the GPU before and after it.
    pub(super) fn new(limits: Limits, readings: &[GpuReading], tenants: &[Tenants]) -> GpuFigures {
        // An idle GPU has a low clock, which says nothing about the run.
        let is_busy = |reading: &&GpuReading| !reading.reasons.contains("gpu_idle");
        let mut counted: Vec<&GpuReading> = readings.iter().filter(is_busy).collect();
        if counted.is_empty() {
            counted = readings.iter().collect();
        }
        let of = |figure: fn(&GpuReading) -> Option<u32>| {
            Spread::new(counted.iter().filter_map(|reading| figure(reading)))
        };
        let reasons = counted.iter().flat_map(|reading| &reading.reasons);
        let unowned = tenants.iter().map(|tenants| tenants.unowned_bytes);
        GpuFigures {
            sm_clock_mhz: of(|reading| reading.sm_clock_mhz),
            sm_clock_max_mhz: limits.sm_clock_mhz,
            memory_clock_mhz: of(|reading| reading.memory_clock_mhz),
            power_w: of(|reading| reading.power_w),
            power_limit_w: limits.power_w,
            temperature_c_max: of(|reading| reading.temperature_c).map(|spread| spread.max),
            throttle_reasons: reasons.cloned().collect(),
            other_processes: largest(tenants.iter().flat_map(|tenants| &tenants.others)),
            // The smaller of both, because the memory of a process that has just ended may not be free yet.
            unowned_bytes: unowned.min().flatten(),
        }
    }

    /// Summarises all runs of a strategy; none without runs.
    pub(crate) fn of_runs(runs: &[&GpuFigures]) -> Option<GpuFigures> {
        let first = runs.first()?;
        let spread = |figure: fn(&GpuFigures) -> Option<Spread>| {
            Spread::of_runs(runs.iter().filter_map(move |run| figure(run)))
        };
        let reasons = runs.iter().flat_map(|run| &run.throttle_reasons);
        Some(GpuFigures {
            sm_clock_mhz: spread(|run| run.sm_clock_mhz),
            sm_clock_max_mhz: first.sm_clock_max_mhz,
            memory_clock_mhz: spread(|run| run.memory_clock_mhz),
            power_w: spread(|run| run.power_w),
            power_limit_w: runs.iter().filter_map(|run| run.power_limit_w).min(),
            temperature_c_max: runs.iter().filter_map(|run| run.temperature_c_max).max(),
            throttle_reasons: reasons.cloned().collect(),
            other_processes: largest(runs.iter().flat_map(|run| &run.other_processes)),
            unowned_bytes: runs.iter().filter_map(|run| run.unowned_bytes).max(),
        })
    }
}

/// Each process once, with the most that it held, those that held most first.
fn largest<'a>(processes: impl Iterator<Item = &'a OtherProcess>) -> Vec<OtherProcess> {
    let mut processes: Vec<OtherProcess> = processes.cloned().collect();
    processes.sort_by_key(|process| (process.pid, Reverse(process.bytes)));
    processes.dedup_by_key(|process| process.pid);
    processes.sort_by_key(|process| Reverse(process.bytes));
    processes
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// The figures of a run that has only a clock and reasons.
    pub(crate) fn run(sm_clock_mhz: u32, reasons: &[&str]) -> GpuFigures {
        let limits = Limits {
            sm_clock_mhz: Some(1980),
            power_w: Some(700),
        };
        GpuFigures::new(limits, &[reading(sm_clock_mhz, reasons)], &[])
    }

    fn reading(sm_clock_mhz: u32, reasons: &[&str]) -> GpuReading {
        GpuReading {
            sm_clock_mhz: Some(sm_clock_mhz),
            memory_clock_mhz: None,
            power_w: Some(sm_clock_mhz / 3),
            temperature_c: Some(60),
            reasons: reasons.iter().map(|word| word.to_string()).collect(),
        }
    }

    fn tenants(bytes: u64, unowned_bytes: Option<u64>) -> Tenants {
        let process = OtherProcess {
            pid: 7,
            name: "python".into(),
            bytes: Some(bytes),
        };
        Tenants {
            others: vec![process],
            shows_this_process: false,
            unowned_bytes,
        }
    }

    #[test]
    fn an_idle_gpu_does_not_count() {
        let limits = Limits {
            sm_clock_mhz: None,
            power_w: None,
        };
        let idle = reading(345, &["gpu_idle"]);
        let busy = |clock| reading(clock, &["sw_power_cap"]);
        let figures = |readings: &[GpuReading]| GpuFigures::new(limits, readings, &[]);
        let run = figures(&[
            idle.clone(),
            busy(1980),
            busy(1500),
            busy(1700),
            idle.clone(),
        ]);
        let clocks = Spread {
            min: 1500,
            median: 1700,
            max: 1980,
        };
        assert_eq!(run.sm_clock_mhz, Some(clocks));
        assert_eq!(run.memory_clock_mhz, None);
        assert_eq!(run.throttle_reasons, ["sw_power_cap".to_string()].into());
        assert_eq!(figures(&[idle]).sm_clock_mhz.unwrap().max, 345);
        assert_eq!(figures(&[]).sm_clock_mhz, None);
    }

    #[test]
    fn a_process_counts_once_and_a_leak_before_and_after() {
        let limits = Limits {
            sm_clock_mhz: None,
            power_w: None,
        };
        let both = [tenants(10, Some(5)), tenants(30, Some(90))];
        let run = GpuFigures::new(limits, &[], &both);
        assert_eq!(run.other_processes, tenants(30, None).others);
        assert_eq!(run.unowned_bytes, Some(5));
        let known_once = [tenants(10, Some(5)), tenants(10, None)];
        let unknown = GpuFigures::new(limits, &[], &known_once);
        assert_eq!(unknown.unowned_bytes, None);
        let of_runs = GpuFigures::of_runs(&[&run, &unknown]).unwrap();
        assert_eq!(of_runs.unowned_bytes, Some(5));
        assert_eq!(of_runs.other_processes, run.other_processes);
    }

    #[test]
    fn runs_are_put_together() {
        let runs = [
            run(1980, &[]),
            run(1200, &["hw_slowdown"]),
            run(1900, &["sw_power_cap"]),
        ];
        let all = GpuFigures::of_runs(&runs.each_ref()).unwrap();
        let clocks = Spread {
            min: 1200,
            median: 1900,
            max: 1980,
        };
        assert_eq!(all.sm_clock_mhz, Some(clocks));
        assert_eq!(all.power_w.unwrap().max, 660);
        let reasons: Vec<&str> = all.throttle_reasons.iter().map(String::as_str).collect();
        assert_eq!(reasons, ["hw_slowdown", "sw_power_cap"]);
        assert_eq!(GpuFigures::of_runs(&[]), None);
    }
}
