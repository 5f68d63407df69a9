//! A step on shapes with times: what is live while each layer is at work, and how long the layer takes.

use crate::figures::count_step;
use crate::operations::{PlannedOperations, by_group};
use crate::rates;
use kernels::meta::clocks::Clocks;
use kernels::meta::{FlopCounter, Meta};
use kernels::timeline::{Measured, Rates, Span, Timeline};
use kernels::{Queue, Target};
use memory::{History, Layer, LiveLease, Memory, Peak, Phase, Place, Playback};
use session::{
    MICRO_BATCHES_MAX, Result, Session, SessionError, few_micro_batches, micro_batches_on_shapes,
    shape_of_micro_batches,
};
use settings::Settings;
use std::panic::resume_unwind;

/// What times on paper are computed from.
pub(crate) struct Paper {
    pub(crate) target: Target,
    pub(crate) rates: Rates,
    pub(crate) measured: Measured,
}

impl Paper {
    /// The rates of a configuration alone.
    pub(crate) fn at_rates(settings: &Settings, target: Target) -> Paper {
        Paper::new(settings, target, Measured::new())
    }

    /// The rates of a configuration, and measured times, which replace them.
    pub(crate) fn new(settings: &Settings, target: Target, measured: Measured) -> Paper {
        Paper {
            target,
            rates: rates::assumed(settings, target),
            measured,
        }
    }

    /// Makes steps on shapes and records the last: only later ones than the first have an earlier step's update to make. Of a stage of a
    /// pipeline only the times hold, and as if all stages took as long: fewer micro-batches are under way than in a run.
    /// [`Paper::pipeline`] asks all stages.
    ///
    /// # Errors
    /// Only on a defect: shapes need no memory.
    pub(crate) fn step(&self, settings: &Settings) -> Result<OnPaper> {
        let made = MicroBatchesMade::of_a_step(settings, enough(settings));
        let steps = self.later_steps(settings, made, self.timeline(), KeepsHistory(true))?;
        let times = steps.whole(settings).as_if_all_were_equal(settings);
        Ok(OnPaper {
            peak: steps.memory.step_memory().peak,
            largest_at_peak: steps.memory.largest_at_peak(),
            seconds: times.seconds,
            computing: times.computing,
            micro_batches: made.most,
            stretches: stretches(&Playback::new(&steps.history)),
            spans: steps.spans,
        })
    }

    /// The times of [`Paper::step`], without a record.
    fn alone(&self, settings: &Settings) -> Result<StepOnPaper> {
        let made = MicroBatchesMade::of_a_step(settings, enough(settings));
        let steps = self.later_steps(settings, made, self.timeline(), KeepsHistory(false))?;
        Ok(steps.whole(settings).as_if_all_were_equal(settings))
    }

    /// Makes a step of all stages of a pipeline at once, each in a thread of its own, so that a stage waits as long as the others take.
    ///
    /// # Errors
    /// Only on a defect: shapes need no memory.
    pub(crate) fn pipeline(&self, settings: &Settings) -> Result<Vec<StepOnPaper>> {
        // The first stage has the most under way.
        let made = MicroBatchesMade::of_a_step(settings, few_micro_batches(&settings.in_stage(0)));
        let stages: Vec<Settings> = (0..settings.stage().of)
            .map(|stage| settings.in_stage(stage))
            .collect();
        let number = |stage: &Settings| stage.rank_of_all().number;
        let clocks = Clocks::new(stages.iter().map(number).collect());
        std::thread::scope(|scope| {
            let threads: Vec<_> = stages
                .into_iter()
                .map(|stage| {
                    let clock = clocks.of(number(&stage));
                    scope.spawn(move || {
                        let timeline = self.timeline().beside(clock);
                        let steps =
                            self.later_steps(&stage, made, timeline, KeepsHistory(false))?;
                        Ok(steps.whole(&stage))
                    })
                })
                .collect();
            let ends = threads.into_iter().map(|thread| thread.join());
            ends.map(|end| end.unwrap_or_else(|panic| resume_unwind(panic)))
                .collect()
        })
    }

    /// The time of a step, of all stages where there is a pipeline.
    ///
    /// # Errors
    /// Only on a defect: shapes need no memory.
    pub(crate) fn whole(&self, settings: &Settings) -> Result<StepOnPaper> {
        match settings.pipeline {
            Some(_) => Ok(StepOnPaper::of_all(&self.pipeline(settings)?)),
            None => self.alone(settings),
        }
    }

    /// Seconds that each further micro-batch adds to a step.
    ///
    /// # Errors
    /// Only on a defect: shapes need no memory.
    pub(crate) fn another_micro_batch(&self, settings: &Settings) -> Result<f64> {
        let at_a_time = settings.micro_batches_at_a_time();
        let made = MicroBatchesMade::with_one_more(settings);
        let steps = self.later_steps(settings, made, self.timeline(), KeepsHistory(false))?;
        let added = steps.added().expect("two steps were made");
        Ok(added.seconds / at_a_time as f64)
    }

    /// Bytes that operations read and write in a micro-batch and in an update, and their times, by group.
    ///
    /// # Errors
    /// Only on a defect: shapes need no memory.
    pub(crate) fn operations(&self, settings: &Settings) -> Result<Vec<PlannedOperations>> {
        let at_a_time = settings.micro_batches_at_a_time();
        let made = match settings.accum > at_a_time {
            true => MicroBatchesMade::with_one_more(settings),
            false => MicroBatchesMade {
                fewer: None,
                most: settings.accum,
            },
        };
        let steps = self.later_steps(settings, made, self.timeline(), KeepsHistory(false))?;
        let fewer = steps.fewer.as_ref().map(|(_, spans)| &spans[..]);
        let less = made.most - made.fewer.unwrap_or(0);
        Ok(by_group(&steps.spans, fewer.unwrap_or_default(), less))
    }

    fn timeline(&self) -> Timeline {
        Timeline::with_measured(self.rates, self.measured.clone())
    }

    /// Makes a first step, which is there for its update alone, and then those whose times are asked.
    fn later_steps(
        &self,
        settings: &Settings,
        made: MicroBatchesMade,
        timeline: Timeline,
        KeepsHistory(keeps_history): KeepsHistory,
    ) -> Result<LaterSteps> {
        let settings = Settings {
            accum: made.most,
            ..settings.clone()
        };
        let memory = Memory::shapes();
        if keeps_history {
            let clock = timeline.clone();
            memory.keep_history(move || clock.computed().with_copies);
        }
        let dtype = settings.narrowest_dtype();
        let kernels = Meta::new(&memory, self.target, dtype, FlopCounter::default())?
            .of_rank(settings.rank_of_all().number)
            .on(&timeline);
        let batch = |count| shape_of_micro_batches(&settings, &vec![settings.seq; count]);
        let first = batch(made.most.min(enough(&settings)));
        let mut session = Session::on_kernels(settings.clone(), &memory, Box::new(kernels))?;
        session.start_step(&first)?;
        let mut later_step = |count| {
            session.take_finished();
            let before = timeline.computed();
            timeline.keep_spans();
            session.start_step(&batch(count))?;
            count_step();
            let (took, spans) = (timeline.computed().since(before), timeline.take_spans());
            let times = StepOnPaper {
                seconds: took.with_copies,
                computing: took.without_copies,
                working: busy(&spans, |_| true),
            };
            Ok::<(StepOnPaper, Vec<Span>), SessionError>((times, spans))
        };
        let fewer = made.fewer.map(&mut later_step).transpose()?;
        let (most, spans) = later_step(made.most)?;
        Ok(LaterSteps {
            // Taken before the session is dropped and releases what lives across steps.
            history: memory.history().unwrap_or_default(),
            made,
            fewer,
            most,
            spans,
            memory,
        })
    }
}

/// Micro-batches of a stage that is made alone: the second finds what the first leaves behind, and so do all later ones.
fn enough(settings: &Settings) -> usize {
    MICRO_BATCHES_MAX * settings.micro_batches_at_a_time()
}

/// Whether leases are recorded.
struct KeepsHistory(bool);

/// How many micro-batches are made in the steps whose times are asked.
#[derive(Clone, Copy)]
struct MicroBatchesMade {
    /// In the first of two; none if there is one step.
    fewer: Option<usize>,
    most: usize,
}

impl MicroBatchesMade {
    /// To know what another micro-batch adds, or another round of them.
    fn with_one_more(settings: &Settings) -> MicroBatchesMade {
        let most = enough(settings);
        MicroBatchesMade {
            fewer: Some(most - settings.micro_batches_at_a_time()),
            most,
        }
    }

    /// To know the times of a step: one of at most `most` micro-batches, and, if the step has more, another with fewer.
    fn of_a_step(settings: &Settings, most: usize) -> MicroBatchesMade {
        let most = settings.accum.min(most);
        let fewer = most.checked_sub(settings.micro_batches_at_a_time());
        MicroBatchesMade {
            fewer: fewer.filter(|_| settings.accum > most),
            most,
        }
    }
}

/// The seconds of a stage's computation on work that `is_meant` selects.
fn busy(spans: &[Span], is_meant: impl Fn(&Span) -> bool) -> f64 {
    let spans = spans.iter();
    let spans = spans.filter(|span| span.queue == Queue::Compute && is_meant(span));
    spans.map(|span| span.end_s - span.start_s).sum()
}

/// A step on paper: of a pipeline, of one stage while the others make theirs.
#[derive(Clone, Copy, Debug)]
pub struct StepOnPaper {
    /// Seconds of the step, with waits for other stages and copies that are not hidden.
    pub seconds: f64,
    /// The same if copying and sending took no time.
    pub computing: f64,
    /// Seconds in which the stage computes.
    pub working: f64,
}

impl StepOnPaper {
    /// Makes a step on shapes with times, of a pipeline as if all stages took as long.
    ///
    /// # Errors
    /// Only on a defect: shapes need no memory.
    pub fn new(settings: &Settings, target: Target) -> Result<StepOnPaper> {
        Paper::at_rates(settings, target).alone(settings)
    }

    /// Combines each figure with that of another.
    fn with(self, other: &StepOnPaper, both: impl Fn(f64, f64) -> f64) -> StepOnPaper {
        StepOnPaper {
            seconds: both(self.seconds, other.seconds),
            computing: both(self.computing, other.computing),
            working: both(self.working, other.working),
        }
    }

    /// The times of a stage that was made alone: it waits for others as if all took as long.
    fn as_if_all_were_equal(self, settings: &Settings) -> StepOnPaper {
        StepOnPaper {
            seconds: self.seconds * (1.0 + settings.idle_over_work()),
            computing: self.computing,
            working: self.computing,
        }
    }

    /// A step of all stages takes as long as the slowest. Each figure is the most of any stage.
    pub(crate) fn of_all(stages: &[StepOnPaper]) -> StepOnPaper {
        let most =
            |seconds: fn(&StepOnPaper) -> f64| stages.iter().map(seconds).fold(0.0, f64::max);
        StepOnPaper {
            seconds: most(|stage| stage.seconds),
            computing: most(|stage| stage.computing),
            working: most(|stage| stage.working),
        }
    }
}

/// Steps on shapes after a first one.
struct LaterSteps {
    memory: Memory,
    /// The history of the last step.
    history: History,
    /// The spans of the last step.
    spans: Vec<Span>,
    made: MicroBatchesMade,
    /// The step before, with its spans; none if there was one step.
    fewer: Option<(StepOnPaper, Vec<Span>)>,
    most: StepOnPaper,
}

impl LaterSteps {
    /// How much longer the last step took than the one before, which had fewer micro-batches; none if there was one step.
    fn added(&self) -> Option<StepOnPaper> {
        let (fewer, _) = self.fewer.as_ref()?;
        Some(self.most.with(fewer, |most, fewer| most - fewer))
    }

    /// The times of a whole step. Micro-batches that were not made count like those that the last step had more than the one before.
    fn whole(&self, settings: &Settings) -> StepOnPaper {
        let (Some(added), Some(fewer)) = (self.added(), self.made.fewer) else {
            return self.most;
        };
        let more = (settings.accum - self.made.most) / (self.made.most - fewer);
        self.most
            .with(&added, |made, added| made + more as f64 * added)
    }
}

/// What a step does to memory, and what its queues work on, at the rates of the settings: for pictures.
///
/// # Errors
/// Only on a defect: shapes need no memory.
pub fn trace(settings: &Settings, target: Target) -> Result<(History, Vec<Span>)> {
    let made = MicroBatchesMade {
        fewer: None,
        most: micro_batches_on_shapes(settings),
    };
    let paper = Paper::at_rates(settings, target);
    let step = paper.later_steps(settings, made, paper.timeline(), KeepsHistory(true))?;
    Ok((step.history, step.spans))
}

/// A step that was made on shapes.
pub(crate) struct OnPaper {
    pub(crate) peak: Peak,
    pub(crate) largest_at_peak: Vec<LiveLease>,
    /// Seconds of the step, including copies that are not hidden.
    pub(crate) seconds: f64,
    /// The same if copies took no time.
    pub(crate) computing: f64,
    /// Micro-batches that were made.
    micro_batches: usize,
    stretches: Vec<Stretch>,
    spans: Vec<Span>,
}

/// A part of a step, while one layer is at work in one direction.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Stretch {
    part: Part,
    /// Device bytes that are live when it begins.
    at_start: u64,
    /// The most device bytes that are live in it.
    most: u64,
}

/// The part of the model at work. What is kept for a layer's backward pass is live from its forward part until then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// A block's forward pass.
    Forward(usize),
    /// The head, both ways.
    Head,
    /// A block's backward pass, with its replays.
    Backward(usize),
    /// Everything else, while no block keeps anything.
    Rest,
}

impl OnPaper {
    /// Whether all work is in one queue, so that times of operations add up.
    pub(crate) fn computes_alone(&self) -> bool {
        self.spans.iter().all(|span| span.queue == Queue::Compute)
    }

    /// The most bytes that are live in the parts that `is_meant` selects; none if there is no such part.
    pub(crate) fn most(&self, is_meant: impl Fn(Part) -> bool) -> Option<u64> {
        let meant = self.stretches.iter().filter(|one| is_meant(one.part));
        meant.map(|one| one.most).max()
    }

    /// Live bytes when a part first begins.
    pub(crate) fn at_start(&self, part: Part) -> Option<u64> {
        let mut stretches = self.stretches.iter();
        let first = stretches.find(|one| one.part == part)?;
        Some(first.at_start)
    }

    /// Seconds that a layer's operations take in a phase, for each micro-batch.
    pub(crate) fn busy(&self, phase: Phase, layer: Layer) -> f64 {
        let place = Place { phase, layer };
        busy(&self.spans, |span| span.place == place) / self.micro_batches as f64
    }

    /// Seconds that all blocks' operations take for each micro-batch, replays included.
    pub(crate) fn busy_in_blocks(&self) -> f64 {
        let is_of_block = |span: &Span| matches!(span.place.layer, Layer::Block(_));
        busy(&self.spans, is_of_block) / self.micro_batches as f64
    }
}

/// Cuts a step wherever another layer begins its work.
fn stretches(playback: &Playback) -> Vec<Stretch> {
    let mut stretches: Vec<Stretch> = Vec::new();
    for instant in &playback.instants[playback.step..] {
        let (part, live) = (part(instant.place), instant.live.total());
        match stretches.last_mut() {
            Some(last) if part.is_none_or(|part| part == last.part) => {
                last.most = last.most.max(live);
            }
            _ => stretches.push(Stretch {
                part: part.unwrap_or(Part::Rest),
                at_start: live,
                most: live,
            }),
        }
    }
    join_visits(stretches)
}

/// The part that begins when a place is entered; none if the part does not change.
fn part(place: Place) -> Option<Part> {
    match (place.phase, place.layer) {
        (Phase::Forward, Layer::Block(layer)) => Some(Part::Forward(layer)),
        (Phase::Forward, Layer::Head) => Some(Part::Head),
        (Phase::Backward | Phase::Recompute, Layer::Block(layer)) => Some(Part::Backward(layer)),
        (Phase::Forward | Phase::Backward, Layer::Embedding) => Some(Part::Rest),
        _ => None,
    }
}

/// Joins the stretches of a block's backward pass. A fetch of an earlier block's activations interrupts it, and so does a
/// replay that starts at an earlier block. The stretch after such a visit shows which block was at work.
fn join_visits(stretches: Vec<Stretch>) -> Vec<Stretch> {
    let mut joined: Vec<Stretch> = Vec::with_capacity(stretches.len());
    for stretch in stretches.into_iter().rev() {
        let Some(after) = joined.last_mut() else {
            joined.push(stretch);
            continue;
        };
        let is_visit = match (stretch.part, after.part) {
            (Part::Backward(layer), Part::Backward(of)) => layer <= of,
            _ => false,
        };
        if is_visit {
            after.at_start = stretch.at_start;
            after.most = after.most.max(stretch.most);
        } else {
            joined.push(stretch);
        }
    }
    joined.reverse();
    joined
}

#[cfg(test)]
mod tests {
    use super::*;
    use settings::Config;

    /// Two micro-batches are made. What is added for the others is the time that they take when they are made.
    #[test]
    fn micro_batches_that_are_not_made_take_their_time() {
        let on_host = ["offload.optimizer=pinned", "offload.gradients=pinned"];
        for set in [&[][..], &["recompute.spec=full"], &on_host] {
            let set: Vec<String> = set.iter().map(|one| one.to_string()).collect();
            let settings = Settings::new(&Config::default().with(&set).unwrap()).unwrap();
            let times = |accum| {
                let settings = Settings {
                    accum,
                    ..settings.clone()
                };
                let paper = Paper::at_rates(&settings, Target::Cuda);
                let all = MicroBatchesMade {
                    fewer: None,
                    most: accum,
                };
                let steps =
                    paper.later_steps(&settings, all, paper.timeline(), KeepsHistory(false));
                let short = paper.alone(&settings).unwrap();
                [short.seconds, steps.unwrap().most.seconds]
            };
            let [added, made] = times(6);
            assert!((added / made - 1.0).abs() < 1e-3, "{set:?}: {added} {made}");
            assert!(times(5)[1] < 0.95 * made, "{set:?}: each takes time");
        }
    }
}
