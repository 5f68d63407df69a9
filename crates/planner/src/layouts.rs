//! Finds how several ranks divide a run that has to fit their devices: `plan --layout auto`.

use crate::advice::{Climb, Run, with_all};
use crate::change::{Change, set};
use crate::distinct_stages::distinct_stages;
use crate::figures::quick_figures;
use crate::levers::Setup;
use crate::on_paper::{Paper, PaperSeconds, StageOnPaper};
use crate::ranks::StepTime;
use kernels::Target;
use kernels::timeline::{Measured, Rates};
use memory::Home;
use model::Action;
use rayon::ThreadPoolBuilder;
use rayon::prelude::*;
use serde::Serialize;
use session::{MICRO_BATCHES_MAX, SessionError};
use settings::{Config, ConfigError, Pipeline, PipelineSchedule, Settings};
use units::Zero;

/// Layouts that are shown.
const SHOWN: usize = 5;

/// Grids that are searched in parallel, the fastest estimates first.
const AT_A_TIME: usize = 8;

/// A grid is not searched if all changes together leave it larger than the room by more than this part of it.
const SLACK: u64 = 20;

/// The stack of a thread that searches. While one waits for times of changes that others find, it may begin a further grid, on top of
/// what it has begun.
const STACK_BYTES: usize = 16 << 20;

/// Bytes a second of what takes no time.
const AT_ONCE: f64 = 1e30;

/// Waits below this share of the computation count as hidden.
const HIDDEN: f64 = 0.1;

/// The layouts of a run's ranks that fit a device, the fastest on paper first.
///
/// For every grid, changes are tried until the largest stage fits, as for [`crate::Advice`]: what ranks divide, recompute, tiles, what
/// lives on the host, and smaller micro-batches. The first combination that fits is taken, so a faster one of the same grid may exist. The tokens of a step, and formats of states and gradients, stay as they are.
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
    /// Grids that are slower, or were not searched because a step of theirs as configured is estimated to be.
    pub slower: Vec<Grid>,
    /// Those for which nothing was found that fits.
    pub too_large: Vec<TooLarge>,
    /// Those for which a step has too few micro-batches: every group of ranks needs as many as the others.
    pub too_few_micro_batches: Vec<Grid>,
    /// Those that are refused, whatever else is changed.
    pub refused: Vec<RefusedLayout>,
    /// The command that trains in the first.
    pub command: Option<String>,
}

/// How ranks form groups. Groups have different sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Grid {
    /// How many ranks share each sequence.
    pub context: usize,
    /// Stages of the pipeline.
    pub pipeline: usize,
}

impl Grid {
    /// Every grid of so many ranks, for a model of so many blocks.
    fn all(ranks: usize, blocks: usize) -> impl Iterator<Item = Grid> {
        let divisors = |of: usize| (1..=of).filter(move |size| of.is_multiple_of(*size));
        let stages = divisors(ranks).filter(move |stages| *stages <= blocks);
        stages.flat_map(move |pipeline| {
            divisors(ranks / pipeline).map(move |context| Grid { context, pipeline })
        })
    }

    /// This grid, with the same tokens in a step; none if the micro-batches of a step do not divide so.
    fn change(self, run: &Setup) -> Option<Change> {
        let settings = &run.settings;
        let all = settings.accum * settings.rank().of / settings.sharing().rank.of;
        let groups = settings.rank_of_all().of / (self.context * self.pipeline);
        let mut grid =
            set!(parallel.context = self.context).and(&set!(parallel.pipeline = self.pipeline));
        let usual = PipelineSchedule::OneForwardOneBackward;
        if self.pipeline == 1 && run.config.parallel.schedule != usual {
            // There are no stages to order.
            grid = grid.and(&set!(parallel.schedule = usual));
        }
        all.is_multiple_of(groups)
            .then(|| grid.and(&set!(batch.accum = all / groups)))
    }
}

/// A layout that fits.
#[derive(Clone, Debug, Serialize)]
pub struct PlannedLayout {
    /// The groups of ranks.
    #[serde(flatten)]
    pub grid: Grid,
    /// What ranks divide.
    pub zero: Zero,
    /// How many neighbours have all weights together; null: all ranks, or each of them.
    pub shard_group: Option<usize>,
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
    /// Bytes that the largest stage's device has to hold: those that are reserved, and the overhead.
    pub needs_bytes: u64,
    /// Pinned host memory of that rank.
    pub host_pinned_bytes: u64,
    /// Bytes that it sends in a step.
    pub sent_bytes: u64,
    /// The time of a step on paper.
    pub time: StepTime,
    /// What takes the time.
    pub bound: Bound,
}

/// A layout for which nothing was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct TooLarge {
    /// The groups of ranks.
    #[serde(flatten)]
    pub grid: Grid,
    /// The least that was found, overhead included.
    pub needs_bytes: u64,
}

/// A layout that is refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RefusedLayout {
    /// The groups of ranks. Of several that are refused for one reason, the smallest.
    #[serde(flatten)]
    pub grid: Grid,
    /// Why, in a sentence.
    pub reason: String,
}

impl RefusedLayout {
    /// Whether the reasons differ in sizes alone.
    fn is_refused_as(&self, other: &RefusedLayout) -> bool {
        let words = |layout: &RefusedLayout| -> String {
            let letters = layout.reason.chars();
            letters.filter(|letter| !letter.is_ascii_digit()).collect()
        };
        words(self) == words(other)
    }
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
        /// Stages of a pipeline, which wait for each other.
        Stages = "other stages",
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
        let ranks = run.settings.rank_of_all().of;
        let refused = |sentence: &str| Err(ConfigError::Contradiction(sentence.into()).into());
        if config.parallel.virtual_stage_layers.is_some() {
            return refused(
                "--layout auto tries one stage too, which has no virtual stages, and parallel.virtual_stage_layers gives their blocks; \
                 leave --num-layers-per-virtual-pipeline-stage out: each stage has two virtual stages then",
            );
        }
        if config.parallel.pipeline_layout.is_some() {
            return refused(
                "--layout auto tries several numbers of stages, and parallel.pipeline_layout gives the blocks of one; leave \
                 --pipeline-layout out",
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
        let found = Layouts {
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
        let blocks = run.settings.model.layers;
        match ThreadPoolBuilder::new().stack_size(STACK_BYTES).build() {
            Ok(workers) => workers.install(|| found.find(config, target, blocks)),
            Err(_) => found.find(config, target, blocks),
        }
    }

    /// Searches all grids.
    fn find(
        mut self,
        config: &Config,
        target: Target,
        blocks: usize,
    ) -> Result<Layouts, SessionError> {
        let mut starts = self.starts(config, target, blocks)?;
        starts.sort_by(|one, other| one.seconds.total_cmp(&other.seconds));
        let mut fitting = Vec::new();
        for starts in starts.chunks(AT_A_TIME) {
            self.search(config, target, starts, &mut fitting)?;
        }
        let slower = fitting.split_off(SHOWN.min(fitting.len()));
        let slower = slower.iter().map(|slower| slower.layout.grid);
        self.slower.extend(slower);
        let shown = fitting.into_par_iter().with_max_len(1);
        let shown = shown.map(|layout| PlannedLayout::new(layout, target));
        self.layouts = shown.collect::<Result<_, _>>()?;
        Ok(self)
    }

    /// Every grid that is not refused, as the run is configured.
    fn starts(
        &mut self,
        config: &Config,
        target: Target,
        blocks: usize,
    ) -> Result<Vec<Start>, SessionError> {
        let grids: Vec<Grid> = Grid::all(self.ranks, blocks).collect();
        // Each thread makes its own plans: what they are made of is not shared.
        let asked = grids
            .par_iter()
            .map(|grid| Asked::new(&Setup::new(config.clone(), target)?, *grid));
        let mut starts = Vec::new();
        for asked in asked.collect::<Result<Vec<Asked>, SessionError>>()? {
            match asked {
                Asked::Starts(start) => starts.push(start),
                Asked::TooFewMicroBatches(grid) => self.too_few_micro_batches.push(grid),
                Asked::Refused(layout) => {
                    let same = |other: &RefusedLayout| other.is_refused_as(&layout);
                    if !self.refused.iter().any(same) {
                        self.refused.push(layout);
                    }
                }
            }
        }
        Ok(starts)
    }

    /// Makes grids fit, unless as many as are shown are faster than these are estimated to be as configured. `fitting` has those that
    /// fit, the fastest first.
    fn search(
        &mut self,
        config: &Config,
        target: Target,
        starts: &[Start],
        fitting: &mut Vec<Timed>,
    ) -> Result<(), SessionError> {
        let slowest = slowest_shown(fitting);
        let (tried, slower): (Vec<Start>, Vec<Start>) =
            starts.iter().partition(|start| start.seconds < slowest);
        self.slower.extend(slower.iter().map(|start| start.grid));
        let room = self.device_memory_bytes;
        // One at a time: some take twenty times as long as others.
        let tried = tried.par_iter().with_max_len(1).map(|start| {
            let run = Setup::new(config.clone(), target)?;
            Tried::new(&run, start.grid, room)
        });
        let mut found = Vec::new();
        for tried in tried.collect::<Result<Vec<Tried>, SessionError>>()? {
            match tried {
                Tried::Fits(layout) => found.push(*layout),
                Tried::TooLarge(layout) => self.too_large.push(layout),
            }
        }
        // Those that may be fastest first, so that few pipelines are timed: all their stages are timed together, each in a thread.
        found.sort_by(|one, other| one.at_least_seconds.total_cmp(&other.at_least_seconds));
        for layout in found {
            if layout.at_least_seconds >= slowest_shown(fitting) {
                self.slower.push(layout.grid);
                continue;
            }
            fitting.push(Timed::new(layout, target)?);
            fitting.sort_by(|one, other| one.step.seconds.total_cmp(&other.step.seconds));
        }
        Ok(())
    }
}

/// The time of the slowest layout that is shown, of those found so far, the fastest first; infinite while there is room for more.
fn slowest_shown(fitting: &[Timed]) -> f64 {
    let shown = fitting.get(SHOWN - 1);
    shown.map_or(f64::INFINITY, |layout| layout.step.seconds)
}

/// A grid, and an estimate of its step as the run is configured: as if all stages took as long as the longest.
#[derive(Clone, Copy)]
struct Start {
    grid: Grid,
    seconds: f64,
}

/// Whether a grid may be searched.
enum Asked {
    Starts(Start),
    TooFewMicroBatches(Grid),
    Refused(RefusedLayout),
}

impl Asked {
    fn new(run: &Setup, grid: Grid) -> Result<Asked, SessionError> {
        let Some(change) = grid.change(run) else {
            return Ok(Asked::TooFewMicroBatches(grid));
        };
        match run.try_with(&change) {
            Ok(setup) => {
                let mut seconds = f64::INFINITY;
                for setup in [setup.within_machines(), Some(setup)].into_iter().flatten() {
                    let settings = setup.settings;
                    let longest = settings.pipeline.as_ref().map_or(0, Pipeline::longest);
                    let settings = settings.in_stage(longest);
                    seconds = seconds.min(PaperSeconds::new(&settings, run.target)?.step);
                }
                Ok(Asked::Starts(Start { grid, seconds }))
            }
            Err(error) => {
                let reason = error.to_string();
                Ok(Asked::Refused(RefusedLayout { grid, reason }))
            }
        }
    }
}

/// A layout that fits, before it is known whether it is shown.
struct Fitting {
    grid: Grid,
    config: Config,
    /// The settings to add, each as `--set` takes it.
    set: Vec<String>,
    needs_bytes: u64,
    host_pinned_bytes: u64,
    /// A step takes no less time on paper.
    at_least_seconds: f64,
}

/// A layout that fits, and a step of it on paper.
struct Timed {
    layout: Fitting,
    step: StageOnPaper,
}

impl Timed {
    fn new(layout: Fitting, target: Target) -> Result<Timed, SessionError> {
        let settings = Setup::new(layout.config.clone(), target)?.settings;
        let step = Paper::new(&settings, target, Measured::new()).whole(&settings)?;
        Ok(Timed { layout, step })
    }
}

/// The result of searching a grid for changes that make it fit.
enum Tried {
    Fits(Box<Fitting>),
    TooLarge(TooLarge),
}

impl Tried {
    fn new(run: &Setup, grid: Grid, room: u64) -> Result<Tried, SessionError> {
        let change = grid.change(run).unwrap_or_default();
        let setup = run.try_with(&change)?;
        let least = with_all(&setup, keeps_formats).about_the_largest_stage()?;
        let needs_bytes = Run::about_needs_bytes(&least)?;
        if needs_bytes > room + room / SLACK {
            return Ok(Tried::TooLarge(TooLarge { grid, needs_bytes }));
        }
        let mut climb = Climb::of_all_stages(&setup, room, keeps_formats)?;
        let needs_bytes = climb.run.needs_bytes();
        if needs_bytes > room {
            return Ok(Tried::TooLarge(TooLarge { grid, needs_bytes }));
        }
        climb.gather_within_machines(room)?;
        Ok(Tried::Fits(Box::new(Fitting {
            grid,
            at_least_seconds: at_least_seconds(&climb.run.setup)?,
            config: climb.run.setup.config.clone(),
            set: change.and(&climb.change).set(),
            needs_bytes: climb.run.needs_bytes(),
            host_pinned_bytes: climb.run.needs.host_pinned_bytes,
        })))
    }
}

/// A step takes at least as long as if all stages of the pipeline were like the shortest: tasks have one order, in which longer tasks make
/// others wait longer.
fn at_least_seconds(setup: &Setup) -> Result<f64, SessionError> {
    let mut least = f64::INFINITY;
    for stage in distinct_stages(&setup.settings) {
        let settings = setup.settings.in_stage(stage);
        least = least.min(PaperSeconds::new(&settings, setup.target)?.step);
    }
    Ok(least)
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
    fn new(Timed { layout, step }: Timed, target: Target) -> Result<PlannedLayout, SessionError> {
        let Setup {
            config, settings, ..
        } = Setup::new(layout.config, target)?;
        let paper = Paper::new(&settings, target, Measured::new());
        let ranks = settings.ranks.as_ref();
        Ok(PlannedLayout {
            grid: layout.grid,
            zero: ranks.map_or(Zero::Replicated, |ranks| ranks.zero),
            shard_group: ranks.and_then(|ranks| ranks.shard_group),
            set: layout.set,
            recompute: config.recompute.spec,
            micro_batch: settings.micro_batch,
            accum: settings.accum,
            tile_tokens: settings.tile_tokens,
            on_host: on_host(&settings),
            needs_bytes: layout.needs_bytes,
            host_pinned_bytes: layout.host_pinned_bytes,
            sent_bytes: quick_figures(&settings, target)?
                .crossed()?
                .total()
                .sent_bytes,
            bound: bound(&settings, target, step)?,
            time: StepTime::of(&settings, &paper, step),
        })
    }
}

/// What takes the time of a step: what saves most if it takes none.
fn bound(settings: &Settings, target: Target, step: StageOnPaper) -> Result<Bound, SessionError> {
    if step.seconds <= (1.0 + HIDDEN) * step.computing {
        let waits = step.working < (1.0 - HIDDEN) * step.computing;
        return Ok(if waits { Bound::Stages } else { Bound::Compute });
    }
    let mut settings = settings.clone();
    if settings.pipeline.is_none() {
        // Later micro-batches take what the second does.
        settings.accum = settings.accum.min(MICRO_BATCHES_MAX);
    }
    let seconds = |free: fn(Rates) -> Rates| {
        let mut paper = Paper::new(&settings, target, Measured::new());
        paper.rates = free(paper.rates);
        Ok::<f64, SessionError>(paper.whole(&settings)?.seconds)
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
    let labels = policy.labels.iter().filter(|label| {
        let mut layers = 0..policy.layers();
        layers.any(|layer| policy.actions(layer).of(*label) == Action::Offload)
    });
    places
        .chain(labels.map(|label| label.name().to_string()))
        .collect()
}
