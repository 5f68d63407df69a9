//! An out-of-memory error explained: `oom.json`, with fixes that were found by planning them.

use crate::failure::Failure;
use crate::host_room::HostRoom;
use crate::offload::OptimizerOffload;
use crate::plan::{Plan, STRATEGIES, figures};
use crate::settings::Settings;
use kernels::Target;
use memory::{
    ByCategory, Category, Cause, DType, DeviceBytes, Layer, LiveLease, OutOfMemory, Phase, Space,
    format_bytes,
};
use model::Attention;
use optim::{MasterFormat, MomentFormat};
use serde::Serialize;

/// Puts the optimizer's states into host memory.
const OFFLOAD_STATES: &str = "offload.optimizer=pinned";

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
    /// What would fit, cheapest first; those that keep the loss bitwise the same before those that do not.
    pub fixes: Vec<Fix>,
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
            fixes: match error.space {
                Space::Device => search.fixes()?,
                // How much the host would give is not known.
                Space::Host => Vec::new(),
            },
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
            let hints = [crate::failure::OFFLOAD_LESS.to_string()].into_iter();
            return hints.chain(locked).collect();
        }
        let Some(cheapest) = self.fixes.first() else {
            return vec!["no recompute specification, smaller optimizer state, micro-batch or head chunk fits; this model \
                         needs more memory, or a shorter --seq"
                .into()];
        };
        let mut hints = vec![format!("cheapest fix: {}", cheapest.describe())];
        let least = self.fixes.iter().min_by_key(|fix| fix.peak_bytes);
        if let Some(least) = least.filter(|least| *least != cheapest) {
            hints.push(format!("least memory: {}", least.describe()));
        }
        hints
    }
}

impl Fix {
    fn offloads(&self) -> bool {
        self.set.iter().any(|set| set == OFFLOAD_STATES)
    }

    fn describe(&self) -> String {
        let settings: Vec<String> = self
            .set
            .iter()
            .map(|setting| format!("--set {setting}"))
            .collect();
        let bits = if self.changes_math {
            "other bits in the loss"
        } else {
            "bitwise the same loss"
        };
        format!(
            "{} has a peak of {} (saves {}, {:.1} % more {}, {bits})",
            settings.join(" "),
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
}

impl Search<'_> {
    fn fixes(&self) -> Result<Vec<Fix>, Failure> {
        let mut fixes = Vec::new();
        for spec in STRATEGIES {
            if let Some((recompute, set)) = self.with_recompute(self.settings, spec) {
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
        fixes.extend(self.offloaded_states()?);
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

    /// Optimizer states in host memory, where that is other memory than the device's, and has room for them.
    fn offloaded_states(&self) -> Result<Option<Fix>, Failure> {
        if self.target == Target::Cpu || self.settings.offload.is_some() {
            return Ok(None);
        }
        let offloaded = Settings {
            offload: Some(OptimizerOffload::default()),
            ..self.settings.clone()
        };
        let plan = Plan::without_alternatives(&offloaded, self.target)?;
        if HostRoom::ask().check(plan.host_pinned_bytes).is_err() {
            return Ok(None);
        }
        let set = vec![OFFLOAD_STATES.to_string()];
        let fix = self.attempt(&offloaded, set, false)?;
        let exposed = plan
            .offload
            .map_or(0.0, |offload| offload.exposed_fraction());
        Ok(fix.map(|fix| Fix {
            cost_fraction: fix.cost_fraction + exposed,
            ..fix
        }))
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
