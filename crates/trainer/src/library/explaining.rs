//! Finds settings that fit where memory was refused.

use super::Trainer;
use crate::failure::Failure;
use planner::OomReport;
use settings::Config;

impl Trainer {
    /// A failure of this trainer's, with what would help if memory was refused. It takes a while: other settings are planned.
    pub fn explain(&self, failure: Failure) -> Failure {
        explained(failure, &self.config)
    }
}

/// A failure of a trainer of this configuration, with what would help if memory was refused.
pub(super) fn explained(failure: Failure, config: &Config) -> Failure {
    let Failure::OutOfMemory { rank, error, .. } = failure else {
        return failure;
    };
    let report = OomReport::new(&error, config, config.device().target());
    let (hints, fixes) = report.map_or_else(
        |_| Default::default(),
        |report| (report.hints(), report.fixes),
    );
    Failure::OutOfMemory {
        rank,
        error,
        hints,
        fixes,
    }
}
