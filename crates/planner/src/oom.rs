//! Explains an out-of-memory error in `oom.json`, with fixes that were found by planning them.

use crate::auto::choose;
use crate::change::{Change, flags, other_training, set};
use crate::copies::PlannedOffload;
use crate::disk_room::{DiskNeed, NoDiskRoom, Saved, SystemDisks};
use crate::figures::figures;
use crate::head_chunk::WantedHeadChunks;
use crate::host_room::{HostNeed, HostRoom, OFFLOAD_LESS};
use crate::levers::Setup;
use crate::other_process::{NOTABLE_BYTES, OtherProcess, unowned};
use crate::plan::Plan;
use crate::refusal::first_refused;
use kernels::Target;
use memory::{
    ByCategory, Category, Cause, DeviceBytes, Home, Layer, LiveLease, OutOfMemory, Phase, Space,
    format_bytes,
};
use serde::Serialize;
use session::SessionError;
use settings::{Config, Settings};

/// The form of `oom.json`. It rises with every new field, and with any change of a
/// field's name, type or meaning (`crates/trainer/schemas/`).
const SCHEMA_VERSION: u32 = 2;

/// A refused lease, and what would help. `oom.json`.
#[derive(Clone, Debug, Serialize)]
pub struct OomReport {
    /// The form of this file.
    pub schema_version: u32,
    /// Size of the refused lease.
    pub requested_bytes: u64,
    /// Its name.
    pub name: &'static str,
    /// Its category: parameters, gradients and so on.
    pub category: Category,
    /// The phase of the step.
    pub phase: Phase,
    /// The block at work; none outside the blocks.
    pub layer: Layer,
    /// Which memory.
    pub space: Space,
    /// What was live, by category.
    pub live_by_category: ByCategory,
    /// What was live, largest first.
    pub live_largest: Vec<LiveLease>,
    /// The limit that refused the lease; none if the system refused it.
    pub limit_bytes: Option<u64>,
    /// The device's own figures of its memory, if the device refused.
    pub device_bytes: Option<DeviceBytes>,
    /// The peak that the run would have.
    pub planned_peak_bytes: u64,
    /// Why it was refused.
    pub cause: Cause,
    /// Other processes on the GPU, those that hold most first, if the GPU refused and they are known.
    pub other_processes: Vec<OtherProcess>,
    /// Used memory of the GPU that no process owns, if the GPU refused and it is known.
    pub unowned_bytes: Option<u64>,
    /// Other settings that were planned to find fixes.
    pub tried: Vec<Tried>,
    /// Settings under which the run fits: first those that keep the loss bitwise the same, then the others, the cheapest first. Last
    /// come those that make it another training.
    pub fixes: Vec<Fix>,
}

/// Settings that were planned, whether the run fits with them or not.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Tried {
    /// Settings to add, each as `--set` takes it.
    pub set: Vec<String>,
    /// The peak with them.
    pub peak_bytes: u64,
}

/// Settings under which the run fits.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fix {
    /// Settings to add, each as `--set` takes it.
    pub set: Vec<String>,
    /// The peak with them.
    pub peak_bytes: u64,
    /// By how much they lower the peak.
    pub saves_bytes: u64,
    /// Extra FLOPs as a share of forward and backward, over those of the run. For offload, the estimated share by which
    /// copies lengthen a step is added.
    pub cost_fraction: f64,
    /// The loss is no longer bitwise the same, if only by the order of sums.
    pub changes_math: bool,
    /// It is another training: adapters alone learn, or the model under them is stored in four bits.
    pub is_other_training: bool,
    /// Whether its cost is time rather than FLOPs.
    #[serde(skip)]
    offloads: bool,
}

impl OomReport {
    /// Explains a refused lease of a run with this configuration.
    ///
    /// # Errors
    /// As [`Plan::new`].
    pub fn new(
        error: &OutOfMemory,
        config: &Config,
        target: Target,
    ) -> Result<OomReport, SessionError> {
        let run = Setup::new(config.clone(), target)?;
        let planned = figures(&run.settings, target)?;
        let mut search = Search {
            run: &run,
            // The system refused, so no limit is known: any smaller peak counts as a fix.
            room: error.room().unwrap_or(planned.most_bytes() - 1),
            slab_counts: error.device_bytes.is_some(),
            peak_bytes: planned.most_bytes(),
            reserved_bytes: planned.reserved_bytes,
            cost: planned.recompute_flops_fraction,
            tried: Vec::new(),
        };
        let fixes = match error.space {
            Space::Device => search.fixes()?,
            // The host does not report how much it would have given.
            Space::Host => Vec::new(),
        };
        Ok(OomReport {
            schema_version: SCHEMA_VERSION,
            requested_bytes: error.requested_bytes,
            name: error.name,
            category: error.category,
            phase: error.place.phase,
            layer: error.place.layer,
            space: error.space,
            live_by_category: error.live_by_category,
            live_largest: error.live_largest.clone(),
            limit_bytes: error.limit_bytes,
            device_bytes: error.device_bytes,
            planned_peak_bytes: planned.peak.bytes,
            cause: error.cause,
            other_processes: Vec::new(),
            unowned_bytes: None,
            tried: search.tried,
            fixes,
        })
    }

    /// Explains that no policy of automatic recompute is within a budget, to which fixes are found as to a limit; none if a step that
    /// keeps everything is within it.
    ///
    /// # Errors
    /// As [`Plan::new`].
    pub fn of_budget(
        config: &Config,
        target: Target,
        budget: u64,
    ) -> Result<Option<OomReport>, SessionError> {
        let kept = set!(recompute.spec = "none".to_string())
            .and(&set!(offload.activations = "none".to_string()));
        let kept_config = kept.applied_to(config)?;
        let refused = first_refused(&Settings::new(&kept_config)?, target, budget)?;
        let Some(refused) = refused else {
            return Ok(None);
        };
        let mut report = OomReport::new(&refused, &kept_config, target)?;
        let fixes = report.fixes.iter_mut().map(|fix| &mut fix.set);
        for set in fixes.chain(report.tried.iter_mut().map(|tried| &mut tried.set)) {
            let key = |one: &String| one.split('=').next().map(str::to_owned);
            let is_open = |one: &String| !set.iter().any(|other| key(other) == key(one));
            let open: Vec<String> = kept.set().into_iter().filter(is_open).collect();
            set.splice(0..0, open);
        }
        Ok(Some(report))
    }

    /// The report of a run of `config` that leaves the chunk of the output head open: settings name the chunk that they were planned with
    /// where the run would choose another.
    ///
    /// # Errors
    /// As [`Plan::new`].
    pub fn with_head_chunk(
        mut self,
        config: &Config,
        target: Target,
    ) -> Result<OomReport, SessionError> {
        let mut wanted = WantedHeadChunks::default();
        let fixes = self.fixes.iter_mut().map(|fix| &mut fix.set);
        for set in fixes.chain(self.tried.iter_mut().map(|tried| &mut tried.set)) {
            wanted.keep(config, target, set)?;
        }
        Ok(self)
    }

    /// What to tell a person, a line each.
    pub fn hints(&self) -> Vec<String> {
        if self.space == Space::Host {
            let locked = crate::memory_size::locked_limit_bytes();
            let locked = locked.filter(|bytes| *bytes < self.requested_bytes).map(|bytes| {
                format!(
                    "the limit on locked memory is {} (`ulimit -l`), and some systems count page-locked memory; in a \
                     container docker run --ulimit memlock=-1 raises it",
                    format_bytes(bytes)
                )
            });
            let hints = [OFFLOAD_LESS.to_string()].into_iter();
            return hints.chain(locked).collect();
        }
        let mut hints = self.others();
        let same = || self.fixes.iter().filter(|fix| !fix.is_other_training);
        match same().next() {
            None => hints.push(self.nothing_fits()),
            Some(cheapest) => {
                hints.push(format!("cheapest fix: {}", cheapest.describe()));
                let least = same().min_by_key(|fix| fix.peak_bytes);
                let least = least.filter(|least| *least != cheapest);
                hints.extend(least.map(|least| format!("least memory: {}", least.describe())));
            }
        }
        let other = self.fixes.iter().find(|fix| fix.is_other_training);
        hints.extend(
            other.map(|other| format!("{}: {}", other_training(&other.set), other.describe())),
        );
        hints
    }

    /// Whose memory is in the way: that of the largest other process, and memory that no process owns.
    fn others(&self) -> Vec<String> {
        let is_in_the_way = |bytes: Option<u64>| match bytes {
            Some(bytes) => bytes >= NOTABLE_BYTES,
            None => self.cause == Cause::OtherProcess,
        };
        let largest = self.other_processes.first();
        let largest = largest.filter(|process| is_in_the_way(process.bytes));
        let largest = largest.map(|process| {
            let more = self.other_processes.len() - 1;
            let and_more = match more {
                0 => String::new(),
                _ => format!(" (and {more} more)"),
            };
            format!("on the GPU is also {}{and_more}", process.describe())
        });
        let unowned_bytes = self.unowned_bytes.filter(|bytes| *bytes >= NOTABLE_BYTES);
        largest
            .into_iter()
            .chain(unowned_bytes.map(unowned))
            .collect()
    }

    /// What to say if none of the settings tried is a fix.
    fn nothing_fits(&self) -> String {
        let fits = |tried: &&Tried| self.fixes.iter().any(|fix| fix.set == tried.set);
        let tried = || self.tried.iter().filter(|tried| !fits(tried));
        let least = tried().min_by_key(|tried| tried.peak_bytes);
        let least = least.map_or(String::new(), |least| {
            format!(
                "; the least of them, {}, has a peak of {}",
                flags(&least.set),
                format_bytes(least.peak_bytes)
            )
        });
        let none = match tried().count() {
            0 => String::new(),
            count => format!("none of the {count} other settings that were tried fits{least}; "),
        };
        format!(
            "{none}this model needs more memory, or a shorter --seq: `trainer plan --device-memory SIZE` with the same flags looks for \
             more of them together"
        )
    }
}

impl Fix {
    fn describe(&self) -> String {
        let bits = if self.changes_math {
            "other bits in the loss"
        } else {
            "bitwise the same loss"
        };
        format!(
            "{} has a peak of {} (saves {}, {:.1} % more {}, {bits})",
            flags(&self.set),
            format_bytes(self.peak_bytes),
            format_bytes(self.saves_bytes),
            100.0 * self.cost_fraction,
            match self.offloads {
                true => "time, estimated",
                false => "FLOPs",
            },
        )
    }
}

/// The share that copies add to a step.
fn exposed(plan: &Plan) -> f64 {
    let offload = plan.offload.as_ref();
    offload.map_or(0.0, PlannedOffload::exposed_fraction)
}

/// Whether host and disk have room for what is not on the device.
fn has_room(plan: &Plan, settings: &Settings, host: &HostRoom) -> bool {
    let disk = match &settings.homes.states {
        Home::Disk(folder) => {
            let states = DiskNeed::new(Saved::OptimizerStates, plan.disk_bytes, folder);
            NoDiskRoom::check(&[states], &SystemDisks)
        }
        _ => Ok(()),
    };
    let pinned = HostNeed::Pinned(plan.host_pinned_bytes);
    disk.is_ok() && host.check(pinned).is_ok()
}

/// Tries settings by planning them.
struct Search<'a> {
    run: &'a Setup,
    room: u64,
    /// Whether the whole slab has to fit, as on a full device. A limit counts only live leases.
    slab_counts: bool,
    peak_bytes: u64,
    reserved_bytes: u64,
    cost: f64,
    tried: Vec<Tried>,
}

impl Search<'_> {
    fn fixes(&mut self) -> Result<Vec<Fix>, SessionError> {
        let (run, host, mut fixes) = (self.run, HostRoom::ask(), Vec::new());
        let exposed_now = match run.target {
            Target::Cpu => 0.0,
            Target::Cuda => exposed(&Plan::new(&run.settings, run.target)?),
        };
        for change in run.smaller() {
            let Some(changed) = run.with(&change) else {
                continue;
            };
            if !change.offloads() {
                fixes.extend(self.attempt(&changed.settings, change)?);
                continue;
            }
            // If the host has no room for states, they may go to a disk.
            let on_disk = change.with_states_on_disk();
            let on_disk = on_disk.and_then(|change| Some((run.with(&change)?, change)));
            for (Setup { settings, .. }, change) in
                [Some((changed, change)), on_disk].into_iter().flatten()
            {
                let plan = Plan::new(&settings, run.target)?;
                if !has_room(&plan, &settings, &host) {
                    continue;
                }
                let fix = self.attempt(&settings, change)?;
                fixes.extend(fix.map(|fix| Fix {
                    cost_fraction: fix.cost_fraction + exposed(&plan) - exposed_now,
                    ..fix
                }));
                break;
            }
        }
        if let Some((change, chosen)) = self.automatic() {
            fixes.extend(self.attempt(&chosen, change)?);
        }
        fixes.extend(self.other_trainings()?);
        let order = |fix: &Fix| {
            let cost = fix.cost_fraction.max(0.0);
            (
                fix.is_other_training,
                fix.changes_math,
                cost,
                fix.peak_bytes,
            )
        };
        fixes.sort_by(|a, b| order(a).partial_cmp(&order(b)).expect("costs are finite"));
        Ok(fixes)
    }

    /// Adapters instead of the whole model, each also with full recompute.
    fn other_trainings(&mut self) -> Result<Vec<Fix>, SessionError> {
        let mut fixes = Vec::new();
        for (_, adapters) in self.run.adapters() {
            let Some(changed) = self.run.with(&adapters) else {
                continue;
            };
            let full = changed.recompute_anew("full");
            let full = full.and_then(|full| Some((changed.with(&full)?, adapters.and(&full))));
            for (Setup { settings, .. }, change) in [(changed, adapters)].into_iter().chain(full) {
                match self.attempt(&settings, change) {
                    // A matrix of this model may be too small for adapters.
                    Err(SessionError::Config(_)) => {}
                    fix => fixes.extend(fix?.map(|fix| Fix {
                        is_other_training: true,
                        ..fix
                    })),
                }
            }
        }
        Ok(fixes)
    }

    /// What automatic recompute chooses for the room; none if nothing fits, or if other settings do not allow it.
    fn automatic(&self) -> Option<(Change, Settings)> {
        let budget = match self.slab_counts {
            true => self
                .room
                .saturating_sub(self.reserved_bytes - self.peak_bytes),
            false => self.room,
        };
        let change = self.run.automatic_recompute(budget);
        let asked = change.applied_to(&self.run.config).ok()?;
        let chosen = choose(&asked, self.run.target, budget).ok()?;
        Some((change, Settings::new(&chosen.applied_to(&asked)).ok()?))
    }

    fn attempt(
        &mut self,
        settings: &Settings,
        change: Change,
    ) -> Result<Option<Fix>, SessionError> {
        let planned = figures(settings, self.run.target)?;
        let peak_bytes = planned.most_bytes();
        let set = change.set();
        self.tried.push(Tried {
            set: set.clone(),
            peak_bytes,
        });
        let needed = match self.slab_counts {
            true => planned.reserved_bytes,
            false => peak_bytes,
        };
        if needed > self.room || peak_bytes >= self.peak_bytes {
            return Ok(None);
        }
        Ok(Some(Fix {
            set,
            peak_bytes,
            saves_bytes: self.peak_bytes - peak_bytes,
            cost_fraction: planned.recompute_flops_fraction - self.cost,
            changes_math: change.changes_math(),
            is_other_training: false,
            offloads: change.offloads(),
        }))
    }
}
