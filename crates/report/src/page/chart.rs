//! Draws curves over steps, and strategies as points, for a page. The size suits a phone and half of a wide page.

use crate::axes::{Axis, Dot, Frame};
use crate::numbers::grouped;
use crate::scatter::Scatter;
use crate::svg::{Svg, escaped, tenths};
use serde::Serialize;

pub(crate) const FRAME: Frame = Frame {
    size: (400.0, 240.0),
    cross: (58.0, 206.0),
    corner: (390.0, 12.0),
    letter: (6.7, 11.0),
};
/// Number of buckets of a curve. Each shows its lowest and highest value, so that spikes stay visible.
const BUCKETS: usize = 200;
/// With more evaluations than this, the line has no marks.
const MARKS: usize = 60;

/// A picture with axes.
#[derive(Serialize)]
pub(super) struct Chart {
    title: String,
    /// The text below it while no step is pointed at.
    caption: String,
    /// The names of its curves, if there are several.
    names: Vec<CurveName>,
    /// Whether a run was resumed.
    is_resumed: bool,
    svg: String,
}

/// The name of a curve, for the legend.
#[derive(Serialize)]
struct CurveName {
    name: String,
    class: &'static str,
    has_marks: bool,
}

/// Values over steps.
pub(super) struct Line {
    pub(super) name: String,
    pub(super) values: Vec<(f64, Option<f64>)>,
    pub(super) look: Look,
}

/// How a line is drawn. The number is that of its run on the page.
#[derive(Clone, Copy)]
pub(super) enum Look {
    /// Values of every step.
    Steps(usize),
    /// Values of some steps. Each is marked if there are few, and the lowest has a ring.
    Evaluations(usize),
}

impl Look {
    /// The CSS class of its colour. A page has at most two runs.
    fn class(self) -> &'static str {
        match self {
            Look::Steps(0) => "n0",
            Look::Steps(_) => "n1",
            Look::Evaluations(0) => "e0",
            Look::Evaluations(_) => "e1",
        }
    }
}

/// Curves over steps; none without values. `decimals` are for values under the pointer, and `resumed` are the steps
/// after which runs were resumed.
pub(super) fn curves(
    title: &str,
    decimals: usize,
    from_zero: bool,
    lines: &[Line],
    resumed: &[u64],
) -> Option<Chart> {
    let all: Vec<(f64, f64)> = lines.iter().flat_map(finite).collect();
    let x = Axis::over(all.iter().map(|at| at.0))?;
    let y = Axis::over(all.iter().map(|at| at.1))?;
    let y = if from_zero { y.starting_at_zero() } else { y }.widened();
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
    let seen = |step: &&u64| (x.least..=x.most).contains(&(**step as f64));
    let resumed: Vec<u64> = resumed.iter().filter(seen).copied().collect();

    let mut svg = Svg::in_page(FRAME.size, &format!("{title} over step"));
    let axes = (&x, &y);
    FRAME.draw(&mut svg, axes, "step");
    let upright = format!("y1=\"{}\" y2=\"{}\"", FRAME.corner.1, FRAME.cross.1);
    for step in &resumed {
        let at = FRAME.pixel(axes, (*step as f64, y.least)).0;
        let line = format!("class=\"resumed\" x1=\"{at}\" x2=\"{at}\" {upright}");
        let title = format!("resumed after step {step}");
        svg.element("line", &line, Some(&title));
    }
    for line in lines {
        draw_curve(&mut svg, axes, line, |at| text(line, at));
    }
    let best: Vec<Dot> = lines.iter().filter_map(|line| best(line, axes)).collect();
    FRAME.draw_dots(&mut svg, &best, &[]);
    let name = |line: &Line| CurveName {
        name: line.name.clone(),
        class: line.look.class(),
        has_marks: has_marks(line),
    };
    Some(Chart {
        title: title.into(),
        caption: captions.join("\n"),
        names: lines.iter().filter(|_| named).map(name).collect(),
        is_resumed: !resumed.is_empty(),
        svg: svg.finish(),
    })
}

/// Draws a line, with the texts that the script shows for its points.
fn draw_curve(
    svg: &mut Svg,
    axes: (&Axis, &Axis),
    line: &Line,
    text: impl Fn((f64, f64)) -> String,
) {
    let thin = thinned(&line.values);
    let shown = thin.iter().filter_map(is_finite);
    let percent = |at| tenths(100.0 * FRAME.pixel(axes, at).0 / FRAME.size.0);
    let points: Vec<_> = shown.map(|at| (percent(at), text(at))).collect();
    let points = serde_json::to_string(&points).unwrap_or_default();
    let class = line.look.class();
    svg.group(&format!(
        "class=\"curve {class}\" data-points=\"{}\"",
        escaped(&points)
    ));
    for piece in pieces(&thin, axes) {
        svg.element("polyline", &format!("points=\"{piece}\""), None);
    }
    for at in finite(line).into_iter().filter(|_| has_marks(line)) {
        svg.circle("", FRAME.pixel(axes, at), 2.6);
    }
    svg.end();
}

/// Strategies as points, for a page.
pub(super) fn scatter(title: &str, caption: &str, scatter: &Scatter) -> Chart {
    let label = format!("{title} over {}", scatter.x_label);
    let mut svg = Svg::in_page(FRAME.size, &label);
    scatter.draw(&mut svg, &FRAME);
    Chart {
        title: title.into(),
        caption: caption.into(),
        names: Vec::new(),
        is_resumed: false,
        svg: svg.finish(),
    }
}

fn is_finite((x, y): &(f64, Option<f64>)) -> Option<(f64, f64)> {
    Some((*x, y.filter(|y| y.is_finite())?))
}

fn finite(line: &Line) -> Vec<(f64, f64)> {
    line.values.iter().filter_map(is_finite).collect()
}

/// Whether each value is marked: only for few evaluations.
fn has_marks(line: &Line) -> bool {
    matches!(line.look, Look::Evaluations(_)) && line.values.len() <= MARKS
}

/// The first of the lowest evaluations.
fn best(line: &Line, axes: (&Axis, &Axis)) -> Option<Dot> {
    let Look::Evaluations(_) = line.look else {
        return None;
    };
    let values = finite(line).into_iter();
    let least = values.min_by(|one, other| one.1.total_cmp(&other.1))?;
    Some(Dot {
        at: FRAME.pixel(axes, least),
        class: line.look.class(),
        name: "best".into(),
        is_chosen: true,
        is_off_front: false,
    })
}

/// The lowest and highest value of each bucket of steps, in order. Gaps stay.
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

/// Paths between gaps. A single value becomes a line of length 0, which is drawn as a dot.
fn pieces(values: &[(f64, Option<f64>)], axes: (&Axis, &Axis)) -> Vec<String> {
    let runs = values.split(|value| is_finite(value).is_none());
    let piece = |run: &[(f64, Option<f64>)]| {
        let places = run.iter().filter_map(is_finite).map(|at| {
            let (x, y) = FRAME.pixel(axes, at);
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A million steps become a few hundred points, and the only spike must still be there.
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
        let axis = |most| Axis { least: 0.0, most };
        assert_eq!(pieces(&thin, (&axis(1e6), &axis(100.0))).len(), 2);
    }

    /// All lines share a scale. The first of equal evaluations is the best, and non-finite values do not count.
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
        let svg = curves("loss", 4, false, &lines, &[3, 9]).unwrap().svg;
        let groups: Vec<&str> = svg.split("<g class=").skip(1).collect();
        let [steps, evaluations, best] = groups[..] else {
            unreachable!("two lines are two curves, and only evaluations have a best one")
        };
        let circles = |group: &str| -> Vec<String> {
            let circles = group.split("<circle ").skip(1);
            let place = |circle: &str| circle.split('"').skip(3).step_by(2).take(2).collect();
            circles.map(place).collect()
        };
        assert!(steps.starts_with("\"curve n0\"") && circles(steps).is_empty());
        assert!(evaluations.starts_with("\"curve e0\""));
        let marks = circles(evaluations);
        assert_eq!(marks.len(), 4);
        assert!(best.starts_with("\"dot e0 chosen\""));
        assert_eq!(circles(best), [marks[1].clone(), marks[1].clone()]);
        let resumed: Vec<&str> = svg.split("class=\"resumed\" x1=\"").skip(1).collect();
        assert_eq!(resumed.len(), 1, "step 9 is beyond the picture");
        let at = resumed[0].split_once('"').unwrap().0;
        assert!(best.contains(&format!("cx=\"{:.1}\"", at.parse::<f64>().unwrap())));
    }
}
