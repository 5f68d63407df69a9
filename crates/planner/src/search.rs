//! Pulls levers until a run fits. What was planned and timed once is remembered.

use crate::change::Change;
use crate::figures::{figures, quick_figures};
use crate::levers::{Lever, Setup, levers};
use crate::room::{Needs, Room};
use rayon::prelude::*;
use serde::Serialize;
use session::Result;
use settings::Config;
use std::rc::Rc;

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
pub(crate) const NO_COST: f64 = 1e-6;

/// A change of the loss's bits is not worth a smaller share of a step's time than this.
const COST_OF_BITS: f64 = 0.02;

/// A run, and what it needs.
#[derive(Clone)]
pub(crate) struct Run {
    pub(crate) setup: Setup,
    pub(crate) needs: Needs,
    pub(crate) seconds: f64,
}

/// The levers that helped a run, what each did, and the run then.
pub(crate) struct Climb {
    taken: Vec<Rc<Lever>>,
    /// The changes of all, together.
    pub(crate) change: Change,
    pub(crate) rungs: Vec<Rung>,
    pub(crate) run: Run,
}

impl Climb {
    /// A climb that ends where it begins.
    fn new(start: &Run) -> Climb {
        Climb {
            taken: Vec::new(),
            change: Change::default(),
            rungs: Vec::new(),
            run: start.clone(),
        }
    }
}

/// Runs that were tried, and the memory that one has to fit.
pub(crate) struct Search {
    room: Room,
    /// The configuration says all of a run: it has the rank too, and with it the stage of a pipeline. A search has one target.
    needs: Vec<(Config, Needs)>,
    seconds: Vec<(Config, f64)>,
}

impl Search {
    pub(crate) fn new(room: Room) -> Search {
        Search {
            room,
            needs: Vec::new(),
            seconds: Vec::new(),
        }
    }

    /// What a run needs, by [`quick_figures`].
    ///
    /// # Errors
    /// As [`crate::Plan::new`].
    pub(crate) fn needs(&mut self, run: &Setup) -> Result<Needs> {
        if let Some(known) = find(&self.needs, run) {
            return Ok(known);
        }
        let needs = quick_figures(&run.settings, run.target)?.needs();
        self.needs.push((run.config.clone(), needs));
        Ok(needs)
    }

    /// The seconds of a step of each run on paper. Those that are not known yet are timed in parallel.
    ///
    /// # Errors
    /// As [`crate::Plan::new`].
    pub(crate) fn seconds(&mut self, runs: &[Setup]) -> Result<Vec<f64>> {
        let timed = runs.par_iter().with_max_len(1);
        let timed = timed.map(|run| find(&self.seconds, run).map_or_else(|| run.seconds(), Ok));
        let timed = timed.collect::<Result<Vec<f64>>>()?;
        let configs = runs.iter().map(|run| run.config.clone());
        self.seconds.extend(configs.zip(timed.iter().copied()));
        Ok(timed)
    }

    fn run(&mut self, setup: Setup) -> Result<Run> {
        Ok(Run {
            needs: self.needs(&setup)?,
            seconds: self.seconds(std::slice::from_ref(&setup))?[0],
            setup,
        })
    }

    /// Pulls levers whose changes are wanted until a run fits, the largest stage of a pipeline included.
    pub(crate) fn climb(
        &mut self,
        start: &Setup,
        wanted: impl Fn(&Change) -> bool,
    ) -> Result<Climb> {
        let start = self.run(start.about_the_largest_stage()?)?;
        let mut climb = self.climb_from(&start, &wanted)?;
        while climb.run.needs.fit(self.room) && climb.run.setup.settings.pipeline.is_some() {
            let largest = climb.run.setup.largest_stage()?;
            let largest = Run {
                // To the byte, which quick figures may miss.
                needs: figures(&largest.settings, largest.target)?.needs(),
                ..self.run(largest)?
            };
            let further = self.climb_from(&largest, &wanted)?;
            if further.rungs.is_empty() {
                climb.run = largest;
                break;
            }
            climb = Climb {
                taken: Vec::new(),
                change: climb.change.and(&further.change),
                rungs: [climb.rungs, further.rungs].concat(),
                run: further.run,
            };
        }
        Ok(climb)
    }

    /// Lets each machine's ranks have all weights together, if that fits and makes a step faster.
    pub(crate) fn gather_within_machines(&mut self, climb: &mut Climb) -> Result {
        let Some((change, within)) = climb.run.setup.within_machines() else {
            return Ok(());
        };
        let run = self.run(within)?;
        if run.needs.fit(self.room) && run.seconds < climb.run.seconds {
            climb.change = climb.change.and(&change);
            climb.run = run;
        }
        Ok(())
    }

    /// Pulls levers until a run fits, and then leaves out what is not needed.
    fn climb_from(&mut self, start: &Run, wanted: impl Fn(&Change) -> bool) -> Result<Climb> {
        if start.needs.fit(self.room) {
            return Ok(Climb::new(start));
        }
        let order = self.in_order(start, wanted)?;
        let climb = self.pull(start, order)?;
        match climb.run.needs.fit(self.room) {
            true => self.without_needless(climb, start),
            false => Ok(climb),
        }
    }

    /// The levers that may save memory, in the order of [`crate::Advice`], without those whose change `wanted` rejects. One that may help
    /// several times is repeated.
    fn in_order(&mut self, run: &Run, wanted: impl Fn(&Change) -> bool) -> Result<Vec<Rc<Lever>>> {
        let setup = &run.setup;
        let levers = levers(setup).filter(Lever::saves).filter_map(|lever| {
            // One that changes nothing may do so once others were pulled.
            let change = (lever.pull)(setup).unwrap_or_default();
            let changed = setup.with(&change).unwrap_or_else(|| setup.clone());
            wanted(&change).then_some(((lever, change), changed))
        });
        let (levers, changed): (Vec<(Lever, Change)>, Vec<Setup>) = levers.unzip();
        let seconds = self.seconds(&changed)?;
        let halves = setup.settings.micro_batch.max(setup.settings.seq).ilog2() as usize;
        let ranked = levers
            .into_iter()
            .zip(seconds)
            .map(|((lever, change), seconds)| {
                let cost = seconds / run.seconds - 1.0;
                // Shorter sequences and no clipping change what the model learns, whatever they cost.
                let tier = match change.keeps_learning() {
                    true => u8::from(cost > NO_COST || change.offloads()),
                    false => 2,
                };
                let cost = if tier == 1 { cost } else { 0.0 };
                let times = if change.halves() { halves } else { 1 };
                ((tier, cost, change.changes_math()), times, Rc::new(lever))
            });
        let mut ranked: Vec<_> = ranked.collect();
        ranked.sort_by(|a, b| a.0.partial_cmp(&b.0).expect("times are finite"));
        let ranked = ranked.into_iter();
        let repeated = ranked.flat_map(|(_, times, lever)| std::iter::repeat_n(lever, times));
        Ok(repeated.collect())
    }

    /// Pulls each lever that saves memory, until the run fits.
    fn pull(&mut self, start: &Run, order: Vec<Rc<Lever>>) -> Result<Climb> {
        let mut climb = Climb::new(start);
        for lever in order {
            let before = climb.run.needs;
            if before.fit(self.room) {
                break;
            }
            let Some(change) = (lever.pull)(&climb.run.setup) else {
                continue;
            };
            let Some(setup) = climb.run.setup.with(&change) else {
                continue;
            };
            let needs = self.needs(&setup)?;
            if needs.peak_bytes >= before.peak_bytes
                || needs.reserved_bytes >= before.reserved_bytes
            {
                continue;
            }
            let run = self.run(setup)?;
            climb.rungs.push(Rung {
                what: run.setup.of_stage() + &run.setup.words(&lever.rung),
                set: change.set(),
                peak_bytes: needs.peak_bytes,
                reserved_bytes: needs.reserved_bytes,
                saves_bytes: before.peak_bytes - needs.peak_bytes,
                cost_fraction: (run.seconds - climb.run.seconds) / start.seconds,
                host_pinned_bytes: needs.host_pinned_bytes,
                changes_math: change.changes_math(),
                is_on_host: change.offloads(),
            });
            climb.change = climb.change.and(&change);
            climb.taken.push(lever);
            climb.run = run;
        }
        Ok(climb)
    }

    /// Leaves out changes that cost time, host memory or bits of the loss and that later changes made unnecessary. The last
    /// ones cost most, so they are tried first. For bits a step may be a little slower.
    fn without_needless(&mut self, climb: Climb, start: &Run) -> Result<Climb> {
        let (mut needed, mut seconds) = (climb.taken.clone(), climb.run.seconds);
        for place in (0..needed.len().saturating_sub(1)).rev() {
            let rung = &climb.rungs[place];
            if rung.cost_fraction <= NO_COST && !rung.is_on_host && !rung.changes_math {
                continue;
            }
            let mut fewer = needed.clone();
            fewer.remove(place);
            let setup = fewer.iter().try_fold(start.setup.clone(), |setup, lever| {
                setup.with(&(lever.pull)(&setup)?)
            });
            let Some(setup) = setup else { continue };
            let run = self.run(setup)?;
            // Replays may have hidden copies: without them, a step is not always faster.
            let slower_by = if rung.changes_math { COST_OF_BITS } else { 0.0 };
            if run.needs.fit(self.room) && run.seconds <= seconds * (1.0 + slower_by) {
                (needed, seconds) = (fewer, run.seconds);
            }
        }
        if needed.len() == climb.taken.len() {
            return Ok(climb);
        }
        let shorter = self.pull(start, needed)?;
        Ok(match shorter.run.needs.fit(self.room) {
            true => shorter,
            false => climb,
        })
    }
}

/// What is known of a run.
fn find<T: Copy>(known: &[(Config, T)], run: &Setup) -> Option<T> {
    let found = known.iter().find(|(config, _)| *config == run.config);
    found.map(|(_, value)| *value)
}
