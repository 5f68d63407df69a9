//! Peak against speed, as a picture: each strategy a point, those that no other dominates joined by a line.

use super::rows::Row;
use crate::failure::Failure;
use plotters::prelude::*;
use std::path::Path;

const SIZE: (u32, u32) = (900, 600);
const GIB: f64 = (1u64 << 30) as f64;
const MIB: f64 = (1u64 << 20) as f64;

/// A strategy that was measured.
struct Point<'a> {
    name: &'a str,
    /// Peak in the picture's unit, tokens a second.
    at: (f64, f64),
    is_dominated: bool,
}

/// Draws the strategies that were measured.
///
/// # Errors
/// None was measured, or the file cannot be written.
pub(crate) fn draw(path: &Path, rows: &[Row]) -> Result<(), Failure> {
    let largest = rows
        .iter()
        .filter_map(|row| row.peak_bytes)
        .max()
        .unwrap_or(0);
    let (unit, unit_bytes) = if largest as f64 >= 4.0 * GIB {
        ("GiB", GIB)
    } else {
        ("MiB", MIB)
    };
    let point = |row: &'_ Row| {
        let at = (row.peak_bytes? as f64 / unit_bytes, row.tokens_per_s?);
        Some((row.strategy.clone(), at, row.dominated_by.is_some()))
    };
    let measured: Vec<(String, (f64, f64), bool)> = rows.iter().filter_map(point).collect();
    if measured.is_empty() {
        return Err(Failure::Usage(
            "--plot draws what was measured, and nothing was: the reasons are above".into(),
        ));
    }
    let points: Vec<Point> = measured
        .iter()
        .map(|(name, at, is_dominated)| Point {
            name,
            at: *at,
            is_dominated: *is_dominated,
        })
        .collect();
    let mut svg = String::new();
    picture(&mut svg, &points, unit)
        .map_err(|error| Failure::Usage(format!("the picture cannot be drawn: {error}")))?;
    std::fs::write(path, svg).map_err(Failure::file(path))
}

/// From 0 to a tenth beyond the largest.
fn range(values: impl Iterator<Item = f64>) -> std::ops::Range<f64> {
    0.0..1.1 * values.fold(0.0, f64::max)
}

fn picture(
    svg: &mut String,
    points: &[Point],
    unit: &str,
) -> Result<(), Box<dyn std::error::Error>> {
    let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    // Labels stand to the right of their points.
    let peaks = range(points.iter().map(|point| 1.2 * point.at.0));
    let speeds = range(points.iter().map(|point| point.at.1));
    let mut chart = ChartBuilder::on(&area)
        .margin(16)
        .x_label_area_size(44)
        .y_label_area_size(72)
        .build_cartesian_2d(peaks, speeds)?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(BLACK.mix(0.12))
        .x_label_formatter(&|bytes| format!("{bytes}"))
        .y_label_formatter(&|speed| format!("{speed}"))
        .x_desc(format!("peak memory, {unit}"))
        .y_desc("tokens/s")
        .label_style(("sans-serif", 14))
        .draw()?;
    let mut front: Vec<(f64, f64)> = points
        .iter()
        .filter(|point| !point.is_dominated)
        .map(|point| point.at)
        .collect();
    front.sort_by(|a, b| a.0.total_cmp(&b.0));
    chart.draw_series(LineSeries::new(front, BLUE.stroke_width(2)))?;
    for (point, offset) in points.iter().zip(label_offsets(points)) {
        let colour = if point.is_dominated {
            BLACK.mix(0.45)
        } else {
            BLUE.mix(1.0)
        };
        let label = Text::new(
            point.name.to_string(),
            (8, offset),
            ("sans-serif", 13).into_font().color(&colour),
        );
        let element = EmptyElement::at(point.at) + Circle::new((0, 0), 4, colour.filled()) + label;
        chart.draw_series([element])?;
    }
    area.present()?;
    Ok(())
}

/// Pixels by which each label is moved down, so that labels of near points do not lie on one another.
fn label_offsets(points: &[Point]) -> Vec<i32> {
    let most = |of: fn(&Point) -> f64| points.iter().map(of).fold(f64::MIN_POSITIVE, f64::max);
    let (widest, highest) = (most(|point| point.at.0), most(|point| point.at.1));
    let pixel = |point: &Point| {
        let x = point.at.0 / widest / 1.32 * f64::from(SIZE.0);
        let y = f64::from(SIZE.1) * (1.0 - point.at.1 / highest / 1.1);
        (x as i32, y as i32)
    };
    let mut taken: Vec<(i32, i32)> = Vec::new();
    let offset = |point: &Point| {
        let (x, y) = pixel(point);
        let is_free = |down: &i32| {
            let lies_on = |&(other_x, other_y): &(i32, i32)| {
                (other_x - x).abs() < 160 && (other_y - y - down).abs() < 14
            };
            !taken.iter().any(lies_on)
        };
        let down = [-6, 10, -22, 26, -38, 42]
            .into_iter()
            .find(is_free)
            .unwrap_or(-6);
        taken.push((x, y + down));
        down
    };
    points.iter().map(offset).collect()
}
