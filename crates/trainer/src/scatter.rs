//! Points with names in a picture, those that no other dominates joined by a line.

use crate::failure::Failure;
use plotters::prelude::*;
use std::ops::Range;
use std::path::Path;

const SIZE: (u32, u32) = (900, 600);
const MARGIN: u32 = 16;
/// Room for the numbers of the upright axis.
const Y_LABELS: u32 = 72;
/// Room for the numbers and the name of the other axis.
const X_LABELS: u32 = 44;
/// From a point to its name.
const BESIDE: i32 = 8;
/// The width of a letter of a name, at the most on average.
const LETTER: f64 = 7.5;
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

    /// From 0, or a little before the smallest, to a little beyond the largest.
    fn range(&self, of: fn(&Point) -> f64) -> Range<f64> {
        let values = || self.points.iter().map(of);
        let most = values().fold(0.0, f64::max);
        let least = match self.from_zero {
            true => 0.0,
            false => values().fold(f64::INFINITY, f64::min),
        };
        let width = most - least;
        let before = if self.from_zero { 0.0 } else { 0.1 * width };
        least - before..most + 0.1 * width
    }

    /// The range of bytes: so far to the right that every point's name has room beside it.
    fn range_with_names(&self) -> Range<f64> {
        let Range { start, end } = self.range(|point| point.at.0);
        let plot = f64::from(SIZE.0 - 2 * MARGIN - Y_LABELS);
        let needed = |point: &Point| {
            let name = f64::from(BESIDE) + LETTER * point.name.chars().count() as f64;
            // Of a name that is as long as the picture is wide, the beginning shows.
            let share = (1.0 - name / plot).max(0.2);
            start + (point.at.0 - start) / share
        };
        start..self.points.iter().map(needed).fold(end, f64::max)
    }

    fn draw(&self, svg: &mut String, unit: &str) -> Result<(), Box<dyn std::error::Error>> {
        let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
        area.fill(&WHITE)?;
        let ranges = (self.range_with_names(), self.range(|point| point.at.1));
        let offsets = self.label_offsets(&ranges);
        let mut chart = ChartBuilder::on(&area)
            .margin(MARGIN)
            .x_label_area_size(X_LABELS)
            .y_label_area_size(Y_LABELS)
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
            let label = Text::new(point.name.clone(), (BESIDE, offset), font);
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
        let plot = (
            SIZE.0 - 2 * MARGIN - Y_LABELS,
            SIZE.1 - 2 * MARGIN - X_LABELS,
        );
        let pixel = |point: &Point| {
            let x = f64::from(plot.0) * share(point.at.0, xs);
            let y = f64::from(plot.1) * (1.0 - share(point.at.1, ys));
            (x as i32, y as i32)
        };
        let width = |point: &Point| (LETTER * point.name.chars().count() as f64) as i32;
        let mut taken: Vec<(Range<i32>, i32)> = Vec::new();
        let offset = |point: &Point| {
            let ((x, y), width) = (pixel(point), width(point));
            let is_free = |down: &i32| {
                let lies_on = |(across, other_y): &(Range<i32>, i32)| {
                    across.start < x + width && x < across.end && (other_y - y - down).abs() < 14
                };
                point.name.is_empty() || !taken.iter().any(lies_on)
            };
            let mut downs = [-6, 8, -20, 22, -34, 36, -48, 50].into_iter();
            let down = downs.find(is_free).unwrap_or(-6);
            if !point.name.is_empty() {
                taken.push((x..x + width, y + down));
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
