//! Points with names in a picture, those that no other dominates joined by a line.

use crate::failure::Failure;
use plotters::prelude::*;
use std::ops::Range;
use std::path::Path;

const SIZE: (u32, u32) = (900, 600);
const GIB: f64 = (1u64 << 30) as f64;
const MIB: f64 = (1u64 << 20) as f64;

/// A picture of peaks against something else.
pub(crate) struct Scatter {
    /// What stands at the other axis.
    pub(crate) y: &'static str,
    /// Whether both axes begin at 0; else at the smallest.
    pub(crate) from_zero: bool,
    /// The points, at bytes and that other value.
    pub(crate) points: Vec<Point>,
}

/// A point.
#[derive(Clone)]
pub(crate) struct Point {
    /// What stands beside it.
    pub(crate) name: String,
    /// Where it is.
    pub(crate) at: (f64, f64),
    /// Whether another is better in both.
    pub(crate) is_dominated: bool,
}

impl Scatter {
    /// Draws an SVG file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn write(mut self, path: &Path) -> Result<(), Failure> {
        let largest = self
            .points
            .iter()
            .map(|point| point.at.0)
            .fold(0.0, f64::max);
        let (unit, unit_bytes) = match largest >= 4.0 * GIB {
            true => ("GiB", GIB),
            false => ("MiB", MIB),
        };
        for point in &mut self.points {
            point.at.0 /= unit_bytes;
        }
        let mut svg = String::new();
        self.draw(&mut svg, unit)
            .map_err(|error| Failure::Usage(format!("the picture cannot be drawn: {error}")))?;
        std::fs::write(path, svg).map_err(Failure::file(path))
    }

    /// From 0, or a little before the smallest, to a little beyond the largest; labels to the right take some room too.
    fn range(&self, of: fn(&Point) -> f64, beyond: f64) -> Range<f64> {
        let values = || self.points.iter().map(of);
        let most = values().fold(0.0, f64::max);
        let least = match self.from_zero {
            true => 0.0,
            false => values().fold(f64::INFINITY, f64::min),
        };
        let width = most - least;
        let before = if self.from_zero { 0.0 } else { 0.1 * width };
        least - before..most + beyond * width
    }

    fn draw(&self, svg: &mut String, unit: &str) -> Result<(), Box<dyn std::error::Error>> {
        let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
        area.fill(&WHITE)?;
        let ranges = (
            self.range(|point| point.at.0, 0.32),
            self.range(|point| point.at.1, 0.1),
        );
        let offsets = self.label_offsets(&ranges);
        let mut chart = ChartBuilder::on(&area)
            .margin(16)
            .x_label_area_size(44)
            .y_label_area_size(72)
            .build_cartesian_2d(ranges.0, ranges.1)?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(BLACK.mix(0.12))
            .x_label_formatter(&|bytes| short(*bytes))
            .y_label_formatter(&|value| short(*value))
            .x_desc(format!("peak memory, {unit}"))
            .y_desc(self.y)
            .label_style(("sans-serif", 14))
            .draw()?;
        let undominated = self.points.iter().filter(|point| !point.is_dominated);
        let mut front: Vec<(f64, f64)> = undominated.map(|point| point.at).collect();
        front.sort_by(|a, b| a.0.total_cmp(&b.0));
        chart.draw_series(LineSeries::new(front, BLUE.stroke_width(2)))?;
        for (point, offset) in self.points.iter().zip(offsets) {
            let colour = match point.is_dominated {
                true => BLACK.mix(0.45),
                false => BLUE.mix(1.0),
            };
            let font = ("sans-serif", 13).into_font().color(&colour);
            let label = Text::new(point.name.clone(), (8, offset), font);
            let circle = Circle::new((0, 0), 4, colour.filled());
            chart.draw_series([EmptyElement::at(point.at) + circle + label])?;
        }
        area.present()?;
        Ok(())
    }

    /// Pixels by which each label is moved down, so that labels of near points do not lie on one another.
    fn label_offsets(&self, (xs, ys): &(Range<f64>, Range<f64>)) -> Vec<i32> {
        let share = |value: f64, range: &Range<f64>| {
            (value - range.start) / (range.end - range.start).max(f64::MIN_POSITIVE)
        };
        let pixel = |point: &Point| {
            let x = f64::from(SIZE.0) * share(point.at.0, xs);
            let y = f64::from(SIZE.1) * (1.0 - share(point.at.1, ys));
            (x as i32, y as i32)
        };
        let mut taken: Vec<(i32, i32)> = Vec::new();
        let offset = |point: &Point| {
            let (x, y) = pixel(point);
            let is_free = |down: &i32| {
                let lies_on = |&(other_x, other_y): &(i32, i32)| {
                    (other_x - x).abs() < 160 && (other_y - y - down).abs() < 14
                };
                point.name.is_empty() || !taken.iter().any(lies_on)
            };
            let mut downs = [-6, 10, -22, 26, -38, 42].into_iter();
            let down = downs.find(is_free).unwrap_or(-6);
            if !point.name.is_empty() {
                taken.push((x, y + down));
            }
            down
        };
        self.points.iter().map(offset).collect()
    }
}

/// A number on an axis.
fn short(value: f64) -> String {
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}
