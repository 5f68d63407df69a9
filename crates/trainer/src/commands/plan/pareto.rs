//! `plan --pareto`: the policies chosen for budgets, beside the presets.

use crate::failure::{Failure, Result};
use clap::Args;
use kernels::Target;
use memory::format_bytes;
use planner::{Frontier, Plan, Point};
use report::Align::{Left, Right};
use report::{Scatter, ScatterPoint, Table, unit_of_bytes};
use settings::Config;
use std::path::{Path, PathBuf};

/// Flags of `plan` that compare budgets.
#[derive(Clone, Debug, Default, Args)]
pub struct ParetoArgs {
    /// Say what --recompute auto chooses for budgets, beside the presets: peak against time on paper
    #[arg(long)]
    pub pareto: bool,
    /// Draw that, too
    #[arg(long, value_name = "FILE.svg", requires = "pareto")]
    pub plot: Option<PathBuf>,
}

impl ParetoArgs {
    /// The frontier, if `--pareto` is given.
    pub(crate) fn answer(&self, config: &Config, target: Target) -> Result<Option<Frontier>> {
        let frontier = self.pareto.then(|| Frontier::new(config, target));
        Ok(frontier.transpose()?)
    }

    /// Draws the frontier if `--plot` is given: chosen policies form a line, and presets have names.
    pub(crate) fn draw(&self, plan: &Plan) -> Result {
        match (&plan.pareto, &self.plot) {
            (Some(frontier), Some(path)) => draw(frontier, path),
            _ => Ok(()),
        }
    }
}

/// The frontier in tables.
#[rustfmt::skip]
pub(crate) fn tables(frontier: &Frontier) -> String {
    let chosen = Table::of_items(&frontier.chosen, &[
        ("peak", Right, &|choice| format_bytes(choice.peak_bytes)),
        ("step on paper", Right, &|choice| five_digits(choice.step_ms)),
        ("recompute auto", Left, &|choice| choice.policy()),
    ]);
    let saves = |preset: &Point| {
        let mut within = frontier.chosen.iter().rev();
        let within = within.find(|choice| choice.peak_bytes <= preset.peak_bytes);
        let percent = within.map(|choice| 100.0 * (choice.step_ms / preset.step_ms - 1.0));
        percent.map_or_else(String::new, |percent| format!("{percent:+.1} % time"))
    };
    let presets = Table::of_items(&frontier.presets, &[
        ("peak", Right, &|preset| format_bytes(preset.peak_bytes)),
        ("step on paper", Right, &|preset| five_digits(preset.step_ms)),
        ("preset", Left, &|preset| preset.recompute.clone()),
        ("auto with as much", Left, &saves),
    ]);
    format!("\n{chosen}\n{presets}")
}

/// A time with five digits, so that rows that differ look different.
fn five_digits(ms: f64) -> String {
    let whole = (ms.abs().log10().floor() as i32).saturating_add(1);
    // The logarithm of 0 is below all integers.
    let decimals = 5i32.saturating_sub(whole).clamp(0, 9) as usize;
    format!("{ms:.decimals$} ms")
}

fn draw(frontier: &Frontier, path: &Path) -> Result {
    let chosen = frontier.chosen.iter();
    let chosen = chosen.map(|choice| (String::new(), choice.peak_bytes, choice.step_ms));
    let presets = frontier.presets.iter();
    let presets =
        presets.map(|preset| (preset.recompute.clone(), preset.peak_bytes, preset.step_ms));
    let points: Vec<(String, u64, f64)> = chosen.chain(presets).collect();
    let (unit, unit_bytes) = unit_of_bytes(points.iter().map(|point| point.1 as f64));
    let point = |(name, peak_bytes, step_ms): (String, u64, f64)| ScatterPoint {
        at: (peak_bytes as f64 / unit_bytes, step_ms),
        is_chosen: false,
        is_off_front: !name.is_empty(),
        name,
    };
    let scatter = Scatter {
        x_label: format!("peak memory, {unit}"),
        y_label: "step on paper, ms".into(),
        from_zero: false,
        points: points.into_iter().map(point).collect(),
    };
    std::fs::write(path, scatter.svg()).map_err(Failure::file(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_five_digits() {
        let times = [25.0514, 0.0456789, 123_456.7, 9.999_96, 0.0];
        let shown = times.map(five_digits);
        let expected = [
            "25.051 ms",
            "0.045679 ms",
            "123457 ms",
            "10.0000 ms",
            "0.000000000 ms",
        ];
        assert_eq!(shown, expected);
    }
}
