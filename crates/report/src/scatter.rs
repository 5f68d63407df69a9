//! A scatter plot: points with names, and a line through those that no other point dominates.

use crate::axes::{Axis, Dot, Frame};
use crate::svg::Svg;

/// The frame of a picture that is a file.
const FRAME: Frame = Frame {
    size: (760.0, 480.0),
    cross: (72.0, 424.0),
    corner: (744.0, 40.0),
    letter: (7.2, 13.0),
};
const STYLE: &str = include_str!("scatter.css");

/// A picture of strategies by two figures.
pub struct Scatter {
    /// The name of the horizontal axis.
    pub x_label: String,
    /// The name of the vertical axis.
    pub y_label: String,
    /// Whether both axes start at 0. Otherwise they start a little below the smallest value.
    pub from_zero: bool,
    /// The strategies.
    pub points: Vec<ScatterPoint>,
}

/// A strategy.
#[derive(Clone)]
pub struct ScatterPoint {
    /// Its label, which is written beside it.
    pub name: String,
    /// Its coordinates.
    pub at: (f64, f64),
    /// Whether it is marked by a ring.
    pub is_chosen: bool,
    /// Whether it is faint and not on the line: another one is better in both figures, or it is only a comparison.
    pub is_off_front: bool,
}

/// The unit for some numbers of bytes, and the unit's size.
pub fn unit_of_bytes(bytes: impl Iterator<Item = f64>) -> (&'static str, f64) {
    match bytes.fold(0.0, f64::max) {
        most if most >= 4.0 * (1u64 << 30) as f64 => ("GiB", (1u64 << 30) as f64),
        _ => ("MiB", (1u64 << 20) as f64),
    }
}

impl Scatter {
    /// The picture as a file.
    pub fn svg(&self) -> String {
        let label = format!("{} against {}", self.y_label, self.x_label);
        let mut svg = Svg::new("scatter", FRAME.size, &label);
        svg.style(STYLE, FRAME.size);
        svg.text((16.0, 24.0), "", "start", &self.y_label);
        self.draw(&mut svg, &FRAME);
        svg.finish()
    }

    /// Draws axes, front and points; nothing without points.
    pub(crate) fn draw(&self, svg: &mut Svg, frame: &Frame) {
        let axis = |of: fn(&ScatterPoint) -> f64| {
            let axis = Axis::over(self.points.iter().map(of))?;
            let axis = if self.from_zero {
                axis.starting_at_zero()
            } else {
                axis
            };
            Some(axis.widened())
        };
        let (Some(x), Some(y)) = (axis(|point| point.at.0), axis(|point| point.at.1)) else {
            return;
        };
        let dot = |point: &ScatterPoint| Dot {
            at: frame.pixel((&x, &y), point.at),
            class: "n0",
            name: point.name.clone(),
            is_chosen: point.is_chosen,
            is_off_front: point.is_off_front,
        };
        let mut dots: Vec<Dot> = self.points.iter().map(dot).collect();
        frame.draw(svg, (&x, &y), &self.x_label);
        let front = dots.iter().filter(|dot| !dot.is_off_front);
        let mut front: Vec<(f64, f64)> = front.map(|dot| dot.at).collect();
        front.sort_by(|one, other| one.0.total_cmp(&other.0));
        let places: Vec<String> = front.iter().map(|(x, y)| format!("{x},{y}")).collect();
        svg.path("front", &format!("M{}", places.join("L")));
        // The most important names choose their places first.
        dots.sort_by_key(|dot| (!dot.is_chosen, dot.is_off_front));
        frame.draw_dots(svg, &dots, &front);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_do_not_lie_on_one_another() {
        let point = |name: &str, at| ScatterPoint {
            name: name.into(),
            at,
            is_chosen: name == "full",
            is_off_front: name == "nearly the same place",
        };
        let points = [
            point("none", (0.0, 10.0)),
            point("the same place", (30.0, 4.01)),
            point("nearly the same place", (30.1, 4.02)),
            point("full", (30.0, 4.0)),
        ];
        let scatter = Scatter {
            x_label: "extra FLOPs, %".into(),
            y_label: "peak, MiB".into(),
            from_zero: false,
            points: points.into(),
        };
        let svg = scatter.svg();
        let texts = svg.split("<text ").skip(1);
        let beside = texts.filter(|text| text.contains("class=\"\""));
        // The first text is the name of the axis.
        let mut areas: Vec<[f64; 4]> = Vec::new();
        let mut names = Vec::new();
        for text in beside.skip(1) {
            let number = |name: &str| -> f64 {
                let (_, rest) = text.split_once(&format!("{name}=\"")).unwrap();
                rest.split_once('"').unwrap().0.parse().unwrap()
            };
            let (_, rest) = text.split_once('>').unwrap();
            let name = rest.split_once('<').unwrap().0;
            let width = FRAME.letter.0 * name.len() as f64;
            let left = number("x") - if text.contains("\"end\"") { width } else { 0.0 };
            let area = [left, left + width, number("y") - 10.0, number("y")];
            for other in &areas {
                let [l, r, t, b] = *other;
                assert!(
                    area[1] < l || area[0] > r || area[3] < t || area[2] > b,
                    "{name} in {svg}"
                );
            }
            areas.push(area);
            names.push(name.to_string());
        }
        assert!(names.len() == 4 && names[0] == "full", "{names:?}");
        // The front has no dominated point.
        let (_, front) = svg.split_once("class=\"front\" d=\"M").unwrap();
        assert_eq!(front.split_once('"').unwrap().0.split('L').count(), 3);
    }
}
