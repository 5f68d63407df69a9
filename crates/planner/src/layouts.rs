//! Finds how several ranks divide a run that has to fit their devices: `plan --layout auto`.

use crate::advice::{Climb, Run};
use crate::change::{Change, set};
use crate::levers::Setup;
use crate::on_paper::Paper;
use crate::ranks::StageTime;
use kernels::Target;
use kernels::timeline::{Measured, Rates};
use memory::{Home, format_bytes};
use model::Action;
use rayon::prelude::*;
use report::{Align, Table};
use serde::Serialize;
use session::{MICRO_BATCHES_MAX, SessionError};
use settings::{Config, ConfigError, Settings};
use std::fmt::{Display, Formatter};
use units::Zero;

/// Layouts that are shown.
const SHOWN: usize = 5;

/// Bytes a second of what takes no time.
const AT_ONCE: f64 = 1e30;

/// Waits below this share of the computation count as hidden.
const HIDDEN: f64 = 0.1;

/// The layouts of a run's ranks that fit a device, the fastest on paper first.
///
/// For every number of ranks that may share a sequence, changes are tried until the run fits, as for [`crate::Advice`]: what ranks
/// divide, recompute, tiles, what lives on the host, and smaller micro-batches. The first combination that fits is taken, so a
/// faster one of the same number may exist. The tokens of a step, and formats of states and gradients, stay as they are.
#[derive(Clone, Debug, Serialize)]
pub struct Layouts {
    /// The memory of each device.
    pub device_memory_bytes: u64,
    /// How many ranks there are.
    pub ranks: usize,
    /// Tokens of a step of all ranks.
    pub tokens_a_step: usize,
    /// The fastest of those that fit.
    pub layouts: Vec<PlannedLayout>,
    /// Slower ones that fit, by how many ranks share a sequence.
    pub slower: Vec<usize>,
    /// Those for which nothing was found that fits.
    pub too_large: Vec<TooLarge>,
    /// Those for which a step has too few micro-batches: every group of ranks needs as many as the others.
    pub too_few_micro_batches: Vec<usize>,
    /// Those that are refused, whatever else is changed.
    pub refused: Vec<RefusedLayout>,
    /// The command that trains in the first.
    pub command: Option<String>,
}

/// A layout that fits.
#[derive(Clone, Debug, Serialize)]
pub struct PlannedLayout {
    /// How many ranks share each sequence.
    pub context: usize,
    /// What ranks divide.
    pub zero: Zero,
    /// The settings to add, each as `--set` takes it.
    pub set: Vec<String>,
    /// What is recomputed.
    pub recompute: String,
    /// Sequences in a micro-batch.
    pub micro_batch: usize,
    /// Micro-batches in a step of a rank.
    pub accum: usize,
    /// Tokens of a tile; null: whole micro-batches.
    pub tile_tokens: Option<usize>,
    /// What lives or waits on the host or a disk.
    pub on_host: Vec<String>,
    /// What the device has to hold: reserved bytes, and the overhead.
    pub needs_bytes: u64,
    /// Pinned host memory of a rank.
    pub host_pinned_bytes: u64,
    /// Bytes that a rank sends in a step.
    pub sent_bytes: u64,
    /// The time of a step on paper.
    pub time: StageTime,
    /// What takes the time.
    pub bound: Bound,
}

/// A layout for which nothing was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct TooLarge {
    /// How many ranks share each sequence.
    pub context: usize,
    /// The least that was found, overhead included.
    pub needs_bytes: u64,
}

/// A layout that is refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RefusedLayout {
    /// How many ranks share each sequence.
    pub context: usize,
    /// Why, in a sentence.
    pub reason: String,
}

choices::choices! {
    /// What takes the time of a step.
    Bound {
        /// What is computed; the rest hides behind it.
        Compute = "compute",
        /// Bytes between ranks.
        Link = "link",
        /// Copies from and to the host.
        Copies = "host copies",
    }
}

impl Layouts {
    /// Looks for layouts of the run's ranks.
    ///
    /// # Errors
    /// [`SessionError::Config`] if this is one rank, or times are not known; else as [`crate::Plan::new`].
    pub fn new(
        config: &Config,
        target: Target,
        device_memory_bytes: u64,
    ) -> Result<Layouts, SessionError> {
        let run = Setup::new(config.clone(), target)?;
        let ranks = run.settings.rank().of;
        let refused = |sentence: &str| Err(ConfigError::Contradiction(sentence.into()).into());
        if run.settings.pipeline.is_some() {
            return refused(
                "--layout auto compares how ranks divide sequences and states, and tries no stages of a pipeline; leave --pp out, or plan \
                 each stage by --pp N --rank I",
            );
        }
        if ranks == 1 {
            return refused(
                "--layout auto divides a run among ranks, and there is one; add --ranks N",
            );
        }
        if target == Target::Cpu && config.hardware.link_gbps.is_none() {
            return refused(
                "--layout auto compares times, and how fast ranks of processors exchange is not known; add --set hardware.link_gbps=X",
            );
        }
        let contexts: Vec<usize> = (1..=ranks)
            .filter(|size| ranks.is_multiple_of(*size))
            .collect();
        // Each thread makes its own plans: what they are made of is not shared.
        let tried = contexts.par_iter().map(|context| {
            let run = Setup::new(config.clone(), target)?;
            Tried::new(&run, *context, device_memory_bytes)
        });
        let mut found = Layouts {
            device_memory_bytes,
            ranks,
            tokens_a_step: run.settings.tokens_a_step(),
            layouts: Vec::new(),
            slower: Vec::new(),
            too_large: Vec::new(),
            too_few_micro_batches: Vec::new(),
            refused: Vec::new(),
            command: None,
        };
        for tried in tried.collect::<Result<Vec<Tried>, SessionError>>()? {
            match tried {
                Tried::Fits(layout) => found.layouts.push(*layout),
                Tried::TooLarge(layout) => found.too_large.push(layout),
                Tried::TooFewMicroBatches(context) => found.too_few_micro_batches.push(context),
                Tried::Refused(layout) => found.refused.push(layout),
            }
        }
        let speed = |layout: &PlannedLayout| layout.time.tokens_per_s;
        found
            .layouts
            .sort_by(|one, other| speed(other).total_cmp(&speed(one)));
        let slower = found.layouts.split_off(SHOWN.min(found.layouts.len()));
        found.slower = slower.iter().map(|layout| layout.context).collect();
        Ok(found)
    }

    fn table(&self) -> Table {
        let mut table = Table::of(&[
            ("--cp", Align::Right),
            ("micro x accum", Align::Right),
            ("--zero", Align::Left),
            ("recompute", Align::Left),
            ("on the host", Align::Left),
            ("needs", Align::Right),
            ("host a rank", Align::Right),
            ("sent a step", Align::Right),
            ("tokens/s of all", Align::Right),
            ("bound by", Align::Left),
        ]);
        for layout in &self.layouts {
            let tiles = match layout.tile_tokens {
                None => String::new(),
                Some(tokens) => format!(", tiles of {tokens}"),
            };
            table.row([
                layout.context.to_string(),
                format!("{} x {}", layout.micro_batch, layout.accum),
                layout.zero.stage().to_string(),
                format!("{}{tiles}", layout.recompute),
                match layout.on_host.is_empty() {
                    true => "nothing".into(),
                    false => layout.on_host.join(", "),
                },
                format_bytes(layout.needs_bytes),
                format_bytes(layout.host_pinned_bytes),
                format_bytes(layout.sent_bytes),
                format!("{:.0}", layout.time.tokens_per_s),
                layout.bound.to_string(),
            ]);
        }
        table
    }
}

/// What came of a number of ranks that share each sequence.
enum Tried {
    Fits(Box<PlannedLayout>),
    TooLarge(TooLarge),
    TooFewMicroBatches(usize),
    Refused(RefusedLayout),
}

impl Tried {
    fn new(run: &Setup, context: usize, room: u64) -> Result<Tried, SessionError> {
        let Some(shared) = sharing(run, context) else {
            return Ok(Tried::TooFewMicroBatches(context));
        };
        let setup = match run.try_with(&shared) {
            Ok(setup) => setup,
            Err(error) => {
                let reason = error.to_string();
                return Ok(Tried::Refused(RefusedLayout { context, reason }));
            }
        };
        let climb = Climb::to_fit(&Run::new(setup)?, room, keeps_formats)?;
        let needs_bytes = climb.run.needs_bytes();
        if needs_bytes > room {
            return Ok(Tried::TooLarge(TooLarge {
                context,
                needs_bytes,
            }));
        }
        let layout = PlannedLayout::new(&climb, &shared)?;
        Ok(Tried::Fits(Box::new(layout)))
    }
}

/// So many ranks to a sequence, with the same tokens in a step; none if the micro-batches of a step do not divide so.
fn sharing(run: &Setup, context: usize) -> Option<Change> {
    let settings = &run.settings;
    let all = settings.accum * settings.rank().of / settings.sharing().rank.of;
    let groups = settings.rank().of / context;
    let accum = all / groups;
    all.is_multiple_of(groups)
        .then(|| set!(parallel.context = context).and(&set!(batch.accum = accum)))
}

/// Whether a change leaves what is learnt, and the formats of states and gradients, as they are.
fn keeps_formats(change: &Change) -> bool {
    !change.sets(&[
        "data.seq",
        "train.dtype",
        "optim.clip_norm",
        "optim.grad_dtype",
        "optim.master",
        "optim.release",
        "optim.state_dtype",
    ])
}

impl PlannedLayout {
    fn new(climb: &Climb, shared: &Change) -> Result<PlannedLayout, SessionError> {
        let run = &climb.run;
        let Setup {
            config,
            settings,
            target,
        } = &run.setup;
        let time = StageTime::new(settings, *target)?;
        let time = time.expect("a rate of the link was asked for");
        let ranks = settings.ranks.as_ref();
        Ok(PlannedLayout {
            context: settings.sharing().rank.of,
            zero: ranks.map_or(Zero::Replicated, |ranks| ranks.zero),
            set: shared.and(&climb.change).set(),
            recompute: config.recompute.spec.clone(),
            micro_batch: settings.micro_batch,
            accum: settings.accum,
            tile_tokens: settings.tile_tokens,
            on_host: on_host(settings),
            needs_bytes: run.needs_bytes(),
            host_pinned_bytes: run.host_pinned_bytes,
            sent_bytes: run.sent_bytes,
            bound: bound(settings, *target, time)?,
            time,
        })
    }
}

/// What takes the time of a step: what saves most if it takes none.
fn bound(settings: &Settings, target: Target, time: StageTime) -> Result<Bound, SessionError> {
    if time.exposed_ms <= HIDDEN * time.compute_ms {
        return Ok(Bound::Compute);
    }
    // Later micro-batches take what the second does.
    let settings = Settings {
        accum: settings.accum.min(MICRO_BATCHES_MAX),
        ..settings.clone()
    };
    let seconds = |free: fn(Rates) -> Rates| {
        let mut paper = Paper::new(&settings, target, Measured::new());
        paper.rates = free(paper.rates);
        Ok::<f64, SessionError>(paper.step(&settings)?.seconds)
    };
    let without_link = seconds(|rates| Rates {
        link: AT_ONCE,
        near_link: AT_ONCE,
        ..rates
    })?;
    let without_copies = seconds(|rates| Rates {
        upload: AT_ONCE,
        download: AT_ONCE,
        both_ways: AT_ONCE,
        disk: AT_ONCE,
        ..rates
    })?;
    Ok(match without_link < without_copies {
        true => Bound::Link,
        false => Bound::Copies,
    })
}

/// What lives or waits on the host or a disk.
fn on_host(settings: &Settings) -> Vec<String> {
    let homes = &settings.homes;
    let places = [
        (&homes.weights, "weights"),
        (&homes.gradients, "gradients"),
        (&homes.states, "states"),
    ];
    let places = places.into_iter().filter_map(|(home, name)| match home {
        Home::Pinned => Some(name.to_string()),
        Home::Disk(_) => Some(format!("{name} (disk)")),
        Home::Device | Home::Released => None,
    });
    let policy = &settings.policy;
    let labels = policy.labels().iter().filter(|label| {
        let mut layers = 0..policy.layers();
        layers.any(|layer| policy.actions(layer).of(*label) == Action::Offload)
    });
    places
        .chain(labels.map(|label| label.name().to_string()))
        .collect()
}

impl Display for Layouts {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let room = format_bytes(self.device_memory_bytes);
        writeln!(
            f,
            "\nlayouts of {} ranks that fit {room} each, of steps of {} tokens; times are on paper\n",
            self.ranks, self.tokens_a_step
        )?;
        match self.layouts.is_empty() {
            true => writeln!(f, "none was found")?,
            false => write!(f, "{}", self.table())?,
        }
        for TooLarge {
            context,
            needs_bytes,
        } in &self.too_large
        {
            let needs = format_bytes(*needs_bytes);
            writeln!(
                f,
                "--cp {context} does not fit: the smallest that was found needs {needs}"
            )?;
        }
        let others = [
            (&self.slower, "fit too, and are slower"),
            (
                &self.too_few_micro_batches,
                "are left out: a step has too few micro-batches for their groups; a larger --accum lets them in",
            ),
        ];
        for (sizes, words) in others {
            let sizes: Vec<String> = sizes.iter().map(usize::to_string).collect();
            if !sizes.is_empty() {
                writeln!(f, "--cp {} {words}", sizes.join(", "))?;
            }
        }
        for RefusedLayout { context, reason } in &self.refused {
            writeln!(f, "--cp {context}: refused; {reason}")?;
        }
        match &self.command {
            Some(command) => writeln!(f, "\nthe first:\n{command}"),
            None => Ok(()),
        }
    }
}
