//! An out-of-memory error explained: `oom.json`, with fixes that were found by planning them.

use crate::failure::Failure;
use crate::host_room::{HostNeed, HostRoom, OFFLOAD_LESS};
use crate::offload::OptimizerOffload;
use crate::plan::{Plan, figures, recompute_specs};
use crate::settings::Settings;
use kernels::Target;
use memory::{
    ByCategory, Category, Cause, DType, DeviceBytes, Layer, LiveLease, OutOfMemory, Phase, Space,
    format_bytes,
};
use model::{Attention, OffloadLabels};
use optim::{MasterFormat, MomentFormat};
use serde::Serialize;
use std::cell::RefCell;

/// Puts the optimizer's states into host memory.
const OFFLOAD_STATES: &str = "offload.optimizer=pinned";

/// What full recompute keeps, and host memory can hold.
const BLOCK_INPUT: &str = "block_input";

/// Everything about a refused lease, and what would help.
#[derive(Clone, Debug, Serialize)]
pub struct OomReport {
    /// Size of the refused lease.
    pub requested_bytes: u64,
    /// Its name.
    pub name: &'static str,
    /// What it was for.
    pub category: Category,
    /// What was going on.
    pub phase: Phase,
    /// The block at work; none outside the blocks.
    pub layer: Layer,
    /// Which memory.
    pub space: Space,
    /// What was live, by category.
    pub live_by_category: ByCategory,
    /// What was live, largest first.
    pub live_largest: Vec<LiveLease>,
    /// The limit that refused the lease; none where the system did.
    pub limit_bytes: Option<u64>,
    /// What the device said about its memory, where it refused.
    pub device_bytes: Option<DeviceBytes>,
    /// The peak that the run would have.
    pub planned_peak_bytes: u64,
    /// Why it was refused.
    pub cause: Cause,
    /// Other settings that were planned to find fixes.
    pub tried: Vec<Tried>,
    /// What would fit, cheapest first; those that keep the loss bitwise the same before those that do not.
    pub fixes: Vec<Fix>,
}

/// Settings that were planned, whether the run fits then or not.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Tried {
    /// Settings to add, each as `--set` takes it.
    pub set: Vec<String>,
    /// The peak then.
    pub peak_bytes: u64,
}

/// Settings under which the run fits.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fix {
    /// Settings to add, each as `--set` takes it.
    pub set: Vec<String>,
    /// The peak then.
    pub peak_bytes: u64,
    /// What that saves.
    pub saves_bytes: u64,
    /// Extra FLOPs over those of forward and backward, above what the run already has; for offload, the time by which
    /// it is estimated to lengthen them.
    pub cost_fraction: f64,
    /// The loss is no longer bitwise the same, if only by the order of sums.
    pub changes_math: bool,
}

impl OomReport {
    /// Explains a refused lease of a run with these settings.
    ///
    /// # Errors
    /// None but a defect: planning needs no memory.
    pub fn new(
        error: &OutOfMemory,
        settings: &Settings,
        target: Target,
    ) -> Result<OomReport, Failure> {
        let planned = figures(settings, target)?;
        // Where the system refused, no limit is known: anything smaller is worth a try.
        let room = error.room().unwrap_or(planned.peak.bytes - 1);
        let search = Search {
            settings,
            target,
            room,
            slab_counts: error.device_bytes.is_some(),
            peak_bytes: planned.peak.bytes,
            cost: planned.recompute_flops_fraction,
            tried: RefCell::default(),
        };
        let fixes = match error.space {
            Space::Device => search.fixes(&HostRoom::ask())?,
            // How much the host would give is not known.
            Space::Host => Vec::new(),
        };
        Ok(OomReport {
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
            tried: search.tried.into_inner(),
            fixes,
        })
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
        let Some(cheapest) = self.fixes.first() else {
            return vec![self.nothing_fits()];
        };
        let mut hints = vec![format!("cheapest fix: {}", cheapest.describe())];
        let least = self.fixes.iter().min_by_key(|fix| fix.peak_bytes);
        if let Some(least) = least.filter(|least| *least != cheapest) {
            hints.push(format!("least memory: {}", least.describe()));
        }
        hints
    }

    /// What to say where no setting that was tried is a fix.
    fn nothing_fits(&self) -> String {
        let least = self.tried.iter().min_by_key(|tried| tried.peak_bytes);
        let least = least.map_or(String::new(), |least| {
            format!(
                "; the least of them, {}, has a peak of {}",
                flags(&least.set),
                format_bytes(least.peak_bytes)
            )
        });
        format!(
            "none of the {} other settings that were tried fits{least}; this model needs more memory, or a shorter --seq",
            self.tried.len()
        )
    }
}

/// Settings as they are given on the command line.
fn flags(set: &[String]) -> String {
    let flags: Vec<String> = set.iter().map(|one| format!("--set {one}")).collect();
    flags.join(" ")
}

impl Fix {
    fn offloads(&self) -> bool {
        let offloads = |set: &String| set.starts_with("offload.") && !set.ends_with("=none");
        self.set.iter().any(offloads)
    }

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
            if self.offloads() {
                "time, estimated"
            } else {
                "FLOPs"
            },
        )
    }
}

/// Tries settings by planning them.
struct Search<'a> {
    settings: &'a Settings,
    target: Target,
    room: u64,
    /// A device that is full has to hold the whole slab; a limit counts leases.
    slab_counts: bool,
    peak_bytes: u64,
    cost: f64,
    tried: RefCell<Vec<Tried>>,
}

impl Search<'_> {
    fn fixes(&self, host: &HostRoom) -> Result<Vec<Fix>, Failure> {
        let mut fixes = Vec::new();
        for spec in recompute_specs(self.settings.model.layers) {
            if let Some((recompute, set)) = self.with_recompute(self.settings, &spec) {
                fixes.extend(self.attempt(&recompute, set, false)?);
            }
        }
        if self.settings.attention == Attention::Eager {
            let flash = Settings {
                attention: Attention::Flash,
                ..self.settings.clone()
            };
            let set = vec!["attention.backend=flash".into()];
            fixes.extend(self.attempt(&flash, set, true)?);
        }
        self.smaller_states(&mut fixes)?;
        self.offloaded(host, &mut fixes)?;
        for micro in (1..self.settings.micro_batch).rev() {
            if !self.settings.micro_batch.is_multiple_of(micro) {
                continue;
            }
            let accum = self.settings.accum * (self.settings.micro_batch / micro);
            let set = vec![
                format!("batch.micro={micro}"),
                format!("batch.accum={accum}"),
            ];
            let smaller = Settings {
                micro_batch: micro,
                accum,
                ..self.settings.clone()
            };
            fixes.extend(self.attempt(&smaller, set.clone(), true)?);
            if let Some((both, recompute)) = self.with_recompute(&smaller, "full") {
                fixes.extend(self.attempt(&both, [set, recompute].concat(), true)?);
            }
        }
        let head_chunk = self.settings.head_chunk.div_ceil(4);
        let smaller = Settings {
            head_chunk,
            ..self.settings.clone()
        };
        fixes.extend(self.attempt(
            &smaller,
            vec![format!("memory.head_chunk={head_chunk}")],
            true,
        )?);
        let order = |fix: &Fix| (fix.changes_math, fix.cost_fraction.max(0.0), fix.peak_bytes);
        fixes.sort_by(|a, b| order(a).partial_cmp(&order(b)).expect("costs are finite"));
        Ok(fixes)
    }

    /// Other formats of what lives across steps, alone and together, and with full recompute.
    fn smaller_states(&self, fixes: &mut Vec<Fix>) -> Result<(), Failure> {
        let mut smaller = self.settings.clone();
        let (mut set, mut changes_math) = (Vec::new(), false);
        let states = &mut smaller.states;
        if smaller.dtype == DType::BF16 && states.master == MasterFormat::F32 {
            states.master = MasterFormat::Remainder;
            set.push("optim.master=bf16-split".to_string());
            fixes.extend(self.attempt(&smaller, set.clone(), changes_math)?);
        }
        if smaller.states.moments != MomentFormat::Quantised {
            (smaller.states.moments, changes_math) = (MomentFormat::Quantised, true);
            set.push("optim.state_dtype=8bit".into());
            fixes.extend(self.attempt(&smaller, set.clone(), changes_math)?);
        }
        if smaller.states.gradients == DType::F32 {
            (smaller.states.gradients, changes_math) = (DType::BF16, true);
            set.push("optim.grad_dtype=bf16".into());
            fixes.extend(self.attempt(&smaller, set.clone(), changes_math)?);
        }
        if let Some((both, recompute)) = self.with_recompute(&smaller, "full") {
            set.extend(recompute);
            fixes.extend(self.attempt(&both, set, changes_math)?);
        }
        Ok(())
    }

    /// Optimizer states and block inputs in host memory, alone and together, where that is other memory than the device's,
    /// and has room for them.
    fn offloaded(&self, host: &HostRoom, fixes: &mut Vec<Fix>) -> Result<(), Failure> {
        if self.target == Target::Cpu {
            return Ok(());
        }
        let exposed = |settings: &Settings| -> Result<(u64, f64), Failure> {
            let plan = Plan::without_alternatives(settings, self.target)?;
            let exposed = plan
                .offload
                .map_or(0.0, |offload| offload.exposed_fraction());
            Ok((plan.host_pinned_bytes, exposed))
        };
        let offload_states = |(settings, set): (Settings, Vec<String>)| {
            let is_new = settings.offload.is_none();
            let offload = Some(OptimizerOffload::default());
            let set = [set, vec![OFFLOAD_STATES.to_string()]].concat();
            is_new.then_some((
                Settings {
                    offload,
                    ..settings
                },
                set,
            ))
        };
        let full = self.with_recompute(self.settings, "full");
        let inputs = self.with_offloaded_block_inputs();
        let tries = [
            offload_states((self.settings.clone(), Vec::new())),
            full.and_then(offload_states),
            inputs.clone(),
            inputs.and_then(offload_states),
        ];
        let (_, exposed_now) = exposed(self.settings)?;
        for (settings, set) in tries.into_iter().flatten() {
            let (pinned_bytes, exposed_then) = exposed(&settings)?;
            if host.check(HostNeed::Pinned(pinned_bytes)).is_err() {
                continue;
            }
            let fix = self.attempt(&settings, set, false)?;
            fixes.extend(fix.map(|fix| Fix {
                cost_fraction: fix.cost_fraction + exposed_then - exposed_now,
                ..fix
            }));
        }
        Ok(())
    }

    /// Full recompute, with what it keeps on the host; none where that is what the settings have, or nothing.
    fn with_offloaded_block_inputs(&self) -> Option<(Settings, Vec<String>)> {
        let full = self.settings.with_recompute("full")?;
        let labels = OffloadLabels::parse(BLOCK_INPUT).ok()?;
        let policy = full.policy.clone().offload(&labels).ok()?;
        let set = vec![
            "recompute.spec=full".to_string(),
            format!("offload.activations={BLOCK_INPUT}"),
        ];
        let is_new = policy != self.settings.policy && policy.layers() > 1;
        is_new.then_some((Settings { policy, ..full }, set))
    }

    /// The settings with another specification, and what sets it: none if it does not go with those of single layers, or
    /// changes nothing.
    fn with_recompute(&self, settings: &Settings, spec: &str) -> Option<(Settings, Vec<String>)> {
        let other = settings.with_recompute(spec)?;
        let mut set = vec![format!("recompute.spec={spec}")];
        if other.policy.offloaded() != settings.policy.offloaded() {
            set.push("offload.activations=none".into());
        }
        (other.policy != settings.policy).then_some((other, set))
    }

    fn attempt(
        &self,
        settings: &Settings,
        set: Vec<String>,
        changes_math: bool,
    ) -> Result<Option<Fix>, Failure> {
        let planned = figures(settings, self.target)?;
        let peak_bytes = planned.peak.bytes;
        self.tried.borrow_mut().push(Tried {
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
        let saves_bytes = self.peak_bytes - peak_bytes;
        let cost_fraction = planned.recompute_flops_fraction - self.cost;
        Ok(Some(Fix {
            set,
            peak_bytes,
            saves_bytes,
            cost_fraction,
            changes_math,
        }))
    }
}
