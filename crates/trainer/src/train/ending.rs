//! The end of a run: explains failures, draws pictures, and summarises.

use super::Run;
use crate::decisions::naming_head_chunk;
use crate::failure::{Failure, Result};
use crate::gpu_watch::name_others;
use memory::format_bytes;
use planner::{OomReport, arena_table, host_memory};
use report::pictures::RefusedLease;
use report::{EndRecord, max_rss_bytes, memory_table, page};
use std::io::Write;

impl Run {
    /// Searches fixes for an out-of-memory error and writes them to `oom.json`. Other failures are returned unchanged.
    pub(super) fn explain(&self, failure: Failure) -> Failure {
        let Failure::OutOfMemory { error, .. } = failure else {
            return failure;
        };
        let config = &self.decided.config;
        let rank = config.rank.filter(|_| config.parallel.pipeline > 1);
        let rank = rank.map(|rank| config.parallel.name(rank));
        let report = OomReport::new(&error, config, self.device.target());
        let report = report.and_then(|mut report| {
            naming_head_chunk(report.sets(), config, &self.decided)?;
            Ok(report)
        });
        let mut report = match report {
            Ok(report) => report,
            Err(_) => {
                return Failure::OutOfMemory {
                    rank,
                    error,
                    hints: Vec::new(),
                    fixes: Vec::new(),
                };
            }
        };
        name_others(&mut report, self.decided.device());
        let mut hints = report.hints();
        if self.made.steps > self.made.before && self.decided.options.resume.is_none() {
            hints.push(
                "the run made steps, so the same --out needs --resume auto: it goes on from the last checkpoint, or begins again".into(),
            );
        }
        if self.made.before > 0 {
            hints.push("a resumed run takes settings that change what is computed only with --allow-change".into());
        }
        match self.directory.write_json("oom.json", &report) {
            Ok(path) => hints.push(format!("{} has all figures and fixes", path.display())),
            Err(failure) => hints.push(format!("oom.json could not be written: {failure}")),
        }
        Failure::OutOfMemory {
            rank,
            error,
            hints,
            fixes: report.fixes,
        }
    }

    /// Draws what was recorded, and writes the run's page. If that fails, the run's own outcome is not affected.
    pub(super) fn draw(&mut self, failure: Option<&Failure>) {
        let (folder, own) = (self.directory.path(), self.directory.own());
        let pictures = own.filter(|_| !self.job.leads()).unwrap_or(folder);
        let refused = match failure {
            Some(Failure::OutOfMemory { error, .. }) => Some(RefusedLease::from(&**error)),
            _ => None,
        };
        if let Some(mut tracer) = self.tracer.take() {
            let device = self.decided.device().to_string();
            match tracer.write(&device, refused, &pictures.join("memory")) {
                Ok(folder) => tracing::info!("{} has pictures of the last step", folder.display()),
                Err(failure) => tracing::warn!("pictures of memory are missing: {failure}"),
            }
        }
        if !self.job.leads() {
            return;
        }
        if let Err(error) = page::write(folder, None, |_, _| None) {
            tracing::warn!("the run's page is missing: {error}");
        }
        if let (Some(Failure::OutOfMemory { .. }), Ok(tables), false) =
            (failure, page::text(folder), self.decided.options.quiet)
        {
            // A write error is ignored, because the exit code reports the failure too.
            let _ = writeln!(std::io::stderr(), "{tables}");
        }
    }

    pub(super) fn write_end_record(&mut self, failure: Option<&Failure>) -> Result {
        let record = EndRecord {
            reason: failure.map_or("done", Failure::reason),
            steps: self.made.steps,
            skipped_steps: self.made.skipped,
            max_rss_bytes: max_rss_bytes(),
        };
        if let Some(traffic) = self.job.traffic() {
            self.records.write_own(&traffic)?;
        }
        self.records.write(&record)
    }

    /// The summary at the end, for the user.
    pub(super) fn summary(&self) -> String {
        let Some(last) = &self.made.last else {
            let steps = self.made.steps;
            return format!(
                "all {steps} steps were made before; a higher --steps goes on (with --allow-change, where the learning rate depends on their number)\n"
            );
        };
        let seconds = self.made.time.as_secs_f64();
        let config = &self.decided.config;
        let tokens = self.made.tokens_here;
        let planned = (&self.plan.peak_by_category, &self.plan.phase_peak_bytes);
        let used = &self.made.used;
        let measured = (&used.by_category, &used.by_phase);
        let resident = max_rss_bytes().map_or(String::new(), |bytes| {
            format!("  resident set at most {}\n", format_bytes(bytes))
        });
        let skipped = match self.made.skipped {
            0 => String::new(),
            skipped => format!(", {skipped} skipped because loss or gradients were not finite"),
        };
        let resumed = match self.made.before {
            0 => String::new(),
            before => format!(" ({before} of them before it was resumed)"),
        };
        let mut recompute = config.recompute.spec.clone();
        if !config.recompute.layers.is_empty() {
            recompute += ", of some layers as in recompute.layers of its config.toml";
        }
        let mut offload = match config.offload.activations.as_str() {
            "none" => String::new(),
            labels => format!(", {labels} offloaded"),
        };
        // The configuration was accepted, so its homes are valid.
        offload += &config
            .homes()
            .map_or_else(|_| String::new(), |homes| homes.words());
        let host = host_memory(self.plan.device);
        let mut host_arenas = String::new();
        if !self.plan.host_arenas.is_empty() {
            let title = format!("in {host}");
            host_arenas = format!("{}\n", arena_table(&title, &self.plan.host_arenas));
        }
        let pinned = match used.host_pinned_bytes {
            0 => String::new(),
            bytes => format!("  {host} {}\n", format_bytes(bytes)),
        };
        let disk = match self.plan.disk_bytes {
            0 => String::new(),
            bytes => format!("  scratch files on the disk {}\n", format_bytes(bytes)),
        };
        let checkpoint = self.saver.newest().map_or(String::new(), |folder| {
            format!("  checkpoint {}\n", folder.display())
        });
        format!(
            "{} steps{resumed}{skipped} of {} ({}) in {seconds:.1} s: loss {:.4}, {:.0} tokens/s, recompute {}{offload}\n\n{}\n{}\n\
             {host_arenas}{pinned}{disk}{resident}{checkpoint}  run directory {}\n",
            self.made.steps,
            self.decided.name,
            self.plan.dtype,
            last.loss,
            tokens as f64 / seconds,
            recompute,
            memory_table(planned, Some(measured)),
            arena_table("across steps", &self.plan.arenas),
            self.directory.path().display(),
        )
    }
}
