//! Finds changes that make a run fit a device's memory: `plan --device-memory`.

use crate::change::{Change, other_training};
use crate::figures::{figures, quick_figures};
use crate::gpus;
use crate::levers::{Lever, Setup, levers};
use crate::tries::{Needs, Tries};
use kernels::Target;
use memory::format_bytes;
use report::{Align, Table};
use serde::Serialize;
use session::SessionError;
use settings::Config;
use std::fmt::{Display, Formatter};
use std::rc::Rc;

/// The steps by which a run is made to fit a device's memory.
///
/// Each rung is a change that saves memory, on top of the rungs before. The list ends at the first configuration that
/// fits. Changes that turn out unnecessary are undone, most expensive first. Changes that add no time to a step on
/// paper come first: first those that keep the bits of the loss, then the others. Next come changes that take time, or
/// host memory over a link whose rate is assumed, the cheapest first. Gradients without clipping and shorter sequences
/// come last, at any cost, because they change what the model learns.
#[derive(Clone, Debug, Serialize)]
pub struct Advice {
    /// The memory of the device.
    pub device_memory_bytes: u64,
    /// Whether the last rung fits; without rungs, the run as it is.
    pub fits: bool,
    /// What the last configuration needs: its reserved bytes, and the overhead.
    pub needs_bytes: u64,
    /// The rungs, in order.
    pub rungs: Vec<Rung>,
    /// The command that trains the configuration that fits.
    pub command: Option<String>,
    /// Where the run does not fit as it is: other trainings that do, in which adapters alone learn.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub other_trainings: Vec<OtherTraining>,
    #[serde(skip)]
    target: Target,
}

/// A training of adapters that fits, instead of the one that was asked for.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OtherTraining {
    /// The change in words.
    pub what: String,
    /// The settings to add, each as `--set` takes it.
    pub set: Vec<String>,
    /// Bytes that the changed run needs: reserved, and the overhead.
    pub needs_bytes: u64,
    /// Pinned host memory with it.
    pub host_pinned_bytes: u64,
    /// The command that trains so.
    pub command: Option<String>,
}

/// One change, on top of those before.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Rung {
    /// The change in words.
    pub what: String,
    /// The settings to add, each as `--set` takes it.
    pub set: Vec<String>,
    /// The peak with it.
    pub peak_bytes: u64,
    /// Slab and everything that lives across steps, with it.
    pub reserved_bytes: u64,
    /// By how much it lowers the peak.
    pub saves_bytes: u64,
    /// The time that it adds to a step on paper, as a share of the original run's step.
    pub cost_fraction: f64,
    /// Pinned host memory with it.
    pub host_pinned_bytes: u64,
    /// The loss is no longer bitwise the same, if only by the order of sums.
    pub changes_math: bool,
    /// It moves something to host memory.
    #[serde(skip)]
    is_on_host: bool,
}

/// A smaller share of a step than this counts as no cost: it may be rounding.
const NO_COST: f64 = 1e-6;

/// A change of the loss's bits is not worth a smaller share of a step's time than this.
const COST_OF_BITS: f64 = 0.02;

/// The levers that may save memory, in the order of [`Advice`], without those whose change `wanted` rejects. One that may help several
/// times is repeated.
fn in_order(
    run: &Run,
    tries: &mut Tries,
    wanted: impl Fn(&Change) -> bool,
) -> Result<Vec<Rc<Lever>>, SessionError> {
    let settings = &run.setup.settings;
    let halves = settings.micro_batch.max(settings.seq).ilog2() as usize;
    let mut pulled = Vec::new();
    for lever in levers(&run.setup) {
        if lever.rung.is_empty() {
            continue;
        }
        // One that changes nothing may do so once others were pulled.
        let change = (lever.pull)(&run.setup);
        if change.as_ref().is_none_or(&wanted) {
            let changed = change.as_ref().and_then(|change| run.setup.with(change));
            pulled.push((lever, change.unwrap_or_default(), changed));
        }
    }
    let changed = pulled.iter().filter_map(|(.., changed)| changed.clone());
    tries.time_all(&changed.collect::<Vec<Setup>>())?;
    let mut ranked = Vec::new();
    for (lever, change, changed) in pulled {
        let cost = match changed {
            Some(changed) => tries.seconds(&changed)? / run.seconds - 1.0,
            None => 0.0,
        };
        // Shorter sequences and no clipping change what the model learns, whatever they cost.
        let tier = match change.sets(&["data.seq", "optim.clip_norm"]) {
            true => 2,
            false => u8::from(cost > NO_COST || change.offloads()),
        };
        let cost = if tier == 1 { cost } else { 0.0 };
        // These halve their value, so they may be pulled again.
        let times = match change.sets(&["data.seq", "batch.micro"]) {
            true => halves,
            false => 1,
        };
        ranked.push((tier, cost, change.changes_math(), times, Rc::new(lever)));
    }
    ranked.sort_by(|a, b| {
        let costs = a.1.total_cmp(&b.1);
        a.0.cmp(&b.0).then(costs).then(a.2.cmp(&b.2))
    });
    let ranked = ranked.into_iter();
    let repeated = ranked.flat_map(|(.., times, lever)| std::iter::repeat_n(lever, times));
    Ok(repeated.collect())
}

/// A run with the rungs so far.
#[derive(Clone)]
pub(crate) struct Run {
    pub(crate) setup: Setup,
    pub(crate) needs: Needs,
    pub(crate) seconds: f64,
}

impl Run {
    /// The run as it is, to the byte.
    fn exact(setup: Setup, tries: &mut Tries) -> Result<Run, SessionError> {
        Ok(Run {
            needs: Needs::of(&figures(&setup.settings, setup.target)?),
            seconds: tries.seconds(&setup)?,
            setup,
        })
    }

    /// The same in less time: see [`quick_figures`].
    fn new(setup: Setup, tries: &mut Tries) -> Result<Run, SessionError> {
        Ok(Run {
            needs: tries.needs(&setup)?,
            seconds: tries.seconds(&setup)?,
            setup,
        })
    }

    /// About what a device has to hold for a run.
    pub(crate) fn about_needs_bytes(setup: &Setup) -> Result<u64, SessionError> {
        let planned = quick_figures(&setup.settings, setup.target)?;
        Ok(planned.reserved_bytes + gpus::overhead_bytes(setup.target, &setup.settings))
    }

    /// What a device has to hold: reserved bytes, and the overhead.
    pub(crate) fn needs_bytes(&self) -> u64 {
        let Setup {
            settings, target, ..
        } = &self.setup;
        self.needs.reserved_bytes + gpus::overhead_bytes(*target, settings)
    }

    /// The run with a change; none if the change is refused or saves nothing.
    fn with(&self, change: &Change, tries: &mut Tries) -> Result<Option<Run>, SessionError> {
        let Some(setup) = self.setup.with(change) else {
            return Ok(None);
        };
        let needs = tries.needs(&setup)?;
        let saves = needs.peak_bytes < self.needs.peak_bytes
            && needs.reserved_bytes < self.needs.reserved_bytes;
        // Times on paper take several steps on shapes.
        saves.then(|| Run::new(setup, tries)).transpose()
    }
}

/// The levers that helped a run, what each did, and the run then.
pub(crate) struct Climb {
    taken: Vec<Rc<Lever>>,
    /// The changes of all, together.
    pub(crate) change: Change,
    pub(crate) rungs: Vec<Rung>,
    pub(crate) run: Run,
}

/// A run with every lever pulled whose change is wanted: about the smallest that a climb can reach.
pub(crate) fn with_all(start: &Setup, wanted: impl Fn(&Change) -> bool) -> Setup {
    let levers = levers(start).into_iter();
    let levers = levers.filter(|lever| !lever.rung.is_empty());
    levers.fold(start.clone(), |mut setup, lever| {
        // A micro-batch may be halved several times.
        while let Some(change) = (lever.pull)(&setup).filter(|change| wanted(change)) {
            let Some(changed) = setup.with(&change) else {
                break;
            };
            let is_again = change.sets(&["batch.micro"]);
            setup = changed;
            if !is_again {
                break;
            }
        }
        setup
    })
}

impl Climb {
    /// As [`Climb::to_fit`], until the largest stage of a pipeline fits too.
    pub(crate) fn of_all_stages(
        start: &Setup,
        room: u64,
        wanted: impl Fn(&Change) -> bool,
    ) -> Result<Climb, SessionError> {
        let tries = &mut Tries::default();
        let start = Run::new(start.about_the_largest_stage()?, tries)?;
        let mut climb = Climb::to_fit(&start, room, tries, &wanted)?;
        while climb.run.needs_bytes() <= room && climb.run.setup.settings.pipeline.is_some() {
            let largest = Run::exact(climb.run.setup.largest_stage()?, tries)?;
            let further = Climb::to_fit(&largest, room, tries, &wanted)?;
            if further.rungs.is_empty() {
                return Ok(Climb {
                    run: largest,
                    ..climb
                });
            }
            climb = climb.and(further);
        }
        Ok(climb)
    }

    /// Lets each machine's ranks have all weights together, if that fits and makes a step faster.
    pub(crate) fn gather_within_machines(&mut self, room: u64) -> Result<(), SessionError> {
        let setup = &self.run.setup;
        let Some((change, within)) = setup
            .gathering_within_machines()
            .zip(setup.within_machines())
        else {
            return Ok(());
        };
        let run = Run::new(within, &mut Tries::default())?;
        if run.needs_bytes() <= room && run.seconds < self.run.seconds {
            self.change = self.change.and(&change);
            self.run = run;
        }
        Ok(())
    }

    /// This climb followed by one that starts where it ends.
    fn and(self, further: Climb) -> Climb {
        Climb {
            taken: [self.taken, further.taken].concat(),
            change: self.change.and(&further.change),
            rungs: [self.rungs, further.rungs].concat(),
            run: further.run,
        }
    }

    /// Pulls levers whose changes are wanted until a run fits, and then leaves out what is not needed.
    fn to_fit(
        start: &Run,
        room: u64,
        tries: &mut Tries,
        wanted: impl Fn(&Change) -> bool,
    ) -> Result<Climb, SessionError> {
        let order = match start.needs_bytes() <= room {
            true => Vec::new(),
            false => in_order(start, tries, wanted)?,
        };
        let climb = Climb::new(start, order, room, tries)?;
        match climb.run.needs_bytes() <= room {
            true => climb.without_needless(start, room, tries),
            false => Ok(climb),
        }
    }

    /// Applies each lever that saves memory, until the run fits.
    fn new(
        start: &Run,
        order: Vec<Rc<Lever>>,
        room: u64,
        tries: &mut Tries,
    ) -> Result<Climb, SessionError> {
        let mut climb = Climb {
            taken: Vec::new(),
            change: Change::default(),
            rungs: Vec::new(),
            run: start.clone(),
        };
        for lever in order {
            if climb.run.needs_bytes() <= room {
                break;
            }
            let Some(change) = (lever.pull)(&climb.run.setup) else {
                continue;
            };
            let Some(changed) = climb.run.with(&change, tries)? else {
                continue;
            };
            climb.rungs.push(Rung {
                what: changed.setup.of_stage() + &changed.setup.words(&lever.rung),
                set: change.set(),
                peak_bytes: changed.needs.peak_bytes,
                reserved_bytes: changed.needs.reserved_bytes,
                saves_bytes: climb.run.needs.peak_bytes - changed.needs.peak_bytes,
                cost_fraction: (changed.seconds - climb.run.seconds) / start.seconds,
                host_pinned_bytes: changed.needs.host_pinned_bytes,
                changes_math: change.changes_math(),
                is_on_host: change.offloads(),
            });
            climb.change = climb.change.and(&change);
            climb.taken.push(lever);
            climb.run = changed;
        }
        Ok(climb)
    }

    /// Leaves out changes that cost time, host memory or bits of the loss and that later changes made unnecessary. The last
    /// ones cost most, so they are tried first. For bits a step may be a little slower.
    fn without_needless(
        self,
        start: &Run,
        room: u64,
        tries: &mut Tries,
    ) -> Result<Climb, SessionError> {
        let (mut needed, mut seconds) = (self.taken.clone(), self.run.seconds);
        for place in (0..needed.len().saturating_sub(1)).rev() {
            let rung = &self.rungs[place];
            if rung.cost_fraction <= NO_COST && !rung.is_on_host && !rung.changes_math {
                continue;
            }
            let mut fewer = needed.clone();
            fewer.remove(place);
            let setup = fewer.iter().try_fold(start.setup.clone(), |setup, lever| {
                setup.with(&(lever.pull)(&setup)?)
            });
            let Some(setup) = setup else { continue };
            let run = Run::new(setup, tries)?;
            // Replays may have hidden copies: without them, a step is not always faster.
            let slower_by = if rung.changes_math { COST_OF_BITS } else { 0.0 };
            if run.needs_bytes() <= room && run.seconds <= seconds * (1.0 + slower_by) {
                (needed, seconds) = (fewer, run.seconds);
            }
        }
        if needed.len() == self.taken.len() {
            return Ok(self);
        }
        let climb = Climb::new(start, needed, room, tries)?;
        Ok(match climb.run.needs_bytes() <= room {
            true => climb,
            false => self,
        })
    }
}

impl Advice {
    /// Tries changes until the run fits.
    ///
    /// # Errors
    /// As [`crate::Plan::new`].
    pub fn new(
        config: &Config,
        target: Target,
        device_memory_bytes: u64,
    ) -> Result<Advice, SessionError> {
        let start = Setup::new(config.clone(), target)?;
        let climb = Climb::of_all_stages(&start, device_memory_bytes, |_| true)?;
        let fits = climb.run.needs_bytes() <= device_memory_bytes;
        let other_trainings = match fits && climb.rungs.is_empty() {
            true => Vec::new(),
            false => OtherTraining::all(&start, device_memory_bytes)?,
        };
        Ok(Advice {
            device_memory_bytes,
            fits,
            needs_bytes: climb.run.needs_bytes(),
            rungs: climb.rungs,
            command: None,
            other_trainings,
            target,
        })
    }

    /// The settings of all rungs, in order. Later ones replace earlier ones of the same key.
    pub fn set(&self) -> Vec<String> {
        self.rungs
            .iter()
            .flat_map(|rung| rung.set.clone())
            .collect()
    }

    fn table(&self) -> Table {
        let on_host = self.rungs.iter().any(|rung| rung.host_pinned_bytes > 0);
        let mut columns = vec![
            ("each on top of those above", Align::Left),
            ("peak", Align::Right),
            ("saves", Align::Right),
            ("time on paper", Align::Right),
            ("loss", Align::Left),
        ];
        if on_host {
            columns.insert(4, ("on the host", Align::Right));
        }
        let mut table = Table::of(&columns);
        for rung in &self.rungs {
            let mut cells = vec![
                rung.what.clone(),
                format_bytes(rung.peak_bytes),
                format_bytes(rung.saves_bytes),
                // No negative zero.
                format!("{:+.1} %", (1e3 * rung.cost_fraction).round() / 10.0 + 0.0),
                if rung.changes_math {
                    "other bits"
                } else {
                    "same bits"
                }
                .into(),
            ];
            if on_host {
                cells.insert(4, format_bytes(rung.host_pinned_bytes));
            }
            table.row(cells);
        }
        table
    }

    /// What to do if even the smallest configuration found does not fit.
    fn way_out(&self) -> String {
        if self.target == Target::Cpu {
            return "take a smaller model, or a machine with as much".into();
        }
        match gpus::holding(self.needs_bytes).as_slice() {
            [] => {
                "take a smaller model, or a device with as much: no GPU that is known here has it"
                    .into()
            }
            names => format!("that fits {}", names.join(", ")),
        }
    }
}

/// Whether a change leaves what the model learns of each sequence.
fn keeps_learning(change: &Change) -> bool {
    !change.sets(&["data.seq", "optim.clip_norm"])
}

impl OtherTraining {
    /// Those that fit, with as few further changes as they need.
    fn all(start: &Setup, room: u64) -> Result<Vec<OtherTraining>, SessionError> {
        let mut fitting = Vec::new();
        for (words, change) in start.adapters() {
            let Some(setup) = start.with(&change) else {
                continue;
            };
            let climb = match Climb::of_all_stages(&setup, room, keeps_learning) {
                Ok(climb) => climb,
                // A matrix of this model may be too small for adapters.
                Err(SessionError::Config(_)) => continue,
                Err(defect) => return Err(defect),
            };
            if climb.run.needs_bytes() > room {
                continue;
            }
            let rungs = climb.rungs.iter().map(|rung| rung.what.clone());
            fitting.push(OtherTraining {
                what: std::iter::once(words)
                    .chain(rungs)
                    .collect::<Vec<_>>()
                    .join(", "),
                set: change.and(&climb.change).set(),
                needs_bytes: climb.run.needs_bytes(),
                host_pinned_bytes: climb.run.needs.host_pinned_bytes,
                command: None,
            });
        }
        Ok(fitting)
    }
}

impl Display for OtherTraining {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let needed = format_bytes(self.needs_bytes);
        let host = match self.host_pinned_bytes {
            0 => String::new(),
            bytes => format!(", and {} of host memory", format_bytes(bytes)),
        };
        writeln!(
            f,
            "  {}: needs {needed}, overhead included{host}",
            self.what
        )?;
        match &self.command {
            Some(command) => writeln!(f, "  {command}"),
            None => Ok(()),
        }
    }
}

impl Display for Advice {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let (room, needed) = (self.device_memory_bytes, format_bytes(self.needs_bytes));
        writeln!(f, "\nto fit {} ({room} bytes)\n", format_bytes(room))?;
        if !self.rungs.is_empty() {
            writeln!(f, "{}", self.table())?;
        }
        match (self.fits, self.rungs.is_empty()) {
            (true, true) => writeln!(f, "it fits as it is: it needs {needed}, overhead included")?,
            (true, false) => writeln!(f, "it fits then: it needs {needed}, overhead included")?,
            (false, _) => writeln!(
                f,
                "nothing that is known here makes it fit: the least needs {needed}, overhead included; {}",
                self.way_out()
            )?,
        }
        if let Some(command) = &self.command {
            writeln!(f, "\n{command}")?;
        }
        if let Some(first) = self.other_trainings.first() {
            let too = if self.fits { "fits too" } else { "fits" };
            writeln!(f, "\n{}, {too}:", other_training(&first.set))?;
        }
        let mut others = self.other_trainings.iter();
        others.try_for_each(|other| write!(f, "{other}"))
    }
}
