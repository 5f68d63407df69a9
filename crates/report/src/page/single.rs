//! The page of one run.

use super::chart::{Chart, Line, Look, curves, scatter};
use super::ending::ending;
use super::figures::{
    bar, device_account, effects, fixes, is_own, largest, memory_beside, place, strategies, word,
};
use super::history::{self, evaluations, resumes, samples};
use super::ranks::ranks;
use super::run_files::RunFiles;
use super::view::{Fact, Page, Section, SectionItem};
use super::{configuration, timeline};
use crate::numbers::{exact, grouped};
use crate::scatter::{Scatter, ScatterPoint, unit_of_bytes};
use memory::format_bytes;
use serde_json::{Value, json};

/// The page of one run: settings, curves, memory, what else could have been, and how it ended.
pub(super) fn page(run: &RunFiles) -> Page {
    let mut course = course(&[(run.name(), run)]);
    if let Some(percent) = run.waited_percent() {
        course.in_text = true;
        course.items.push(SectionItem::Say(format!(
            "For {percent:.1} % of their time, steps waited for data; `--set data.prefetch=N` reads further ahead."
        )));
    }
    let parts = [
        out_of_memory(run),
        resumes(run),
        course,
        evaluations(run),
        samples(run.samples.iter().cloned().collect()),
        memory(run),
        ranks(run),
        settings(run),
        at_peak(run),
        alternatives(run),
    ];
    Page {
        title: run.name(),
        about: about(run),
        endings: vec![(String::new(), ending(run))],
        facts: facts(run),
        parts: parts
            .into_iter()
            .filter(|part| !part.items.is_empty())
            .collect(),
    }
}

/// What was trained, on what, with what.
pub(super) fn about(run: &RunFiles) -> String {
    let dtype = word(&run.plan["dtype"]);
    let mut about = vec![word(&run.begin["model"])];
    if let Some(parameters) = run.plan["parameters"].as_f64() {
        about.push(format!("{} parameters", grouped(parameters, 0)));
    }
    about.push(format!("{dtype} on {}", run.device()));
    if let Some(version) = run.begin["version"].as_str() {
        about.push(format!("trainer {version}"));
    }
    about.retain(|part| !part.is_empty());
    about.join(" · ")
}

fn facts(run: &RunFiles) -> Vec<Fact> {
    let mut facts = Vec::new();
    let mut fact = |name, value: Option<String>| {
        facts.extend(value.map(|value| Fact {
            name,
            value,
            note: String::new(),
        }));
    };
    fact("steps", run.steps.last().map(|last| last.step.to_string()));
    let epochs = run.last_step["epoch"].as_f64();
    fact("epochs", epochs.map(|epochs| epochs.to_string()));
    fact(
        "last loss",
        run.last_loss().map(|loss| format!("{loss:.4}")),
    );
    fact(
        "tokens/s, median",
        run.tokens_per_s().map(|speed| grouped(speed, 0)),
    );
    let bytes = |record: &Value, name: &str| record[name].as_u64().map(format_bytes);
    fact("planned peak", bytes(&run.plan, "peak_bytes"));
    fact("measured peak", bytes(&run.peak_step, "peak_bytes"));
    fact("resident set, at most", bytes(&run.end, "max_rss_bytes"));
    // After the steps and their last loss, so far as there are those.
    let at = facts
        .iter()
        .take_while(|fact| matches!(fact.name, "steps" | "epochs" | "last loss"));
    let at = at.count();
    facts.splice(at..at, history::facts(run));
    facts
}

fn out_of_memory(run: &RunFiles) -> Section {
    let (oom, mut items) = (&run.oom, Vec::new());
    if !oom.is_null() {
        let bytes = |name: &str| oom[name].as_u64().map_or("unknown".into(), format_bytes);
        let limit = oom["limit_bytes"].as_u64().map_or(String::new(), |bytes| {
            format!(
                " under a limit of {} ({} bytes)",
                format_bytes(bytes),
                exact(bytes)
            )
        });
        items.push(SectionItem::Say(format!(
            "{} for `{}` ({}; {}) was refused{limit}. The plan's peak is {}. The cause is {}.",
            bytes("requested_bytes"),
            word(&oom["name"]),
            word(&oom["category"]),
            place(&oom["phase"], &oom["layer"]),
            bytes("planned_peak_bytes"),
            cause(&word(&oom["cause"]), &word(&oom["space"])),
        )));
        match fixes(oom) {
            Some(table) => {
                let say = "With any of these the run fits; the cheapest stands first.";
                items.extend([SectionItem::Say(say.into()), SectionItem::Table(table)]);
            }
            None => items.push(SectionItem::Say(
                "No other setting that was tried is a fix.".into(),
            )),
        }
        if let Some(table) = largest(&oom["live_largest"]) {
            items.extend([
                SectionItem::Say("Live when it was refused:".into()),
                SectionItem::Table(table),
            ]);
        }
    }
    Section::new("Out of memory", items)
}

fn cause(cause: &str, space: &str) -> String {
    match (cause, space) {
        ("capacity", "host") => "that the host has too little memory".into(),
        ("capacity", _) => "that it does not fit".into(),
        ("fragmentation", _) => "fragmentation: there is room, but not in one piece".into(),
        ("other_process", _) => "another process on the device".into(),
        ("host", _) => "that the host has too little memory".into(),
        (other, _) => other.into(),
    }
}

fn settings(run: &RunFiles) -> Section {
    let mut items = Vec::new();
    if !run.config.is_empty() {
        items.push(match configuration::changed(&run.config) {
            Some(table) => SectionItem::Table(table),
            None => SectionItem::Say("Everything is as the defaults have it.".into()),
        });
        items.push(SectionItem::File("config.toml", run.config_text.clone()));
    }
    Section::not_in_text("Settings that are not the defaults", items)
}

/// Loss and throughput of runs, in the same pictures, with their evaluations.
pub(super) fn course(runs: &[(String, &RunFiles)]) -> Section {
    let lines = |of: fn(&super::run_files::Step) -> Option<f64>| {
        let line = |(index, (name, run)): (usize, &(String, &RunFiles))| Line {
            name: name.clone(),
            values: run
                .steps
                .iter()
                .map(|step| (step.step as f64, of(step)))
                .collect(),
            look: Look::Steps(index),
        };
        runs.iter().enumerate().map(line).collect::<Vec<_>>()
    };
    let mut losses = lines(|step| step.loss);
    let evaluations = evaluation_lines(runs);
    if let ([training], [_, ..]) = (losses.as_mut_slice(), evaluations.as_slice()) {
        training.name = "training".into();
    }
    losses.extend(evaluations);
    let resumes = runs.iter().flat_map(|(_, run)| &run.resumes);
    let resumed: Vec<u64> = resumes.map(|resume| resume.step).collect();
    let loss = curves("loss", 4, false, &losses, &resumed);
    let speed = curves(
        "tokens/s",
        0,
        true,
        &lines(|step| step.tokens_per_s),
        &resumed,
    );
    let load = curves(
        "most chosen expert / mean, worst layer",
        2,
        false,
        &lines(|step| step.expert_load),
        &resumed,
    );
    let charts: Vec<_> = loss.into_iter().chain(speed).chain(load).collect();
    let items = if charts.is_empty() {
        Vec::new()
    } else {
        vec![SectionItem::Charts(charts)]
    };
    Section::not_in_text("Loss and throughput", items)
}

/// The evaluations of those runs that have any.
fn evaluation_lines(runs: &[(String, &RunFiles)]) -> Vec<Line> {
    let line = |(index, (name, run)): (usize, &(String, &RunFiles))| Line {
        name: match runs.len() {
            1 => "evaluation".into(),
            _ => format!("{name}, evaluation"),
        },
        values: run
            .evaluations
            .iter()
            .map(|evaluation| (evaluation.step as f64, evaluation.loss))
            .collect(),
        look: Look::Evaluations(index),
    };
    let lines = runs.iter().enumerate().map(line);
    lines.filter(|line| !line.values.is_empty()).collect()
}

fn memory(run: &RunFiles) -> Section {
    let (plan, refused) = (&run.plan, refused(run));
    let (name, record) = match &refused {
        Some(record) => ("when refused", record),
        None => ("measured", &run.peak_step),
    };
    let mut items = vec![SectionItem::Say(verdict(run))];
    let longest = [plan, record]
        .iter()
        .filter_map(|record| record["peak_bytes"].as_u64())
        .max();
    let bars = [("planned", plan), (name, record)];
    let bars = bars
        .iter()
        .filter_map(|(name, record)| bar(name, record, longest?));
    let bars: Vec<_> = bars.collect();
    if bars.is_empty() {
        return Section::new("Memory", Vec::new());
    }
    items.push(SectionItem::Bars(bars));
    let heads = ["planned", name, "rounded"];
    let evaluation = ["planned_peak_bytes", "peak_bytes"].map(|name| &run.peak_evaluation[name]);
    items.push(SectionItem::Table(memory_beside(
        heads, plan, record, evaluation,
    )));
    if evaluation[0].as_u64() > evaluation[1].as_u64() {
        let say =
            "An evaluation takes less than was planned where its data do not fill a micro-batch.";
        items.push(SectionItem::Say(say.into()));
    }
    items.extend(device_account(record).map(SectionItem::Table));
    if let Some(picture) = &run.timeline {
        items.push(timeline::frame(picture));
    }
    Section::new("Memory", items)
}

/// What was live when a lease was refused, as a record, of a run that made no step.
fn refused(run: &RunFiles) -> Option<Value> {
    let live = run.oom["live_by_category"].as_object();
    let live = live.filter(|_| run.steps.is_empty())?;
    let bytes: u64 = live.values().filter_map(Value::as_u64).sum();
    Some(json!({ "peak_bytes": bytes, "peak_by_category": live }))
}

/// Whether the plan came true, to the byte.
fn verdict(run: &RunFiles) -> String {
    let differ = run
        .steps
        .iter()
        .filter(|step| step.beyond_plan != 0)
        .count();
    let all = run.steps.len();
    match (all, differ) {
        (0, _) => "No step was measured; this is the plan.".into(),
        (_, 0) => format!("The peak of every step ({all}) was the plan's, to the byte."),
        _ => format!(
            "In {differ} of {all} steps the peak was not the plan's; measured is the step with the largest peak."
        ),
    }
}

fn at_peak(run: &RunFiles) -> Section {
    let mut items = Vec::new();
    if let Some(table) = largest(&run.plan["largest_at_peak"]) {
        let peak = &run.plan;
        let place = place(&peak["peak_phase"], &peak["peak_layer"]);
        items.push(SectionItem::Say(format!("The peak is in {place}.")));
        items.push(SectionItem::Table(table));
    }
    Section::new("Largest tensors at the peak", items)
}

fn alternatives(run: &RunFiles) -> Section {
    let mut items = Vec::new();
    if let Some(table) = strategies(run) {
        items.extend(picture(run).map(|chart| SectionItem::Charts(vec![chart])));
        items.push(SectionItem::Table(table));
    }
    items.extend(effects(run).map(SectionItem::Table));
    Section::not_in_text("What else could have been", items)
}

/// Which strategies are better in peak and in FLOPs.
fn picture(run: &RunFiles) -> Option<Chart> {
    let strategies = run.plan["strategies"].as_array()?;
    let peak = |strategy: &Value| strategy["peak_bytes"].as_f64();
    let (unit, unit_bytes) = unit_of_bytes(strategies.iter().filter_map(peak));
    let point = |strategy: &Value| {
        let cost = 100.0 * strategy["recompute_flops_fraction"].as_f64()?;
        let offload = word(&strategy["offload_activations"]);
        let with = if matches!(offload.as_str(), "" | "none") {
            String::new()
        } else {
            format!(" + offload {offload}")
        };
        Some(ScatterPoint {
            name: word(&strategy["recompute"]) + &with,
            at: (cost, peak(strategy)? / unit_bytes),
            is_chosen: is_own(run, strategy),
            is_off_front: false,
        })
    };
    let mut points: Vec<ScatterPoint> = strategies.iter().filter_map(point).collect();
    let places: Vec<(f64, f64)> = points.iter().map(|point| point.at).collect();
    for point in &mut points {
        let (x, y) = point.at;
        let is_better = |other: &(f64, f64)| other.0 <= x && other.1 <= y && *other != point.at;
        point.is_off_front = places.iter().any(is_better);
    }
    let picture = Scatter {
        x_label: "extra FLOPs, %".into(),
        y_label: format!("planned peak, {unit}"),
        from_zero: false,
        points,
    };
    let caption = "a ring marks this run; where a point is faint, another one is better";
    let title = picture.y_label.clone();
    (!picture.points.is_empty()).then(|| scatter(&title, caption, &picture))
}
