//! Whether what is planned fits: in words, and as the exit code of the plan.

use crate::decisions::{Decided, naming_head_chunk};
use crate::failure::{Failure, Result};
use crate::limits::limit_of_plan;
use memory::format_bytes;
use planner::{Advice, Largest, OomReport, Plan, first_refused};
use settings::{Resolved, Settings};

/// Peaks that a limit in bytes has to hold, each with whose it is: those of all stages of a pipeline, or the plan's. A limit as a share
/// of a device cannot be compared without it.
fn limited(resolved: &Resolved, plan: &Plan) -> Option<(u64, Vec<(String, u64)>)> {
    let limit = limit_of_plan(&resolved.config)?;
    let stages = plan.ranks.iter().flat_map(|ranks| &ranks.pipeline_stages);
    let stages = stages.map(|stage| {
        (
            format!("the peak of stage {}", stage.stage),
            stage.peak_bytes,
        )
    });
    let mut all: Vec<(String, u64)> = stages.collect();
    if all.is_empty() {
        all.push(("the peak".into(), plan.most_bytes()));
    }
    Some((limit, all))
}

/// Whether the plan fits the limit.
pub(super) fn verdict(resolved: &Resolved, plan: &Plan) -> String {
    let Some((limit, peaks)) = limited(resolved, plan) else {
        return String::new();
    };
    let lines = peaks.into_iter().map(|(what, peak)| {
        let fits = match peak <= limit {
            true => "fits",
            false => "does not fit",
        };
        let size = format_bytes(limit);
        format!("\n{what} {fits} the limit of {size} ({limit} bytes)")
    });
    lines.collect::<String>() + "\n"
}

/// Ends a plan with the exit code of a run that does not fit: what was asked for has no answer, or a limit is exceeded.
pub(super) fn refuse_too_large(plan: &Plan, decided: &Decided) -> Result {
    let too_large = |reason: String, hints| Err(Failure::DoesNotFit { reason, hints });
    if let Some(Largest { what, next, .. }) = plan.largest.as_ref().filter(|it| it.value.is_none())
    {
        let hint = "`trainer plan --device-memory SIZE` with the same flags, without --largest, looks for what makes it fit";
        return too_large(
            format!("no {what} fits, not even {next}"),
            vec![hint.into()],
        );
    }
    if let Some(Advice { needs_bytes, .. }) = plan.advice.as_ref().filter(|advice| !advice.fits) {
        let least = format_bytes(*needs_bytes);
        let reason =
            format!("nothing that is known here makes the run fit: the least needs {least}");
        return too_large(reason, Vec::new());
    }
    if plan
        .layouts
        .as_ref()
        .is_some_and(|it| it.layouts.is_empty())
    {
        return too_large(
            "no layout of these ranks was found that fits".into(),
            Vec::new(),
        );
    }
    // The largest that fits a limit is the answer, whatever the run is as it is.
    let Some((limit, peaks)) = limited(decided, plan).filter(|_| plan.largest.is_none()) else {
        return Ok(());
    };
    let Some((what, peak)) = peaks.into_iter().find(|(_, peak)| *peak > limit) else {
        return Ok(());
    };
    let reason = format!(
        "{what} is {} ({peak} bytes), which does not fit the limit of {} ({limit} bytes)",
        format_bytes(peak),
        format_bytes(limit)
    );
    too_large(reason, fixes(decided, limit)?)
}

/// The fixes that a run under this limit would be told of.
fn fixes(decided: &Decided, limit: u64) -> Result<Vec<String>> {
    let (config, target) = (&decided.config, decided.device().target());
    let Some(error) = first_refused(&Settings::new(config)?, target, limit)? else {
        return Ok(Vec::new());
    };
    let mut report = OomReport::new(&error, config, target)?;
    naming_head_chunk(report.sets(), config, decided)?;
    Ok(report.hints())
}
