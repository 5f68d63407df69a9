//! Draws peak against speed: each strategy is a point, and a line joins those that no other strategy dominates.

use super::rows::Row;
use crate::failure::{Failure, Result};
use report::{Scatter, ScatterPoint, unit_of_bytes};
use std::path::Path;

/// Draws the strategies that were measured.
///
/// # Errors
/// If no strategy was measured, or the file cannot be written.
pub(crate) fn draw(path: &Path, rows: &[Row]) -> Result {
    let measured = |row: &Row| Some((row.peak_bytes? as f64, row.tokens_per_s?));
    let (unit, unit_bytes) = unit_of_bytes(rows.iter().filter_map(measured).map(|at| at.0));
    let point = |row: &Row| {
        let (peak_bytes, tokens_per_s) = measured(row)?;
        Some(ScatterPoint {
            name: row.strategy.clone(),
            at: (peak_bytes / unit_bytes, tokens_per_s),
            is_chosen: false,
            is_off_front: row.dominated_by.is_some(),
        })
    };
    let points: Vec<ScatterPoint> = rows.iter().filter_map(point).collect();
    if points.is_empty() {
        return Err(Failure::Usage(
            "--plot draws what was measured, and nothing was: the reasons are above".into(),
        ));
    }
    let scatter = Scatter {
        x_label: format!("peak memory, {unit}"),
        y_label: "tokens/s".into(),
        from_zero: true,
        points,
    };
    std::fs::write(path, scatter.svg()).map_err(Failure::file(path))
}
