//! Checks whether disks have room for what a run saves, before anything is written.

use super::preparing::Prepared;
use super::resuming::Resumed;
use super::saver::Saver;
use crate::failure::Result;
use crate::job::Job;
use crate::limits::{states_on_disk, total_bytes};
use crate::whole_model::copied_bytes;
use checkpoint::saved;
use files::Disk;
use memory::Home;
use planner::{DiskNeed, NoDiskRoom, Saved, SystemDisks};
use std::path::Path;

/// An upper bound for a checkpoint's files of unknown sizes: its state, manifest, and index of ranks.
const UNKNOWN_FILES: u64 = 1 << 20;

impl Prepared {
    /// Refuses a run if the disks have no room for it, unless it is forced. Returns the bytes of a checkpoint's
    /// tensors, of all ranks together.
    pub(super) fn refuse_without_room_to_save(&self, job: &Job, saver: &Saver) -> Result<u64> {
        let parts = job.everybodys(&self.plan.checkpoint_bytes)?;
        let checkpoint_bytes = parts.iter().sum();
        let is_forced = self.decided.config.memory.force;
        let is_asked = job.leads() && !is_forced && !self.is_refused_anyway();
        let checked = match is_asked {
            true => self.check_disks(checkpoint_bytes, saver),
            false => Ok(()),
        };
        job.agree(checked).map(|()| checkpoint_bytes)
    }

    /// Whether the plan exceeds the limit or the device. Such a run is refused later, with hints how to make it fit.
    fn is_refused_anyway(&self) -> bool {
        let bounds = self.limit.into_iter().chain(self.device.total_bytes());
        bounds
            .min()
            .is_some_and(|most| self.plan.most_bytes() > most)
    }

    fn check_disks(&self, checkpoint_bytes: u64, saver: &Saver) -> Result {
        let (config, options) = (&self.decided.config, &self.decided.options);
        let files = saver
            .origin()
            .files(&config.model, config.data.seq, self.step.settings.dtype);
        let beside = total_bytes(&files) + config.to_toml()?.len() as u64 + UNKNOWN_FILES;
        let goes_on = self.resumed.as_ref().and_then(Resumed::run);
        let there = goes_on.map(|run| saved(&Disk, run)).transpose()?;
        let there = there.map_or(0, |steps| steps.len());
        let steps = (self.steps_before(), config.train.steps);
        let count = config.checkpoint.most_at_a_time(steps, there);
        let checkpoints = (checkpoint_bytes + beside).saturating_mul(count as u64);
        let run = goes_on.or(options.out.as_deref());
        let run = run.unwrap_or(Path::new("runs"));
        let mut needs = vec![DiskNeed::new(Saved::Checkpoints(count), checkpoints, run)];
        if let Some(folder) = &self.save_final {
            let left_out = saver.left_out.as_ref();
            let copied = left_out.map_or(0, |left_out| copied_bytes(left_out, &config.model));
            let model = self.plan.model_bytes + copied + total_bytes(&files);
            needs.push(DiskNeed::new(Saved::Model, model, folder));
        }
        if let Home::Disk(folder) = config.homes()?.states {
            needs.push(states_on_disk(&self.plan, &folder));
        }
        Ok(NoDiskRoom::check(&needs, &SystemDisks)?)
    }

    /// Number of steps made before.
    pub(super) fn steps_before(&self) -> usize {
        let state = self.resumed.as_ref().map(Resumed::state);
        state.map_or(0, |state| state.step as usize)
    }
}
