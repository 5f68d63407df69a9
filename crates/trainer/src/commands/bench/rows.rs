//! The rows of the table: what was planned and measured for each strategy, compared with the baseline of its model.

use super::journal::JournalEntry;
use super::matrix::BenchStrategy;
use super::measure::{Outcome, RunFigures, median};
use super::paper::PaperFigures;
use crate::decisions::Decided;
use crate::gpu_watch::GpuFigures;
use planner::Plan;
use serde::Serialize;

/// A strategy's row.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    /// The strategy's name.
    pub(crate) strategy: String,
    /// Its model, if the matrix has several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) model: Option<String>,
    /// The number of ranks, if it is planned for several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ranks: Option<usize>,
    /// Its settings, as `--set` takes them.
    pub(crate) set: Vec<String>,
    /// Its result.
    pub(crate) result: Outcome,
    /// Why there are no measurements.
    pub(crate) reason: Option<String>,
    /// The most live device bytes of a step, measured.
    pub(crate) peak_bytes: Option<u64>,
    /// The same, planned; none if the settings contradict each other.
    pub(crate) planned_peak_bytes: Option<u64>,
    /// Device bytes that the plan reserves.
    pub(crate) planned_reserved_bytes: Option<u64>,
    /// Pinned host memory, planned.
    pub(crate) planned_host_bytes: Option<u64>,
    /// Scratch files on the disk, planned.
    pub(crate) planned_disk_bytes: Option<u64>,
    /// Bytes that a rank sends to others in a step, planned; none for a single process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) planned_sent_bytes: Option<u64>,
    /// FLOPs of replays as a share of forward and backward, planned.
    pub(crate) recompute_flops_fraction: Option<f64>,
    /// By how much the planned peak is below the baseline's.
    pub(crate) saved_bytes: Option<i64>,
    /// Tokens a second: the median over rounds of the median over steps.
    pub(crate) tokens_per_s: Option<f64>,
    /// The difference between the fastest and the slowest round, divided by the median; none with a single round.
    pub(crate) spread: Option<f64>,
    /// Median time of a step.
    pub(crate) step_ms: Option<f64>,
    /// Model FLOPs in units of 10^12 a second.
    pub(crate) tflops: Option<f64>,
    /// Share of the device's peak.
    pub(crate) mfu: Option<f64>,
    /// Speed divided by the baseline's: the median over rounds of the quotient within a round.
    pub(crate) against_baseline: Option<f64>,
    /// Milliseconds that the baseline's step would gain at this speed, for each GiB saved; none if the speeds differ by no more
    /// than the larger spread.
    pub(crate) ms_per_gib_saved: Option<f64>,
    /// The strategy on paper, if the matrix asks for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) paper: Option<PaperFigures>,
    /// A strategy that needs no more memory, and is faster by more than the spread of both.
    pub(crate) dominated_by: Option<String>,
    /// Loss of the last step.
    pub(crate) loss: Option<f64>,
    /// The state of the GPU during its runs; none without NVML.
    pub(crate) gpu: Option<GpuFigures>,
}

/// What is known of a strategy before it is run.
pub(crate) struct Planned {
    pub(crate) strategy: BenchStrategy,
    /// Its configuration, as it was planned, so that its runs decide nothing anew; none if its settings contradict each other.
    pub(crate) decided: Option<Decided>,
    /// The plan; none if planning failed, as the obstacle says.
    pub(crate) plan: Option<Plan>,
    /// Its figures on paper, if the matrix asks for them.
    pub(crate) paper: Option<PaperFigures>,
    /// Why it is not run.
    pub(crate) obstacle: Option<(Outcome, String)>,
}

/// The rows of all strategies, in the matrix's order.
pub(crate) fn rows(planned: &[Planned], runs: &[JournalEntry], plan_only: bool) -> Vec<Row> {
    let mut rows: Vec<Row> = planned
        .iter()
        .map(|one| row(one, runs, plan_only))
        .collect();
    for index in 0..rows.len() {
        let baseline = rows
            .iter()
            .position(|other| other.model == rows[index].model);
        let baseline = baseline.expect("a row has its own model");
        compare(&mut rows, index, baseline, runs);
    }
    let dominators: Vec<Option<String>> = rows.iter().map(|row| dominator(row, &rows)).collect();
    for (row, dominated_by) in rows.iter_mut().zip(dominators) {
        row.dominated_by = dominated_by;
    }
    rows
}

fn row(planned: &Planned, runs: &[JournalEntry], plan_only: bool) -> Row {
    let Planned {
        strategy,
        plan,
        paper,
        obstacle,
        ..
    } = planned;
    let of_strategy: Vec<&JournalEntry> = runs
        .iter()
        .filter(|entry| entry.strategy == strategy.name)
        .collect();
    let unlucky = of_strategy.iter().find(|entry| entry.run.figures.is_none());
    let (result, reason) = match (obstacle, unlucky) {
        (Some((outcome, why)), _) => (*outcome, Some(why.clone())),
        (_, Some(entry)) => (entry.run.result, entry.run.reason.clone()),
        _ if of_strategy.is_empty() && !plan_only => {
            (Outcome::Skipped, Some("it was not reached".into()))
        }
        _ => (Outcome::Ok, None),
    };
    let figures: Vec<&RunFigures> = of_strategy
        .iter()
        .filter_map(|entry| entry.run.figures.as_ref())
        .collect();
    let of = |figure: fn(&RunFigures) -> Option<f64>| {
        median(figures.iter().filter_map(|one| figure(one)).collect())
    };
    let gpu: Vec<&GpuFigures> = of_strategy
        .iter()
        .filter_map(|entry| entry.run.gpu.as_ref())
        .collect();
    let speeds = || figures.iter().map(|figures| figures.tokens_per_s);
    let (most, least) = (
        speeds().fold(0.0, f64::max),
        speeds().fold(f64::INFINITY, f64::min),
    );
    let tokens_per_s = of(|figures| Some(figures.tokens_per_s));
    let plan = plan.as_ref();
    Row {
        strategy: strategy.name.clone(),
        model: strategy.config.clone(),
        ranks: plan.and_then(|plan| Some(plan.ranks.as_ref()?.ranks)),
        set: strategy.set.clone(),
        result,
        reason,
        peak_bytes: figures.iter().map(|figures| figures.peak_bytes).max(),
        planned_peak_bytes: plan.map(|plan| plan.peak_bytes),
        planned_reserved_bytes: plan.map(|plan| plan.reserved_bytes),
        planned_host_bytes: plan.map(|plan| plan.host_pinned_bytes),
        planned_disk_bytes: plan.map(|plan| plan.disk_bytes),
        planned_sent_bytes: plan.and_then(|plan| Some(plan.ranks.as_ref()?.sent_bytes)),
        recompute_flops_fraction: plan.map(|plan| plan.recompute_flops_fraction),
        saved_bytes: None,
        tokens_per_s,
        spread: tokens_per_s
            .filter(|_| figures.len() > 1)
            .map(|median| (most - least) / median),
        step_ms: of(|figures| Some(figures.step_ms)),
        tflops: of(|figures| figures.tflops),
        mfu: of(|figures| figures.mfu),
        against_baseline: None,
        ms_per_gib_saved: None,
        paper: paper.clone(),
        dominated_by: None,
        loss: figures.last().map(|figures| figures.loss),
        gpu: GpuFigures::of_runs(&gpu),
    }
}

/// Fills in the fields that compare a row with its baseline.
fn compare(rows: &mut [Row], index: usize, baseline: usize, runs: &[JournalEntry]) {
    let base = &rows[baseline];
    let row = &rows[index];
    let saved = row.planned_peak_bytes.zip(base.planned_peak_bytes);
    let saved = saved.map(|(bytes, of_base)| of_base as i64 - bytes as i64);
    let speed_in = |strategy: &str, round: usize| {
        let mut of_round = runs
            .iter()
            .filter(|entry| entry.strategy == strategy && entry.round == round);
        of_round.find_map(|entry| Some(entry.run.figures.as_ref()?.tokens_per_s))
    };
    let rounds = runs.iter().map(|entry| entry.round + 1).max().unwrap_or(0);
    let ratio = |round| Some(speed_in(&row.strategy, round)? / speed_in(&base.strategy, round)?);
    let against_baseline = median((0..rounds).filter_map(ratio).collect());
    let is_clear =
        |ratio: &f64| chance(row, base).is_some_and(|spread| (ratio - 1.0).abs() > spread);
    let slower = base.step_ms.zip(against_baseline.filter(is_clear));
    let slower = slower.map(|(of_base, speed)| of_base / speed - of_base);
    let gib = saved
        .filter(|saved| *saved > 0)
        .map(|saved| saved as f64 / (1u64 << 30) as f64);
    let of_base = base.paper.clone();
    let row = &mut rows[index];
    if let Some(paper) = &mut row.paper {
        let longer = of_base.map(|of_base| paper.longer_than(&of_base));
        paper.ms_per_gib_saved = longer.zip(gib).map(|(ms, gib)| ms / gib);
    }
    row.saved_bytes = saved;
    row.against_baseline = against_baseline;
    row.ms_per_gib_saved = slower.zip(gib).map(|(ms, gib)| ms / gib);
}

/// By how much the speeds of two rows may differ by chance: the larger spread; none after a single round.
fn chance(row: &Row, other: &Row) -> Option<f64> {
    Some(row.spread?.max(other.spread?))
}

/// The smallest strategy of the same model that needs no more memory and is faster by more than the spread of both. A
/// smaller difference could reverse in the next measurement. A single round has no spread, so none dominates.
fn dominator(row: &Row, rows: &[Row]) -> Option<String> {
    let score = |row: &Row| Some((row.peak_bytes?, row.tokens_per_s?));
    let (peak, speed) = score(row)?;
    let others = rows.iter().filter(|other| other.model == row.model);
    let better = others.filter_map(|other| {
        let (other_peak, other_speed) = score(other)?;
        let is_faster = other_speed > speed * (1.0 + chance(row, other)?);
        (other_peak <= peak && is_faster).then_some((other_peak, other))
    });
    better
        .min_by_key(|(peak, _)| *peak)
        .map(|(_, other)| other.strategy.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::bench::measure::BenchRun;

    fn planned(names: &[&str]) -> Vec<Planned> {
        let planned = names.iter().map(|name| Planned {
            strategy: BenchStrategy {
                name: (*name).into(),
                config: None,
                ranks: None,
                set: Vec::new(),
            },
            decided: None,
            plan: None,
            paper: None,
            obstacle: None,
        });
        planned.collect()
    }

    fn entry(strategy: &str, round: usize, peak_bytes: u64, tokens_per_s: f64) -> JournalEntry {
        let figures = RunFigures {
            peak_bytes,
            step_ms: 1e6 / tokens_per_s,
            tokens_per_s,
            tflops: None,
            mfu: None,
            loss: 1.0,
        };
        let run = BenchRun {
            result: Outcome::Ok,
            figures: Some(figures),
            reason: None,
            gpu: None,
        };
        JournalEntry {
            strategy: strategy.into(),
            round,
            run,
        }
    }

    /// In the second round the machine is half as fast, for all strategies.
    #[test]
    fn drift_hits_all_alike() {
        let runs = [
            entry("none", 0, 100, 1000.0),
            entry("full", 0, 50, 800.0),
            entry("none", 1, 100, 500.0),
            entry("full", 1, 50, 400.0),
        ];
        let rows = rows(&planned(&["none", "full"]), &runs, false);
        assert_eq!(rows[0].against_baseline, Some(1.0));
        assert_eq!(rows[1].against_baseline, Some(0.8));
        assert_eq!(rows[1].tokens_per_s, Some(600.0));
    }

    fn dominated(names: &[&str], runs: &[JournalEntry]) -> Vec<Option<String>> {
        let rows = rows(&planned(names), runs, false);
        rows.into_iter().map(|row| row.dominated_by).collect()
    }

    /// `near` and `none` differ by less than the spread of either, so neither dominates the other.
    #[test]
    fn what_is_faster_beyond_the_spread_dominates() {
        let names = ["none", "slow", "full", "bad", "near", "small"];
        let round = |round, drift: f64| {
            [
                entry("none", round, 100, 1000.0 + drift),
                entry("slow", round, 100, 900.0),
                entry("full", round, 50, 800.0),
                entry("bad", round, 90, 700.0),
                entry("near", round, 100, 985.0 - drift),
                entry("small", round, 40, 790.0 + drift),
            ]
        };
        let runs = [round(0, 10.0), round(1, -10.0)].concat();
        let expected = [None, Some("none"), None, Some("small"), None, None];
        assert_eq!(
            dominated(&names, &runs),
            expected.map(|name| name.map(String::from))
        );
        let once = round(0, 0.0);
        assert_eq!(dominated(&names, &once), vec![None; names.len()]);
    }

    /// A step of four times the tokens may take four times as long.
    #[test]
    fn time_on_paper_is_for_as_many_tokens() {
        let mut planned = planned(&["none", "full", "larger"]);
        for (one, (step_ms, tokens)) in
            planned
                .iter_mut()
                .zip([(100.0, 8), (130.0, 8), (480.0, 32)])
        {
            one.paper = Some(PaperFigures {
                compute_ms: 1.0,
                step_ms,
                ms_per_gib_saved: None,
                tokens,
                least_peak_bytes: 0,
                most_peak_bytes: 0,
                ranks_planned: 1,
                fits: Vec::new(),
            });
        }
        let mut rows = rows(&planned, &[], true);
        for (row, gib) in rows.iter_mut().zip([12, 2, 2]) {
            row.planned_peak_bytes = Some(gib << 30);
        }
        let cost = |rows: &mut [Row], index| {
            compare(rows, index, 0, &[]);
            rows[index].paper.as_ref().unwrap().ms_per_gib_saved
        };
        assert_eq!(
            [1, 2].map(|index| cost(&mut rows, index)),
            [Some(3.0), Some(2.0)]
        );
    }

    /// Time for a GiB follows from the column of speeds, and is left out where rounds differ by as much as the speeds.
    #[test]
    fn time_for_a_gib_is_left_out_within_the_spread() {
        let gib = 1 << 30;
        let compared = |speeds: &[(f64, f64)]| {
            let of_round = |(round, (none, full)): (usize, &(f64, f64))| {
                [
                    entry("none", round, 2 * gib, *none),
                    entry("full", round, gib, *full),
                ]
            };
            let runs: Vec<JournalEntry> = speeds.iter().enumerate().flat_map(of_round).collect();
            let mut rows = rows(&planned(&["none", "full"]), &runs, false);
            for (row, bytes) in rows.iter_mut().zip([2 * gib, gib]) {
                row.planned_peak_bytes = Some(bytes);
            }
            compare(&mut rows, 1, 0, &runs);
            (rows[1].against_baseline.unwrap(), rows[1].ms_per_gib_saved)
        };
        // Beyond the spread of 2 %, slower and faster.
        let (speed, ms) = compared(&[(1000.0, 800.0), (1010.0, 808.0), (990.0, 792.0)]);
        assert_eq!((speed, ms), (0.8, Some(1000.0 / speed - 1000.0)));
        let (speed, ms) = compared(&[(1000.0, 1250.0), (1010.0, 1260.0), (990.0, 1240.0)]);
        assert_eq!((speed, ms), (1.25, Some(1000.0 / speed - 1000.0)));
        // Within it: the medians of different rounds would say 890 tokens/s against 900, the rounds 1.01.
        assert_eq!(
            compared(&[(1000.0, 1010.0), (900.0, 890.0), (800.0, 816.0)]),
            (1.01, None)
        );
        assert_eq!(compared(&[(1000.0, 970.0), (1040.0, 1010.0)]).1, None);
        assert_eq!(compared(&[(1000.0, 500.0)]), (0.5, None), "a single round");
    }
}
