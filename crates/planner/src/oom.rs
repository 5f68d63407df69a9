//! Explains an out-of-memory error in `oom.json`, with fixes that were found by planning them.

use crate::auto::choose;
use crate::change::{Change, flags, other_training, set};
use crate::figures::figures;
use crate::fullest_rank::as_fullest_rank;
use crate::host_room::{HostRoom, OFFLOAD_LESS};
use crate::levers::Setup;
use crate::other_process::{NOTABLE_BYTES, OtherProcess, unowned};
use crate::refusal::first_refused;
use crate::room::{Needs, Room};
use crate::search::{NO_COST, Search};
use kernels::Target;
use memory::{
    ByCategory, Category, Cause, DeviceBytes, Layer, LiveLease, OutOfMemory, Phase, Space,
    format_bytes,
};
use rayon::prelude::*;
use serde::Serialize;
use session::{Result, SessionError};
use settings::Config;

/// The form of `oom.json`. It rises with every new field, and with any change of a
/// field's name, type or meaning (`crates/trainer/schemas/`).
const SCHEMA_VERSION: u32 = 3;

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
    /// The time that they add to a step on paper, as a share of the run's step.
    pub cost_fraction: f64,
    /// The loss is no longer bitwise the same, if only by the order of sums.
    pub changes_math: bool,
    /// It is another training: adapters alone learn, or the model under them is stored in four bits.
    pub is_other_training: bool,
}

impl OomReport {
    /// Explains a refused lease of a run with this configuration.
    ///
    /// # Errors
    /// As [`crate::Plan::new`].
    pub fn new(error: &OutOfMemory, config: &Config, target: Target) -> Result<OomReport> {
        let run = Setup::new(config.clone(), target)?;
        let planned = figures(&run.settings, target)?;
        let needs = planned.needs();
        let room = match (error.room(), error.device_bytes) {
            (Some(room), Some(_)) => Room::Reserved(room),
            (Some(room), None) => Room::Limit(room),
            // The system refused, so no limit is known: any smaller peak counts as a fix.
            (None, _) => Room::Limit(needs.peak_bytes - 1),
        };
        let host = HostRoom::ask();
        let search = Fixes {
            run: &run,
            needs,
            room,
            host,
        };
        let tried = match error.space {
            Space::Device => search.candidates()?,
            // The host does not report how much it would have given.
            Space::Host => Vec::new(),
        };
        let fixes = search.cheapest_first(&tried)?;
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
            tried: tried.iter().map(Tried::new).collect(),
            fixes,
        })
    }

    /// Explains that no policy of automatic recompute is within a budget, to which fixes are found as to a limit; none if a step that
    /// keeps everything is within it.
    ///
    /// # Errors
    /// As [`crate::Plan::new`].
    pub fn of_budget(config: &Config, target: Target, budget: u64) -> Result<Option<OomReport>> {
        let kept = set!(recompute.spec = "none".to_string())
            .and(&set!(offload.activations = "none".to_string()));
        let (kept_config, settings) = as_fullest_rank(kept.applied_to(config)?)?;
        let refused = first_refused(&settings, target, budget)?;
        let Some(refused) = refused else {
            return Ok(None);
        };
        let mut report = OomReport::new(&refused, &kept_config, target)?;
        for set in report.sets() {
            let key = |one: &String| one.split('=').next().map(str::to_owned);
            let is_open = |one: &String| !set.iter().any(|other| key(other) == key(one));
            let open: Vec<String> = kept.set().into_iter().filter(is_open).collect();
            set.splice(0..0, open);
        }
        Ok(Some(report))
    }

    /// The settings of all that was tried and of all fixes.
    pub fn sets(&mut self) -> impl Iterator<Item = &mut Vec<String>> {
        let tried = self.tried.iter_mut().map(|tried| &mut tried.set);
        self.fixes.iter_mut().map(|fix| &mut fix.set).chain(tried)
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

impl Tried {
    fn new(candidate: &Candidate) -> Tried {
        Tried {
            set: candidate.change.set(),
            peak_bytes: candidate.needs.peak_bytes,
        }
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
            "{} has a peak of {} (saves {}, {:+.1} % time on paper, {bits})",
            flags(&self.set),
            format_bytes(self.peak_bytes),
            format_bytes(self.saves_bytes),
            100.0 * self.cost_fraction,
        )
    }
}

/// A change that is planned, and what a run with it needs.
struct Candidate {
    change: Change,
    setup: Setup,
    needs: Needs,
}

impl Candidate {
    fn new(change: Change, setup: Setup) -> Result<Candidate> {
        Ok(Candidate {
            needs: figures(&setup.settings, setup.target)?.needs(),
            change,
            setup,
        })
    }

    /// Adapters alone learn, or the model under them is stored in four bits.
    fn is_other_training(&self) -> bool {
        self.change.sets(&["lora.rank", "lora.base_dtype"])
    }
}

/// Looks for changes with which a run fits.
struct Fixes<'a> {
    run: &'a Setup,
    needs: Needs,
    room: Room,
    host: HostRoom,
}

impl Fixes<'_> {
    /// Everything that is tried. What no change does alone, several may do together: with the same bits, else with others, and without host
    /// memory where there is none. The last is every lever that keeps the bits.
    fn candidates(&self) -> Result<Vec<Candidate>> {
        let adapters = self.run.adapters().into_iter().flat_map(|(_, adapters)| {
            let adapted = self.run.with(&adapters);
            let full = adapted.and_then(|adapted| adapted.recompute_anew("full"));
            let full = full.map(|full| adapters.and(&full));
            [Some(adapters), full].into_iter().flatten()
        });
        let changes: Vec<Change> = self.run.smaller().into_iter().chain(adapters).collect();
        let planned = changes.into_par_iter().with_max_len(1);
        let planned = planned.map(|change| self.planned(change));
        let planned = planned.collect::<Result<Vec<Option<Candidate>>>>()?;
        let automatic = self.automatic().transpose()?;
        let mut all: Vec<Candidate> = planned.into_iter().flatten().chain(automatic).collect();
        let same: fn(&Change) -> bool = |change| !change.changes_math();
        let any: fn(&Change) -> bool = Change::keeps_learning;
        let resident: fn(&Change) -> bool = |change| change.keeps_learning() && !change.offloads();
        // About the least that is possible with the same bits.
        let least = self.planned(self.run.with_all(same).0)?;
        let may_keep_bits = least.as_ref().is_some_and(|one| self.helps(one));
        for (wanted, enough, may_help) in [
            (same, same, may_keep_bits),
            (any, any, true),
            (resident, any, true),
        ] {
            let is_enough = |one: &Candidate| !one.is_other_training() && enough(&one.change);
            if may_help && !all.iter().any(|one| self.helps(one) && is_enough(one)) {
                let climb = Search::new(self.room).climb(self.run, wanted)?;
                all.extend(self.planned(climb.change)?);
            }
        }
        all.extend(least);
        Ok(all)
    }

    /// Plans a change. If the host has no room for states, they may go to a disk; none where nothing has room, where nothing is changed,
    /// or where the change is refused: a matrix of a model may be too small for adapters.
    fn planned(&self, change: Change) -> Result<Option<Candidate>> {
        let on_disk = change.with_states_on_disk();
        let ways = [Some(change), on_disk].into_iter().flatten();
        for change in ways.filter(|change| !change.set().is_empty()) {
            let Some(setup) = self.run.with(&change) else {
                continue;
            };
            let candidate = match Candidate::new(change, setup) {
                Err(SessionError::Config(_)) => continue,
                candidate => candidate?,
            };
            let states = &candidate.setup.settings.homes.states;
            if !candidate.change.offloads() || candidate.needs.fit_host(&self.host, states) {
                return Ok(Some(candidate));
            }
        }
        Ok(None)
    }

    /// What automatic recompute chooses for the room; none if nothing fits, or if other settings do not allow it.
    fn automatic(&self) -> Option<Result<Candidate>> {
        let (Room::Device(bytes) | Room::Reserved(bytes) | Room::Limit(bytes)) = self.room;
        // What placement adds to the peak has to fit too.
        let budget = bytes.saturating_sub(self.needs.of(self.room) - self.needs.peak_bytes);
        let (change, target) = (self.run.automatic_recompute(budget), self.run.target);
        let asked = change.applied_to(&self.run.config).ok()?;
        let chosen = choose(&asked, target, budget).ok()?;
        let setup = Setup::new(chosen.applied_to(&asked), target).ok()?;
        Some(Candidate::new(change, setup))
    }

    fn helps(&self, one: &Candidate) -> bool {
        one.needs.fit(self.room) && one.needs.peak_bytes < self.needs.peak_bytes
    }

    /// The candidates that help, the cheapest first.
    fn cheapest_first(&self, tried: &[Candidate]) -> Result<Vec<Fix>> {
        let seconds = self.run.seconds()?;
        let fix = |one: &Candidate| -> Result<Fix> {
            let cost = one.setup.seconds()? / seconds - 1.0;
            Ok(Fix {
                set: one.change.set(),
                peak_bytes: one.needs.peak_bytes,
                saves_bytes: self.needs.peak_bytes - one.needs.peak_bytes,
                cost_fraction: if cost.abs() < NO_COST { 0.0 } else { cost },
                changes_math: one.change.changes_math(),
                is_other_training: one.is_other_training(),
            })
        };
        let helpful = tried.par_iter().with_max_len(1);
        let helpful = helpful.filter(|one| self.helps(one));
        let mut fixes = helpful.map(fix).collect::<Result<Vec<Fix>>>()?;
        fixes.sort_by(|one, other| {
            let rank = |fix: &Fix| (fix.is_other_training, fix.changes_math);
            let [own, others] = [one, other].map(|fix| fix.cost_fraction.max(0.0));
            let ranks = rank(one).cmp(&rank(other)).then(own.total_cmp(&others));
            ranks.then(one.peak_bytes.cmp(&other.peak_bytes))
        });
        Ok(fixes)
    }
}
