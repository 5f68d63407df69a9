//! Curves and points, laid out for the template to draw. One size serves a phone and half of a wide page.

use crate::numbers::grouped;
use serde::Serialize;

const SIZE: (f64, f64) = (400.0, 240.0);
/// Where the axes cross, and the opposite corner.
const CROSS: (f64, f64) = (58.0, 206.0);
const CORNER: (f64, f64) = (390.0, 12.0);
/// Buckets of a curve; each shows its least and its most, so that no spike gets lost.
const BUCKETS: usize = 200;
/// More evaluations than these are a line without marks.
const MARKS: usize = 60;

/// A picture with axes.
#[derive(Serialize)]
pub(super) struct Chart {
    title: String,
    /// What stands below it until something is pointed at.
    caption: String,
    size: (f64, f64),
    cross: (f64, f64),
    corner: (f64, f64),
    x_label: String,
    x_ticks: Vec<Tick>,
    y_ticks: Vec<Tick>,
    curves: Vec<Curve>,
    dots: Vec<Dot>,
    /// Where runs were resumed, across.
    resumed: Vec<Mark>,
}

/// A line from bottom to top.
#[derive(Serialize)]
struct Mark {
    at: f64,
    step: u64,
}

#[derive(Serialize)]
struct Tick {
    at: f64,
    /// The middle of its text, if it stands below the picture: no letter is cut off at the edges.
    middle: f64,
    text: String,
}

/// Room that a letter is taken to need, at the least.
const LETTER: f64 = 6.7;
/// Letters that have room before the picture.
const LETTERS_BEFORE: usize = 7;

impl Tick {
    fn new(at: f64, text: String) -> Tick {
        let half = 0.5 * LETTER * text.chars().count() as f64;
        let middle = at.clamp(half, SIZE.0 - half);
        Tick { at, middle, text }
    }
}

/// A line; broken where values are missing.
#[derive(Serialize)]
struct Curve {
    name: String,
    class: String,
    pieces: Vec<String>,
    /// Its values, where each is to be seen.
    marks: Vec<(f64, f64)>,
    /// Place and text of each point, for the script.
    points: String,
}

/// A point with a name.
#[derive(Serialize)]
struct Dot {
    at: (f64, f64),
    class: String,
    name: String,
    /// Where its name goes, and which way; none where there is no room.
    label: Option<(f64, f64, &'static str)>,
    is_chosen: bool,
    is_dominated: bool,
}

/// Values over steps.
pub(super) struct Line {
    pub(super) name: String,
    pub(super) values: Vec<(f64, Option<f64>)>,
    pub(super) look: Look,
}

/// How a line is drawn: whose it is, of the runs on the page.
#[derive(Clone, Copy)]
pub(super) enum Look {
    /// Values of every step.
    Steps(usize),
    /// Values of some steps, each marked where they are few, and the least of them with a ring.
    Evaluations(usize),
}

impl Look {
    fn class(self) -> String {
        match self {
            Look::Steps(run) => format!("n{run}"),
            Look::Evaluations(run) => format!("e{run}"),
        }
    }
}

/// A named point of a scatter plot; less is better both ways.
pub(super) struct NamedPoint {
    pub(super) name: String,
    pub(super) at: (f64, f64),
    pub(super) is_chosen: bool,
}

/// Curves over steps; none where there is nothing to draw. `decimals` are those of values that are pointed at, and after the
/// steps `resumed` runs were resumed.
pub(super) fn curves(
    title: &str,
    decimals: usize,
    from_zero: bool,
    lines: &[Line],
    resumed: &[u64],
) -> Option<Chart> {
    let all: Vec<(f64, f64)> = lines.iter().flat_map(finite).collect();
    let (x, mut y) = (
        Axis::over(all.iter().map(|at| at.0))?,
        Axis::over(all.iter().map(|at| at.1))?,
    );
    if from_zero {
        y = Axis::new(0.0, y.most.max(f64::MIN_POSITIVE));
    }
    let y = y.widened();
    let named = lines.len() > 1;
    let text = |line: &Line, (step, value): (f64, f64)| {
        let name = if named {
            format!("{}: ", line.name)
        } else {
            String::new()
        };
        format!("{name}step {step}: {}", grouped(value, decimals))
    };
    let last = |line: &Line| finite(line).last().map(|at| text(line, *at));
    let captions: Vec<String> = lines.iter().filter_map(last).collect();
    let curve = |line: &Line| Curve {
        name: line.name.clone(),
        class: line.look.class(),
        pieces: pieces(line, &x, &y),
        marks: marks(line, &x, &y),
        points: points(line, |at| (pixel(&x, &y, at), text(line, at))),
    };
    let mut dots: Vec<Dot> = lines.iter().filter_map(|line| best(line, &x, &y)).collect();
    label(&mut dots);
    Some(Chart {
        curves: lines.iter().map(curve).collect(),
        dots,
        resumed: resumed.iter().filter_map(|step| mark(*step, &x)).collect(),
        ..Chart::empty(title, &captions.join("\n"), ("step", &x), &y)
    })
}

fn finite(line: &Line) -> Vec<(f64, f64)> {
    let values = line.values.iter();
    let values = values.filter_map(|(x, y)| Some((*x, y.filter(|y| y.is_finite())?)));
    values.collect()
}

/// The places of a few evaluations.
fn marks(line: &Line, x: &Axis, y: &Axis) -> Vec<(f64, f64)> {
    match line.look {
        Look::Evaluations(_) if line.values.len() <= MARKS => {
            finite(line).into_iter().map(|at| pixel(x, y, at)).collect()
        }
        _ => Vec::new(),
    }
}

/// The line of a step; none where it is beyond the picture.
fn mark(step: u64, x: &Axis) -> Option<Mark> {
    let value = step as f64;
    let at = pixel(x, x, (value, x.least)).0;
    (x.least..=x.most)
        .contains(&value)
        .then_some(Mark { at, step })
}

/// The least evaluation, the first of them.
fn best(line: &Line, x: &Axis, y: &Axis) -> Option<Dot> {
    let Look::Evaluations(_) = line.look else {
        return None;
    };
    let values = finite(line).into_iter();
    let least = values.min_by(|one, other| one.1.total_cmp(&other.1))?;
    Some(Dot {
        at: pixel(x, y, least),
        class: line.look.class(),
        name: "best".into(),
        label: None,
        is_chosen: true,
        is_dominated: false,
    })
}

/// Named points, of which the front that nothing dominates is told apart.
pub(super) fn scatter(
    title: &str,
    caption: &str,
    x_label: &str,
    points: &[NamedPoint],
) -> Option<Chart> {
    let x = Axis::over(points.iter().map(|point| point.at.0))?.widened();
    let y = Axis::over(points.iter().map(|point| point.at.1))?.widened();
    let mut dots: Vec<Dot> = points
        .iter()
        .map(|point| Dot {
            at: pixel(&x, &y, point.at),
            class: "n0".into(),
            name: point.name.clone(),
            label: None,
            is_chosen: point.is_chosen,
            is_dominated: points.iter().any(|other| dominates(other.at, point.at)),
        })
        .collect();
    // Names of what matters most find room first.
    dots.sort_by_key(|dot| (!dot.is_chosen, dot.is_dominated));
    label(&mut dots);
    Some(Chart {
        dots,
        ..Chart::empty(title, caption, (x_label, &x), &y)
    })
}

fn dominates(one: (f64, f64), other: (f64, f64)) -> bool {
    one.0 <= other.0 && one.1 <= other.1 && one != other
}

/// Finds room for names beside their points; lines are taken to be 11 high.
fn label(dots: &mut [Dot]) {
    let mut taken: Vec<[f64; 4]> = dots
        .iter()
        .map(|dot| {
            [
                dot.at.0 - 4.0,
                dot.at.0 + 4.0,
                dot.at.1 - 4.0,
                dot.at.1 + 4.0,
            ]
        })
        .collect();
    for dot in dots {
        let ((x, y), width) = (dot.at, LETTER * dot.name.chars().count() as f64);
        let beside = if dot.is_chosen { 12.0 } else { 7.0 };
        let places = [0.0, -9.0, 9.0].into_iter().flat_map(|down| {
            let y = y + down;
            [
                (x + beside, y, "start", x + beside),
                (x - beside, y, "end", x - beside - width),
            ]
        });
        let free = places.into_iter().find_map(|(at, y, anchor, left)| {
            let [right, top, bottom] = [left + width, y - 5.5, y + 5.5];
            let inside = left > CROSS.0 && right < CORNER.0 && top > CORNER.1 && bottom < CROSS.1;
            let is_free = taken
                .iter()
                .all(|[l, r, t, b]| right < *l || left > *r || bottom < *t || top > *b);
            (inside && is_free).then_some(((at, y + 4.0, anchor), [left, right, top, bottom]))
        });
        if let Some((place, area)) = free {
            dot.label = Some(place);
            taken.push(area);
        }
    }
}

impl Chart {
    fn empty(title: &str, caption: &str, (x_label, x): (&str, &Axis), y: &Axis) -> Chart {
        let across = |value| pixel(x, y, (value, y.least)).0;
        let up = |value| pixel(x, y, (x.least, value)).1;
        Chart {
            title: title.into(),
            caption: caption.into(),
            size: SIZE,
            cross: CROSS,
            corner: CORNER,
            x_label: x_label.into(),
            x_ticks: x.ticks(5.0, across),
            y_ticks: y.ticks(4.0, up),
            curves: Vec::new(),
            dots: Vec::new(),
            resumed: Vec::new(),
        }
    }
}

/// What an axis spans.
struct Axis {
    least: f64,
    most: f64,
}

impl Axis {
    fn new(least: f64, most: f64) -> Axis {
        Axis { least, most }
    }

    fn over(values: impl Iterator<Item = f64>) -> Option<Axis> {
        let of_two =
            |(least, most): (f64, f64), (value, _): (f64, f64)| (least.min(value), most.max(value));
        let (least, most) = values.map(|value| (value, value)).reduce(of_two)?;
        Some(Axis { least, most })
    }

    /// A little more at both ends, but not below zero where nothing is.
    fn widened(self) -> Axis {
        let more = match self.most - self.least {
            0.0 => self.most.abs().max(1e-9) * 0.1,
            span => span * 0.06,
        };
        let least = self.least - more;
        Axis {
            least: if self.least >= 0.0 {
                least.max(0.0)
            } else {
                least
            },
            most: self.most + more,
        }
    }

    /// Round values, about `count` of them.
    fn ticks(&self, count: f64, at: impl Fn(f64) -> f64) -> Vec<Tick> {
        let raw = (self.most - self.least) / count;
        if raw <= 0.0 || !raw.is_finite() {
            return vec![Tick::new(at(self.least), short(self.least, 0))];
        }
        let magnitude = 10f64.powf(raw.log10().floor());
        let steps = [1.0, 2.0, 5.0, 10.0].map(|step| step * magnitude);
        let step = steps.into_iter().find(|step| *step >= raw).unwrap_or(raw);
        let decimals = (-step.log10().floor()).max(0.0) as usize;
        let (first, last) = ((self.least / step).ceil(), (self.most / step).floor());
        let values = (first as i64..=last as i64).map(|index| index as f64 * step);
        values
            .map(|value| Tick::new(at(value), short(value, decimals)))
            .collect()
    }
}

fn pixel(x: &Axis, y: &Axis, (at_x, at_y): (f64, f64)) -> (f64, f64) {
    let share = |axis: &Axis, value: f64| match axis.most - axis.least {
        0.0 => 0.5,
        span => (value - axis.least) / span,
    };
    let place =
        |from: f64, to: f64, share: f64| (10.0 * (from + (to - from) * share)).round() / 10.0;
    (
        place(CROSS.0, CORNER.0, share(x, at_x)),
        place(CROSS.1, CORNER.1, share(y, at_y)),
    )
}

/// The extremes of each bucket of steps, in their order; gaps stay.
fn thinned(values: &[(f64, Option<f64>)]) -> Vec<(f64, Option<f64>)> {
    let size = values.len().div_ceil(BUCKETS);
    if size <= 2 {
        return values.to_vec();
    }
    let extremes = |bucket: &[(f64, Option<f64>)]| {
        let finite = || bucket.iter().filter(|at| at.1.is_some());
        let order = |a: &&(f64, Option<f64>), b: &&(f64, Option<f64>)| {
            a.1.unwrap_or(0.0).total_cmp(&b.1.unwrap_or(0.0))
        };
        let mut kept: Vec<(f64, Option<f64>)> = bucket
            .iter()
            .find(|at| at.1.is_none())
            .into_iter()
            .copied()
            .collect();
        kept.extend(finite().min_by(order));
        kept.extend(finite().max_by(order));
        kept.sort_by(|a, b| a.0.total_cmp(&b.0));
        kept.dedup();
        kept
    };
    values.chunks(size).flat_map(extremes).collect()
}

/// Lines between gaps, as SVG has them. A value that stands alone becomes a line of no length, drawn as a dot.
fn pieces(line: &Line, x: &Axis, y: &Axis) -> Vec<String> {
    let values = thinned(&line.values);
    let runs = values.split(|(_, value)| !value.is_some_and(f64::is_finite));
    let piece = |run: &[(f64, Option<f64>)]| {
        let places = run.iter().map(|(at, value)| {
            let (x, y) = pixel(x, y, (*at, value.unwrap_or(0.0)));
            format!("{x},{y}")
        });
        let mut places: Vec<String> = places.collect();
        if let [alone] = places.as_slice() {
            places.push(alone.clone());
        }
        places.join(" ")
    };
    runs.filter(|run| !run.is_empty()).map(piece).collect()
}

fn points(line: &Line, place: impl Fn((f64, f64)) -> ((f64, f64), String)) -> String {
    let values = thinned(&line.values);
    let finite = values
        .iter()
        .filter_map(|(x, y)| Some((*x, y.filter(|y| y.is_finite())?)));
    let places: Vec<((f64, f64), String)> = finite.map(place).collect();
    serde_json::to_string(&places).unwrap_or_default()
}

/// A number for an axis: what has no room is written with a unit, or as a power of ten.
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
        // Ticks are one or two digits and a power of ten.
        None => format!("{:e}", format!("{value:.1e}").parse().unwrap_or(value)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_within() {
        let texts = |least, most| {
            let ticks = Axis::new(least, most).ticks(5.0, |value| value);
            ticks.into_iter().map(|tick| tick.text).collect::<Vec<_>>()
        };
        assert_eq!(texts(1.0, 20.0), ["5", "10", "15", "20"]);
        assert_eq!(texts(2.05, 2.45), ["2.1", "2.2", "2.3", "2.4"]);
        assert_eq!(texts(3.0, 3.0), ["3"]);
    }

    /// Labels of any values stay within the picture: those of x below it, those of y before it.
    #[test]
    fn no_label_is_cut_off() {
        let half = |tick: &Tick| 0.5 * LETTER * tick.text.chars().count() as f64;
        for (x, y) in [
            (1000.0, 1.0),
            (100_000.0, 2e-7),
            (12_345_678.0, 3e12),
            (7.0, 1_234_567.0),
        ] {
            let line = Line {
                name: "values".into(),
                values: vec![(0.0, Some(0.0)), (x, Some(y))],
                look: Look::Steps(0),
            };
            let chart = curves("", 2, false, &[line], &[]).unwrap();
            assert!(chart.x_ticks.len() > 1 && chart.y_ticks.len() > 1);
            for tick in &chart.x_ticks {
                let (left, right) = (tick.middle - half(tick), tick.middle + half(tick));
                assert!(
                    left >= 0.0 && right <= SIZE.0,
                    "{} at {}",
                    tick.text,
                    tick.middle
                );
            }
            for tick in &chart.y_ticks {
                assert!(2.0 * half(tick) <= CROSS.0 - 6.0, "{}", tick.text);
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

    /// A million steps become a few hundred points, and the one spike among them is still there.
    #[test]
    fn long_runs_keep_their_spikes_and_gaps() {
        let value = |step: usize| match step {
            777_777 => Some(99.0),
            500_000 => None,
            _ => Some(1.0),
        };
        let values: Vec<_> = (0..1_000_000)
            .map(|step| (step as f64, value(step)))
            .collect();
        let thin = thinned(&values);
        assert!(thin.len() <= 3 * BUCKETS, "{}", thin.len());
        assert!(thin.contains(&(777_777.0, Some(99.0))) && thin.contains(&(500_000.0, None)));
        let line = Line {
            name: "loss".into(),
            values,
            look: Look::Steps(0),
        };
        let (x, y) = (Axis::new(0.0, 1e6), Axis::new(0.0, 100.0));
        assert_eq!(pieces(&line, &x, &y).len(), 2);
    }

    /// The scale is for all lines; of equal evaluations the first is the best, and one that is not finite is none.
    #[test]
    fn the_best_evaluation_is_marked() {
        let line = |losses: &[f64], look| Line {
            name: "loss".into(),
            values: losses
                .iter()
                .zip(1..)
                .map(|(loss, step)| (f64::from(step), Some(*loss)))
                .collect(),
            look,
        };
        let lines = [
            line(&[5.0, 4.0, 4.0, 4.0, 4.5], Look::Steps(0)),
            line(&[f64::NAN, 3.0, 2.0, 2.0, 9.0], Look::Evaluations(0)),
        ];
        let chart = curves("loss", 4, false, &lines, &[3, 9]).unwrap();
        let [steps, evaluations] = &chart.curves[..] else {
            unreachable!("two lines are two curves")
        };
        assert_eq!((steps.class.as_str(), steps.marks.len()), ("n0", 0));
        assert_eq!(
            (evaluations.class.as_str(), evaluations.marks.len()),
            ("e0", 4)
        );
        let [best] = &chart.dots[..] else {
            unreachable!("only evaluations have a best one")
        };
        assert_eq!((best.class.as_str(), best.at), ("e0", evaluations.marks[1]));
        let resumed: Vec<(u64, f64)> = chart
            .resumed
            .iter()
            .map(|mark| (mark.step, mark.at))
            .collect();
        assert_eq!(resumed, [(3, best.at.0)], "step 9 is beyond the picture");
    }

    #[test]
    fn names_do_not_lie_on_one_another() {
        let point = |name: &str, at| NamedPoint {
            name: name.into(),
            at,
            is_chosen: name == "full",
        };
        let points = [
            point("none", (0.0, 10.0)),
            point("full", (30.0, 4.0)),
            point("the same place", (30.0, 4.01)),
            point("nearly the same place", (30.1, 4.02)),
        ];
        let chart = scatter("", "", "", &points).unwrap();
        assert_eq!(
            (chart.dots[0].name.as_str(), chart.dots[0].is_dominated),
            ("full", false)
        );
        let labels: Vec<_> = chart.dots.iter().filter_map(|dot| dot.label).collect();
        assert!(labels.len() >= 2);
        for (index, one) in labels.iter().enumerate() {
            assert!(labels[..index].iter().all(|other| one != other));
        }
    }
}
