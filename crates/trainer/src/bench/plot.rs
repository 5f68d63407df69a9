//! Peak against speed, as a picture: each strategy a point, those that no other dominates joined by a line.

use super::rows::Row;
use crate::failure::Failure;
use crate::scatter::{Point, Scatter};
use std::path::Path;

/// Draws the strategies that were measured.
///
/// # Errors
/// None was measured, or the file cannot be written.
pub(crate) fn draw(path: &Path, rows: &[Row]) -> Result<(), Failure> {
    let point = |row: &Row| {
        Some(Point {
            name: row.strategy.clone(),
            at: (row.peak_bytes? as f64, row.tokens_per_s?),
            is_dominated: row.dominated_by.is_some(),
        })
    };
    let points: Vec<Point> = rows.iter().filter_map(point).collect();
    if points.is_empty() {
        return Err(Failure::Usage(
            "--plot draws what was measured, and nothing was: the reasons are above".into(),
        ));
    }
    let scatter = Scatter {
        y: "tokens/s",
        from_zero: true,
        points,
    };
    scatter.write(path)
}
