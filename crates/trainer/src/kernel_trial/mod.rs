//! Kernels for one GPU alone are tried before a run takes them: each family in a process of its own, beside those for all GPUs, and
//! against a clock. A kernel that faults leaves a context that cannot be used, and one that hangs cannot be stopped; so this process has
//! not touched the GPU by then, and a verdict against one family says nothing of the other.
//!
//! What comes of it is kept for all runs with the same GPU, driver, build and widths.

mod child;
mod kept;
mod widths;

pub(crate) use kept::{all_against, path as kept_at};
pub(crate) use widths::{AttentionWidths, ELEMENTS_MAX, ExpertWidths, Widths};

use kernels::cuda::DeviceFacts;
use serde::{Deserialize, Serialize};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How long a trial may take.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

/// What a trial's process says on its standard error when the GPU is open and kernels for 9.0 come next: only after that a process that
/// does not end says something about them.
pub(crate) const BEGUN: &str = "kernels for 9.0 are launched";

/// The hidden command that a trial's process carries out.
pub(crate) const COMMAND: &str = "try-kernels";

/// What came of a trial.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "verdict", content = "reason", rename_all = "snake_case")]
pub(crate) enum Verdict {
    /// Results are right, and the same each time.
    Passed,
    /// A result is further from that of the other kernels than sums in another order are.
    Wrong(String),
    /// The same operation had other bits the second time.
    TwoResults(String),
    /// The device, or the process, failed.
    Faulted(String),
    /// It was not done in time.
    Hung,
    /// Nothing was tried, for a reason that says nothing about the kernels.
    Untried(String),
}

impl Verdict {
    /// Whether it says something about the kernels, which holds for later runs.
    pub(crate) fn is_kept(&self) -> bool {
        !matches!(self, Verdict::Untried(_))
    }

    /// Why the kernels are not taken, if not: what they did in a trial.
    pub(crate) fn against(&self) -> Option<String> {
        Some(match self {
            Verdict::Passed => return None,
            Verdict::Wrong(what) => format!("were wrong in a trial: {what}"),
            Verdict::TwoResults(what) => format!("had two results in a trial: {what}"),
            Verdict::Faulted(what) => format!("failed in a trial: {what}"),
            Verdict::Hung => format!("were not done with a trial after {} s", DEADLINE.as_secs()),
            Verdict::Untried(why) => format!("could not be tried: {why}"),
        })
    }
}

/// Whether this program has [`COMMAND`]: the library is part of others, which do not.
static HAS_COMMAND: AtomicBool = AtomicBool::new(false);

/// Says that this program has [`COMMAND`].
pub(crate) fn this_program_has_the_command() {
    HAS_COMMAND.store(true, Ordering::Relaxed);
}

/// What this process's trials came to. Files of verdicts are of all GPUs of a name, and another process may write there.
static OWN: Mutex<Vec<(usize, Widths, Verdict)>> = Mutex::new(Vec::new());

/// The verdict on kernels for 9.0 at these widths: that of this process's trial, the one that is kept, or that of a trial,
/// which is kept then.
pub(crate) fn verdict(gpu: &DeviceFacts, widths: Widths) -> Verdict {
    let own = OWN.lock().expect("no thread panics");
    let known = own
        .iter()
        .find(|(index, of, _)| (*index, *of) == (gpu.index, widths));
    let known = known.map(|(.., verdict)| verdict.clone());
    drop(own);
    known
        .or_else(|| kept::find(gpu, widths))
        .unwrap_or_else(|| tried(gpu, widths))
}

/// The verdict of a trial, which is kept.
pub(crate) fn tried(gpu: &DeviceFacts, widths: Widths) -> Verdict {
    if !HAS_COMMAND.load(Ordering::Relaxed) {
        return Verdict::Untried(
            "this program cannot try them in a process of its own; `trainer profile` with the same settings does, and keeps the verdict"
                .into(),
        );
    }
    tracing::debug!("kernels for 9.0 are tried: {widths}");
    let verdict = child::try_kernels(gpu.index, widths);
    if verdict.is_kept() {
        kept::keep(gpu, widths, &verdict);
    }
    let mut own = OWN.lock().expect("no thread panics");
    own.push((gpu.index, widths, verdict.clone()));
    verdict
}
