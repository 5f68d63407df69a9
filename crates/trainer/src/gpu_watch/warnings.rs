//! Warns of conditions that distort measurements on a GPU.

use super::GpuFigures;
use planner::{NOTABLE_BYTES, OtherProcess, unowned};
use std::collections::BTreeMap;

/// A clock has fallen if it is below this share of the first run's.
const FALLEN: f64 = 0.95;

/// Reasons for low clocks that somebody has set, or that mean nothing.
const HARMLESS: [&str; 2] = ["gpu_idle", "applications_clocks_setting"];

/// Warnings about the runs of a matrix. `runs` are in the order in which they were made, each with its strategy.
pub(crate) fn warnings(runs: &[(&str, &GpuFigures)]) -> Vec<String> {
    let mut warnings = fallen_clocks(runs);
    warnings.extend(held_back(runs));
    let figures: Vec<&GpuFigures> = runs.iter().map(|(_, figures)| *figures).collect();
    let Some(all) = GpuFigures::of_runs(&figures) else {
        return warnings;
    };
    if !all.other_processes.is_empty() {
        let others: Vec<String> = all
            .other_processes
            .iter()
            .map(OtherProcess::describe)
            .collect();
        warnings.push(format!(
            "other processes are on the GPU: {}; speeds are those of a GPU that is shared",
            others.join(", ")
        ));
    }
    let unowned_bytes = all.unowned_bytes.filter(|bytes| *bytes >= NOTABLE_BYTES);
    warnings.extend(unowned_bytes.map(unowned));
    warnings
}

/// Warnings for strategies with a run whose clock is below that of the first run, with the slowest run of each.
fn fallen_clocks(runs: &[(&str, &GpuFigures)]) -> Vec<String> {
    let clock = |figures: &GpuFigures| Some(figures.sm_clock_mhz?.median);
    let Some(first) = runs.iter().find_map(|(_, figures)| clock(figures)) else {
        return Vec::new();
    };
    let mut slowest: BTreeMap<&str, u32> = BTreeMap::new();
    for (strategy, figures) in runs {
        let fallen = clock(figures).filter(|clock| f64::from(*clock) < FALLEN * f64::from(first));
        if let Some(fallen) = fallen {
            let least = slowest.entry(strategy).or_insert(fallen);
            *least = fallen.min(*least);
        }
    }
    let warnings = slowest.iter().map(|(strategy, clock)| {
        format!(
            "the clock fell in {strategy}: a median of {clock} MHz, and {first} in the first run; its speed does not \
             compare with the others: let the GPU cool down, or lock its clocks (nvidia-smi --lock-gpu-clocks), and \
             measure again"
        )
    });
    warnings.collect()
}

/// Each reason for low clocks, with the strategies in whose runs it occurred.
fn held_back(runs: &[(&str, &GpuFigures)]) -> Vec<String> {
    let mut strategies: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (strategy, figures) in runs {
        let reasons = figures.throttle_reasons.iter().map(String::as_str);
        for reason in reasons.filter(|reason| !HARMLESS.contains(reason)) {
            let of_reason = strategies.entry(reason).or_default();
            if !of_reason.contains(strategy) {
                of_reason.push(strategy);
            }
        }
    }
    let warnings = strategies.iter().map(|(reason, strategies)| {
        format!(
            "clocks were held back by {reason} in {}: nvidia-smi -q -d PERFORMANCE,POWER,TEMPERATURE tells more",
            strategies.join("; ")
        )
    });
    warnings.collect()
}

#[cfg(test)]
mod tests {
    use super::super::figures::tests::run;
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn a_gpu_that_does_what_it_should_is_not_spoken_of() {
        assert_eq!(warnings(&[]), [""; 0]);
        let first = run(1980, &["applications_clocks_setting"]);
        let later = run(1881, &["gpu_idle"]);
        let few = GpuFigures {
            unowned_bytes: Some(NOTABLE_BYTES - 1),
            ..later.clone()
        };
        assert_eq!(
            warnings(&[("none", &first), ("full", &later), ("mlp", &few)]),
            [""; 0]
        );
    }

    #[test]
    fn clocks_below_those_of_the_first_run_are_said_once_a_strategy() {
        let clocks = |clock| run(clock, &[]);
        let [first, fallen, lowest] = [1980, 1880, 1000].map(clocks);
        let runs = [
            ("none", &first),
            ("full", &fallen),
            ("none", &first),
            ("full", &lowest),
        ];
        let said = warnings(&runs);
        assert_eq!(said.len(), 1, "{said:?}");
        let words = "fell in full: a median of 1000 MHz, and 1980 in";
        assert!(said[0].contains(words), "{said:?}");
    }

    #[test]
    fn what_holds_clocks_back_is_said_with_all_its_strategies() {
        let free = run(1980, &[]);
        let capped = run(1980, &["sw_power_cap"]);
        let runs = [
            ("none", &capped),
            ("a,b", &capped),
            ("full", &free),
            ("none", &capped),
        ];
        let said = warnings(&runs);
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(
            said[0].contains("by sw_power_cap in none; a,b: "),
            "{said:?}"
        );
    }

    #[test]
    fn who_else_is_on_the_gpu_is_said() {
        let python = OtherProcess {
            pid: 42,
            name: "python".into(),
            bytes: Some(2 * GIB),
        };
        let shared = GpuFigures {
            other_processes: vec![python],
            unowned_bytes: Some(GIB),
            ..run(1980, &[])
        };
        let said = warnings(&[("none", &shared), ("full", &shared)]);
        assert_eq!(said.len(), 2, "{said:?}");
        assert!(
            said[0].contains("`python` (pid 42), which holds 2.00 GiB"),
            "{said:?}"
        );
        assert!(said[1].starts_with("1.00 GiB of the GPU"), "{said:?}");
    }
}
