//! Finds how several ranks divide a run that has to fit their devices: `plan --layout auto`.

use crate::change::{Change, set};
use crate::distinct_stages::distinct_stages;
use crate::figures::quick_figures;
use crate::levers::Setup;
use crate::on_paper::{Paper, StepOnPaper};
use crate::ranks::StepTime;
use crate::room::Room;
use crate::search::{Run, Search};
use kernels::Target;
use kernels::timeline::Rates;
use memory::Home;
use model::Action;
use rayon::ThreadPoolBuilder;
use rayon::prelude::*;
use serde::Serialize;
use session::{MICRO_BATCHES_MAX, Result, SessionError};
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
    pub fn new(config: &Config, target: Target, device_memory_bytes: u64) -> Result<Layouts> {
        let run = Setup::new(config.clone(), target)?;
        let ranks = run.settings.rank_of_all().of;
        let parallel = &config.parallel;
        let refused = [
            (
                parallel.virtual_stage_layers.is_some(),
                "--layout auto tries one stage too, which has no virtual stages, and parallel.virtual_stage_layers gives their blocks; \
                 leave --num-layers-per-virtual-pipeline-stage out: each stage has two virtual stages then",
            ),
            (
                parallel.pipeline_layout.is_some(),
                "--layout auto tries several numbers of stages, and parallel.pipeline_layout gives the blocks of one; leave \
                 --pipeline-layout out",
            ),
            (
                ranks == 1,
                "--layout auto divides a run among ranks, and there is one; add --ranks N",
            ),
            (
                !StepTime::is_known(&run.settings, target),
                "--layout auto compares times, and how fast ranks of processors exchange is not known; add --set hardware.link_gbps=X",
            ),
        ];
        if let Some((_, reason)) = refused.into_iter().find(|(is_so, _)| *is_so) {
            return Err(ConfigError::Contradiction(reason.into()).into());
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
        match ThreadPoolBuilder::new().stack_size(STACK_BYTES).build() {
            Ok(workers) => workers.install(|| found.find(&run)),
            Err(_) => found.find(&run),
        }
    }

    /// Searches all grids.
    fn find(mut self, run: &Setup) -> Result<Layouts> {
        let grids: Vec<Grid> = Grid::all(self.ranks, run.settings.model.layers).collect();
        let starts = grids.into_par_iter().map(|grid| Start::new(run, grid));
        let starts = starts.collect::<Result<Vec<_>>>()?;
        let mut starts = self.without_excluded(starts);
        starts.sort_by(|one, other| one.seconds.total_cmp(&other.seconds));
        let mut fitting = Vec::new();
        for starts in starts.chunks(AT_A_TIME) {
            self.search(starts, &mut fitting)?;
        }
        let slower = fitting.split_off(SHOWN.min(fitting.len()));
        self.slower
            .extend(slower.iter().map(|(layout, _)| layout.grid));
        let shown = fitting.into_par_iter().with_max_len(1);
        let shown = shown.map(|(layout, step)| PlannedLayout::new(layout, step));
        self.layouts = shown.collect::<Result<_, _>>()?;
        Ok(self)
    }

    /// What is left of results, without grids that are out for a reason, which is noted.
    fn without_excluded<T>(&mut self, results: Vec<Result<T, Excluded>>) -> Vec<T> {
        let mut left = Vec::new();
        for result in results {
            match result {
                Ok(one) => left.push(one),
                Err(Excluded::TooFewMicroBatches(grid)) => self.too_few_micro_batches.push(grid),
                Err(Excluded::TooLarge(layout)) => self.too_large.push(layout),
                Err(Excluded::Refused(layout)) => {
                    let same = |other: &RefusedLayout| other.is_refused_as(&layout);
                    if !self.refused.iter().any(same) {
                        self.refused.push(layout);
                    }
                }
            }
        }
        left
    }

    /// Makes grids fit, unless as many as are shown are faster than these are estimated to be as configured. `fitting` has those that
    /// fit, with a step on paper, the fastest first.
    fn search(&mut self, starts: &[Start], fitting: &mut Vec<(Fitting, StepOnPaper)>) -> Result {
        let slowest = slowest_shown(fitting);
        let (tried, slower): (Vec<&Start>, Vec<&Start>) =
            starts.iter().partition(|start| start.seconds < slowest);
        self.slower.extend(slower.iter().map(|start| start.grid));
        let room = self.device_memory_bytes;
        // One at a time: some take twenty times as long as others.
        let tried = tried.into_par_iter().with_max_len(1);
        let tried = tried.map(|start| Fitting::new(start, room));
        let mut found = self.without_excluded(tried.collect::<Result<Vec<_>>>()?);
        // Those that may be fastest first, so that few pipelines are timed: all their stages are timed together, each in a thread.
        found.sort_by(|one, other| one.at_least_seconds.total_cmp(&other.at_least_seconds));
        for layout in found {
            if layout.at_least_seconds >= slowest_shown(fitting) {
                self.slower.push(layout.grid);
                continue;
            }
            let Setup {
                settings, target, ..
            } = &layout.run.setup;
            let step = Paper::at_rates(settings, *target).whole(settings)?;
            fitting.push((layout, step));
            fitting.sort_by(|(_, one), (_, other)| one.seconds.total_cmp(&other.seconds));
        }
        Ok(())
    }
}

/// The time of the slowest layout that is shown, of those found so far, the fastest first; infinite while there is room for more.
fn slowest_shown(fitting: &[(Fitting, StepOnPaper)]) -> f64 {
    let shown = fitting.get(SHOWN - 1);
    shown.map_or(f64::INFINITY, |(_, step)| step.seconds)
}

/// Why a grid is not searched any further.
enum Excluded {
    TooFewMicroBatches(Grid),
    TooLarge(TooLarge),
    Refused(RefusedLayout),
}

/// A grid, and an estimate of its step as the run is configured: as if all stages took as long as the longest.
struct Start {
    grid: Grid,
    change: Change,
    setup: Setup,
    seconds: f64,
}

impl Start {
    fn new(run: &Setup, grid: Grid) -> Result<Result<Start, Excluded>> {
        let Some(change) = grid.change(run) else {
            return Ok(Err(Excluded::TooFewMicroBatches(grid)));
        };
        let setup = match run.try_with(&change) {
            Ok(setup) => setup,
            Err(error) => {
                let reason = error.to_string();
                return Ok(Err(Excluded::Refused(RefusedLayout { grid, reason })));
            }
        };
        let longest = setup
            .settings
            .pipeline
            .as_ref()
            .map_or(0, Pipeline::longest);
        let mut seconds = setup.in_stage(longest).seconds()?;
        if let Some((_, within)) = setup.within_machines() {
            seconds = seconds.min(within.in_stage(longest).seconds()?);
        }
        Ok(Ok(Start {
            grid,
            change,
            setup,
            seconds,
        }))
    }
}

/// A layout that fits, before it is known whether it is shown.
struct Fitting {
    grid: Grid,
    /// The settings to add, each as `--set` takes it.
    set: Vec<String>,
    run: Run,
    /// A step takes no less time on paper.
    at_least_seconds: f64,
}

impl Fitting {
    /// Looks for changes that make a grid fit.
    fn new(start: &Start, room: u64) -> Result<Result<Fitting, Excluded>> {
        let grid = start.grid;
        let too_large = |needs_bytes| Ok(Err(Excluded::TooLarge(TooLarge { grid, needs_bytes })));
        let mut search = Search::new(Room::Device(room));
        let (_, least) = start.setup.with_all(keeps_formats);
        let least = search
            .needs(&least.about_the_largest_stage()?)?
            .device_bytes;
        if least > room + room / SLACK {
            return too_large(least);
        }
        let mut climb = search.climb(&start.setup, keeps_formats)?;
        if climb.run.needs.device_bytes > room {
            return too_large(climb.run.needs.device_bytes);
        }
        search.gather_within_machines(&mut climb)?;
        Ok(Ok(Fitting {
            grid,
            at_least_seconds: at_least_seconds(&climb.run.setup)?,
            set: start.change.and(&climb.change).set(),
            run: climb.run,
        }))
    }
}

/// A step takes at least as long as if all stages of the pipeline were like the shortest: tasks have one order, in which longer tasks make
/// others wait longer.
fn at_least_seconds(setup: &Setup) -> Result<f64> {
    let mut least = f64::INFINITY;
    for stage in distinct_stages(&setup.settings) {
        least = least.min(setup.in_stage(stage).seconds()?);
    }
    Ok(least)
}

/// Whether a change leaves what is learnt, and the formats of states and gradients, as they are.
fn keeps_formats(change: &Change) -> bool {
    let formats = [
        "train.dtype",
        "optim.grad_dtype",
        "optim.master",
        "optim.release",
        "optim.state_dtype",
    ];
    change.keeps_learning() && !change.sets(&formats)
}

impl PlannedLayout {
    fn new(layout: Fitting, step: StepOnPaper) -> Result<PlannedLayout> {
        let Run { setup, needs, .. } = layout.run;
        let Setup {
            config,
            settings,
            target,
        } = setup;
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
            needs_bytes: needs.device_bytes,
            host_pinned_bytes: needs.host_pinned_bytes,
            sent_bytes: quick_figures(&settings, target)?
                .crossed()?
                .total()
                .sent_bytes,
            bound: bound(&settings, target, step)?,
            time: StepTime::of(&settings, &Paper::at_rates(&settings, target), step),
        })
    }
}

/// What takes the time of a step: what saves most if it takes none.
fn bound(settings: &Settings, target: Target, step: StepOnPaper) -> Result<Bound> {
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
        let mut paper = Paper::at_rates(&settings, target);
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
