//! Axes with ticks at round values, and names beside points.

use crate::numbers::grouped;
use crate::svg::{Svg, round_step, tenths};

/// The number of letters that fit to the left of the vertical axis.
const LETTERS_BEFORE: usize = 7;
/// Pixels for each tick, horizontally and vertically.
const TICK: (f64, f64) = (66.0, 48.0);

/// Samples on each segment of a line, which keep names off it.
const STEPS_OF_A_LINE: u32 = 50;

/// The geometry of a picture's axes.
pub(crate) struct Frame {
    pub(crate) size: (f64, f64),
    /// The point where the axes cross, and the opposite corner.
    pub(crate) cross: (f64, f64),
    pub(crate) corner: (f64, f64),
    /// The least width of a letter, and the height of a line of text.
    pub(crate) letter: (f64, f64),
}

/// The range of an axis.
#[derive(Clone, Copy)]
pub(crate) struct Axis {
    pub(crate) least: f64,
    pub(crate) most: f64,
}

impl Axis {
    /// From the smallest to the largest of some values; none without values.
    pub(crate) fn over(values: impl Iterator<Item = f64>) -> Option<Axis> {
        let of_value = |value| Axis {
            least: value,
            most: value,
        };
        values.map(of_value).reduce(|one, other| Axis {
            least: one.least.min(other.least),
            most: one.most.max(other.most),
        })
    }

    /// This axis, starting at zero.
    pub(crate) fn starting_at_zero(self) -> Axis {
        Axis {
            least: 0.0,
            most: self.most.max(f64::MIN_POSITIVE),
        }
    }

    /// This axis with a margin at both ends, but not below zero if no value is.
    pub(crate) fn widened(self) -> Axis {
        let more = match self.most - self.least {
            0.0 => self.most.abs().max(1e-9) * 0.1,
            span => span * 0.06,
        };
        let least = self.least - more;
        Axis {
            least: match self.least >= 0.0 {
                true => least.max(0.0),
                false => least,
            },
            most: self.most + more,
        }
    }

    /// The pixel of a value, from the pixels of both ends.
    fn place(&self, value: f64, from: f64, to: f64) -> f64 {
        let share = match self.most - self.least {
            0.0 => 0.5,
            span => (value - self.least) / span,
        };
        tenths(from + (to - from) * share)
    }

    /// Round values, about `count` at most, with their texts.
    fn ticks(&self, count: f64) -> Vec<(f64, String)> {
        let range = self.most - self.least;
        if range <= 0.0 || !range.is_finite() {
            return vec![(self.least, short(self.least, 0))];
        }
        let (step, decimals) = round_step(range, count);
        let (first, last) = ((self.least / step).ceil(), (self.most / step).floor());
        let values = (first as i64..=last as i64).map(|index| index as f64 * step);
        values
            .map(|value| (value, short(value, decimals)))
            .collect()
    }
}

impl Frame {
    /// The pixel of a point.
    pub(crate) fn pixel(&self, (x, y): (&Axis, &Axis), (at_x, at_y): (f64, f64)) -> (f64, f64) {
        (
            x.place(at_x, self.cross.0, self.corner.0),
            y.place(at_y, self.cross.1, self.corner.1),
        )
    }

    /// The centres of the tick texts of the horizontal axis, moved so that no letter is cut off at the edges.
    fn ticks_across(&self, x: &Axis) -> Vec<(f64, String)> {
        let ticks = x.ticks((self.corner.0 - self.cross.0) / TICK.0);
        let middle = |(value, text): (f64, String)| {
            let half = 0.5 * self.letter.0 * text.chars().count() as f64;
            let at = x.place(value, self.cross.0, self.corner.0);
            (at.clamp(half, self.size.0 - half), text)
        };
        ticks.into_iter().map(middle).collect()
    }

    /// Draws lines and texts of both axes, and the name of the horizontal one.
    pub(crate) fn draw(&self, svg: &mut Svg, (x, y): (&Axis, &Axis), x_label: &str) {
        let (cross, corner) = (self.cross, self.corner);
        for (value, text) in y.ticks((cross.1 - corner.1) / TICK.1) {
            let at = y.place(value, cross.1, corner.1);
            svg.path("grid", &format!("M{} {at}H{}", cross.0, corner.0));
            svg.text((cross.0 - 6.0, at + 4.0), "tick", "end", &text);
        }
        let line = self.letter.1 + 4.0;
        for (middle, text) in self.ticks_across(x) {
            svg.text((middle, cross.1 + line), "tick", "middle", &text);
        }
        svg.path("axis", &format!("M{} {}H{}", cross.0, cross.1, corner.0));
        svg.text((corner.0, cross.1 + 2.0 * line), "tick", "end", x_label);
    }

    /// Finds places for names beside their points. First points choose first, and names avoid lines if they can.
    fn place_names(&self, dots: &[Dot], line: &[(f64, f64)]) -> Vec<Option<NamePlace>> {
        let around = |(x, y): (f64, f64), room: f64| [x - room, x + room, y - room, y + room];
        let line: Vec<Area> = line
            .windows(2)
            .flat_map(|ends| {
                let at = move |step: u32| {
                    let share = f64::from(step) / f64::from(STEPS_OF_A_LINE);
                    let between = |from: f64, to: f64| from + (to - from) * share;
                    (between(ends[0].0, ends[1].0), between(ends[0].1, ends[1].1))
                };
                (0..=STEPS_OF_A_LINE).map(move |step| around(at(step), 1.0))
            })
            .collect();
        let mut taken: Vec<Area> = dots.iter().map(|dot| around(dot.at, 4.0)).collect();
        let mut placed = Vec::new();
        for dot in dots {
            let inside = |[left, right, top, bottom]: Area| {
                let (cross, corner) = (self.cross, self.corner);
                left > cross.0 && right < corner.0 && top > corner.1 && bottom < cross.1
            };
            let places = self.places_of_name(dot).into_iter();
            let mut free = places.filter(|(_, area)| inside(*area) && is_free(*area, &taken));
            let first = free.clone().next();
            let chosen = free.find(|(_, area)| is_free(*area, &line)).or(first);
            taken.extend(chosen.map(|(_, area)| area));
            placed.push(chosen.map(|(place, _)| place));
        }
        placed
    }

    /// Possible places of a name, the best first, with their areas; none for an empty name.
    fn places_of_name(&self, dot: &Dot) -> Vec<(NamePlace, Area)> {
        let (letter, height) = self.letter;
        let ((x, y), width) = (dot.at, letter * dot.name.chars().count() as f64);
        if width == 0.0 {
            return Vec::new();
        }
        let beside = if dot.is_chosen { 12.0 } else { 7.0 };
        let right = (x + beside, "start", x + beside);
        let left = (x - beside, "end", x - beside - width);
        let middle = (x, "middle", x - 0.5 * width);
        let before = (x + 4.0, "end", x + 4.0 - width);
        let near = [0.0, -0.8, 0.8].map(|lines| [(lines, right), (lines, left)]);
        let far = [-1.0, 1.0, -1.8, 1.8, -2.6, 2.6].map(|lines| (lines, middle));
        let farther = [-1.6, 1.6, -2.4, 2.4, -3.2, 3.2];
        let farther = farther.map(|lines| [(lines, right), (lines, left), (lines, before)]);
        let places = near.into_iter().flatten().chain(far);
        let places = places.chain(farther.into_iter().flatten());
        let place = |(lines, (at, anchor, left)): (f64, (f64, &'static str, f64))| {
            let y = y + lines * height;
            let area = [left, left + width, y - 0.5 * height, y + 0.5 * height];
            ((at, y + BASELINE, anchor), area)
        };
        places.map(place).collect()
    }

    /// Draws points with their names, which avoid the line.
    pub(crate) fn draw_dots(&self, svg: &mut Svg, dots: &[Dot], line: &[(f64, f64)]) {
        for (dot, label) in dots.iter().zip(self.place_names(dots, line)) {
            let dominated = if dot.is_off_front { " dominated" } else { "" };
            let chosen = if dot.is_chosen { " chosen" } else { "" };
            svg.group(&format!("class=\"dot {}{dominated}{chosen}\"", dot.class));
            svg.title(&dot.name);
            if dot.is_chosen {
                svg.circle("ring", dot.at, 7.5);
            }
            svg.circle("point", dot.at, 4.0);
            if let Some((x, y, anchor)) = label {
                self.lead_to(svg, dot.at, (x, y - BASELINE));
                svg.text((x, y), "", anchor, &dot.name);
            }
            svg.end();
        }
    }

    /// Draws a line from a point to the middle of its name's end, if the name is not beside it.
    fn lead_to(&self, svg: &mut Svg, (x, y): (f64, f64), name: (f64, f64)) {
        let height = self.letter.1;
        if (name.1 - y).abs() > height {
            let end = name.1
                + if name.1 < y {
                    0.5 * height
                } else {
                    -0.5 * height
                };
            svg.path(
                "leader",
                &format!("M{x},{y}L{},{}", tenths(name.0), tenths(end)),
            );
        }
    }
}

/// From the middle of a line of text to its baseline.
const BASELINE: f64 = 4.0;

/// A text's place and its anchor.
type NamePlace = (f64, f64, &'static str);

/// Left, right, top and bottom.
type Area = [f64; 4];

/// Whether an area overlaps none of the others.
fn is_free([left, right, top, bottom]: Area, others: &[Area]) -> bool {
    let mut others = others.iter();
    others.all(|[l, r, t, b]| right < *l || left > *r || bottom < *t || top > *b)
}

/// A point with a name.
pub(crate) struct Dot {
    pub(crate) at: (f64, f64),
    pub(crate) class: &'static str,
    pub(crate) name: String,
    pub(crate) is_chosen: bool,
    pub(crate) is_off_front: bool,
}

/// Formats a number for an axis. A number that is too long is written with a unit, or with a power of ten.
fn short(value: f64, decimals: usize) -> String {
    let plain = grouped(value, decimals);
    if plain.chars().count() <= LETTERS_BEFORE {
        return plain;
    }
    let units = [("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)];
    match units.into_iter().find(|(_, size)| value.abs() >= *size) {
        Some((unit, size)) => {
            let text = format!("{:.3}", value / size);
            format!("{}{unit}", text.trim_end_matches('0').trim_end_matches('.'))
        }
        // Ticks have one or two digits and a power of ten.
        None => format!("{:e}", format!("{value:.1e}").parse().unwrap_or(value)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_within() {
        let texts = |least, most| {
            let ticks = Axis { least, most }.ticks(5.0);
            ticks.into_iter().map(|tick| tick.1).collect::<Vec<_>>()
        };
        assert_eq!(texts(1.0, 20.0), ["5", "10", "15", "20"]);
        assert_eq!(texts(2.05, 2.45), ["2.1", "2.2", "2.3", "2.4"]);
        assert_eq!(texts(3.0, 3.0), ["3"]);
    }

    /// Labels of all values must stay within the picture: those of x below it, and those of y to its left.
    #[test]
    fn no_label_is_cut_off() {
        let frame = crate::page::PAGE_FRAME;
        let width = |text: &str| frame.letter.0 * text.chars().count() as f64;
        for (x, y) in [
            (1000.0, 1.0),
            (100_000.0, 2e-7),
            (12_345_678.0, 3e12),
            (7.0, 1_234_567.0),
        ] {
            let axis = |most| Axis { least: 0.0, most };
            let (across, up) = (frame.ticks_across(&axis(x)), axis(y).widened().ticks(4.0));
            assert!(across.len() > 1 && up.len() > 1);
            for (middle, text) in across {
                let (left, right) = (middle - 0.5 * width(&text), middle + 0.5 * width(&text));
                assert!(left >= 0.0 && right <= frame.size.0, "{text} at {middle}");
            }
            for (_, text) in up {
                assert!(width(&text) <= frame.cross.0 - 6.0, "{text}");
            }
        }
        let texts = [
            (1_234_567.0, 0),
            (2_500_000_000.0, 0),
            (0.000_000_5, 7),
            (-0.000_25, 5),
            (0.25, 2),
        ];
        let short = texts.map(|(value, decimals)| short(value, decimals));
        assert_eq!(short, ["1.235M", "2.5G", "5e-7", "-2.5e-4", "0.25"]);
    }
}
