//! In which order a stage of a pipeline works on the micro-batches of a step, and when it exchanges what with its neighbours.
//!
//! All stages work on paper: every pass of a kind takes the same time, and what a pass makes is exchanged the moment
//! it ends. Everything that a stage sends and receives at one time is one exchange, which comes before the first pass that the stage
//! begins at that time or later. So every exchange waits only for passes and exchanges that are earlier on paper, on any stage, and no
//! order of events can make stages wait for each other in a circle.
//!
//! A stage has one run of neighbouring blocks, or several: virtual stages. Virtual stage `k` of a pipeline of `p` stages is of stage
//! `k % p`.

use choices::choices;
use memory::Rank;
use std::collections::{HashMap, VecDeque};

choices! {
    /// The order in which a pipeline's stages work.
    PipelineSchedule {
        /// All forward passes, then all backward passes (Huang et al. 2019).
        Gpipe = "gpipe",
        /// As few micro-batches under way as keep all stages busy: then each forward pass is followed by a backward pass (Narayanan et
        /// al. 2019).
        OneForwardOneBackward = "1f1b",
        /// The same with several virtual stages to a stage, which take turns after as many micro-batches as there are stages (Narayanan
        /// et al. 2021). Stages wait less, send more, and hold more micro-batches.
        Interleaved = "interleaved",
        /// As 1f1b, but the gradients of matrices are deferred to where a stage would wait; no stage holds more micro-batches than the
        /// first (ZB-H1 of Qi et al. 2023).
        ZbH1 = "zb-h1",
    }
}

/// What a stage does with a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskKind {
    /// The forward pass.
    Forward,
    /// The backward pass.
    Backward,
    /// Both, one after the other: the last virtual stage, whose head computes a loss and its gradient together, and a run without a
    /// pipeline.
    ForwardBackward,
    /// The gradients of matrices that its backward pass has deferred.
    DeferredGradients,
}

impl TaskKind {
    /// Whether a micro-batch begins with it.
    pub fn is_forward(self) -> bool {
        matches!(self, TaskKind::Forward | TaskKind::ForwardBackward)
    }

    /// Whether a micro-batch ends with it.
    pub fn is_backward(self) -> bool {
        matches!(self, TaskKind::Backward | TaskKind::ForwardBackward)
    }

    /// Its time on paper on a stage that defers gradients of matrices, or does not. Attention's backward pass takes longer than its
    /// forward pass and has no matrices, so deferred gradients take the shortest time, as in a run. If all took equally long on paper, a
    /// stage would begin exchanges before its neighbour's longer pass ends, and wait.
    fn time(self, defers_gradients: bool) -> usize {
        let deferred = match defers_gradients {
            true => Self::TIMES[2],
            false => 0,
        };
        let [forward, all_of_backward] = [Self::TIMES[0], Self::TIMES[1] + Self::TIMES[2]];
        match self {
            TaskKind::Forward => forward,
            TaskKind::Backward => all_of_backward - deferred,
            TaskKind::ForwardBackward => forward + all_of_backward - deferred,
            TaskKind::DeferredGradients => deferred,
        }
    }

    /// The times on paper of a forward pass, of a backward pass without gradients of matrices, and of these.
    const TIMES: [usize; 3] = [4, 5, 3];
}

/// What one stage makes for another: the residual stream between two blocks, or its gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Carried {
    /// The virtual stage whose input it is, or the gradient of whose input.
    pub input_of: usize,
    /// Whether it is the gradient, which goes to the virtual stage before; otherwise the activation, which comes from there.
    pub is_gradient: bool,
    /// The micro-batch, by its number among this rank's.
    pub micro_batch: usize,
}

impl Carried {
    /// The stage that makes it, of so many.
    fn sender(self, stages: usize) -> usize {
        (self.input_of - usize::from(!self.is_gradient)) % stages
    }

    fn receiver(self, stages: usize) -> usize {
        (self.input_of - usize::from(self.is_gradient)) % stages
    }
}

/// A transfer as one of its two stages sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handover {
    /// What crosses.
    pub of: Carried,
    /// Whether this stage sends it; otherwise it receives it.
    pub is_sent: bool,
}

impl Handover {
    /// The stage at its other end, of so many.
    pub fn peer(self, stages: usize) -> usize {
        match self.is_sent {
            true => self.of.receiver(stages),
            false => self.of.sender(stages),
        }
    }
}

/// A pass of a stage, and the exchanges before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageTask {
    /// What is exchanged before it, one exchange after the other.
    pub exchanges: Vec<Vec<Handover>>,
    /// What it does.
    pub kind: TaskKind,
    /// The virtual stage, counted over the whole pipeline.
    pub virtual_stage: usize,
    /// The micro-batch, by its number among this rank's.
    pub micro_batch: usize,
    /// Which of the virtual stage's tables of activations it has.
    pub table: usize,
}

/// All that a stage does in a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageSchedule {
    /// Its passes, in order.
    pub tasks: Vec<StageTask>,
    /// What is exchanged after the last.
    pub last: Vec<Vec<Handover>>,
}

/// A pass of a virtual stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct StagePass {
    kind: TaskKind,
    virtual_stage: usize,
    micro_batch: usize,
}

impl StagePass {
    /// When what it needs from other virtual stages has been made; none if that is not known yet.
    fn needs(self, ends: &[Ends]) -> Option<usize> {
        let (own, micro_batch) = (self.virtual_stage, self.micro_batch);
        match (self.kind, own.checked_sub(1)) {
            (TaskKind::Backward, _) => ends[own + 1].backward[micro_batch],
            (TaskKind::Forward | TaskKind::ForwardBackward, Some(before)) => {
                ends[before].forward[micro_batch]
            }
            (TaskKind::Forward | TaskKind::ForwardBackward, None)
            | (TaskKind::DeferredGradients, _) => Some(0),
        }
    }
}

/// A pass in the order of a stage, with its times on paper.
#[derive(Clone, Copy)]
struct Timed {
    pass: StagePass,
    start: usize,
    end: usize,
}

/// How a pipeline works: in which order, and with how many virtual stages to a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PipelineOrder {
    /// The order.
    pub schedule: PipelineSchedule,
    /// Virtual stages of each stage: 1 unless they are interleaved.
    pub virtual_stages: usize,
}

impl PipelineOrder {
    /// That of a run in one stage: each micro-batch goes forward and backward at once.
    pub const ALONE: PipelineOrder = PipelineOrder {
        schedule: PipelineSchedule::OneForwardOneBackward,
        virtual_stages: 1,
    };

    /// What one stage does in a step of so many micro-batches of its own.
    pub fn of_stage(self, stage: Rank, micro_batches: usize) -> StageSchedule {
        let orders = (0..stage.of).map(|number| {
            let stage = Rank { number, ..stage };
            self.passes(stage, micro_batches)
        });
        let virtual_stages = stage.of * self.virtual_stages;
        let stages = self.on_paper(&orders.collect::<Vec<_>>(), micro_batches);
        let own = &stages[stage.number];
        let passes = own.iter().map(|timed| timed.pass);
        let tables = Tables::new(passes, stage.of);
        let mut exchanges = exchanges(&stages, stage, virtual_stages)
            .into_iter()
            .peekable();
        let task = |(timed, table): (&Timed, &usize)| {
            let mut before = Vec::new();
            while let Some((_, transfers)) = exchanges.next_if(|(time, _)| *time <= timed.start) {
                before.push(transfers);
            }
            StageTask {
                exchanges: before,
                kind: timed.pass.kind,
                virtual_stage: timed.pass.virtual_stage,
                micro_batch: timed.pass.micro_batch,
                table: *table,
            }
        };
        StageSchedule {
            tasks: own.iter().zip(&tables.of_passes).map(task).collect(),
            last: exchanges.map(|(_, transfers)| transfers).collect(),
        }
    }

    /// How many micro-batches of so many are between the forward and backward passes of each virtual stage of a stage at most.
    pub fn under_way(self, stage: Rank, micro_batches: usize) -> Vec<usize> {
        let passes = self.passes(stage, micro_batches);
        Tables::new(passes.into_iter(), stage.of).of_virtual_stages
    }

    /// How many micro-batches a shorter step needs to have the peak of a step of so many: those that are under way on a stage, and one
    /// more, or one more round where virtual stages take turns. Those with deferred gradients are under way too.
    pub fn few(self, stage: Rank, micro_batches: usize) -> usize {
        let under_way = self.under_way(stage, micro_batches)[0] + self.deferred(stage);
        let at_a_time = self.at_a_time(stage.of);
        micro_batches.min((under_way + at_a_time).next_multiple_of(at_a_time))
    }

    /// By how many backward passes a stage defers gradients of matrices; 0: its backward passes compute them. The later a stage is, the
    /// fewer micro-batches are between its forward and backward passes, and the more gradients it can defer. Nobody waits for the first
    /// stage's backward passes.
    pub fn deferred(self, stage: Rank) -> usize {
        match self.schedule {
            PipelineSchedule::ZbH1 => stage.number,
            _ => 0,
        }
    }

    /// How long a stage waits for others in a step of so many micro-batches, over the time of its work on paper, if all stages take as
    /// long (Narayanan et al. 2021, Qi et al. 2023).
    pub fn idle_over_work(self, stages: usize, micro_batches: usize) -> f64 {
        let [forward, backward, deferred] = TaskKind::TIMES.map(|time| time as f64);
        let work = forward + backward + deferred;
        let bubble = match self.schedule {
            PipelineSchedule::ZbH1 => forward + backward - deferred,
            _ => work,
        };
        let passes = micro_batches * self.virtual_stages;
        (stages - 1) as f64 * bubble / (passes as f64 * work)
    }

    /// After how many micro-batches stages do the same again. A step's micro-batches have to be a multiple of it.
    pub fn at_a_time(self, stages: usize) -> usize {
        match self.schedule {
            PipelineSchedule::Interleaved => stages,
            PipelineSchedule::Gpipe
            | PipelineSchedule::OneForwardOneBackward
            | PipelineSchedule::ZbH1 => 1,
        }
    }

    /// The order of a stage's passes.
    fn passes(self, stage: Rank, micro_batches: usize) -> Vec<StagePass> {
        let all = micro_batches * self.virtual_stages;
        let pass = |kind, (own, micro_batch)| StagePass {
            kind,
            virtual_stage: own * stage.of + stage.number,
            micro_batch,
        };
        let of = |number| self.forward_pass(stage.of, number);
        let forward = |number| pass(TaskKind::Forward, of(number));
        let backward = |number| {
            let (own, micro_batch) = of(number);
            let own = self.virtual_stages - 1 - own;
            pass(TaskKind::Backward, (own, micro_batch))
        };
        let ahead = self.ahead(stage, micro_batches).min(all);
        let first = (0..ahead).map(forward);
        let pairs = (ahead..all).flat_map(|one| [forward(one), backward(one - ahead)]);
        let last = (all - ahead..all).map(backward);
        let passes = first.chain(pairs).chain(last);
        // The head goes backward at once.
        let head = stage.of * self.virtual_stages - 1;
        let passes = passes.filter_map(|pass| match pass.kind {
            TaskKind::Backward if pass.virtual_stage == head => None,
            TaskKind::Forward if pass.virtual_stage == head => Some(StagePass {
                kind: TaskKind::ForwardBackward,
                ..pass
            }),
            _ => Some(pass),
        });
        match self.deferred(stage) {
            0 => passes.collect(),
            deferred => with_deferred_gradients(passes, deferred),
        }
    }

    /// How many forward passes a stage makes before its first backward pass.
    fn ahead(self, stage: Rank, micro_batches: usize) -> usize {
        let after = stage.of - 1 - stage.number;
        match self.schedule {
            PipelineSchedule::Gpipe => micro_batches,
            PipelineSchedule::OneForwardOneBackward | PipelineSchedule::ZbH1 => after,
            PipelineSchedule::Interleaved => 2 * after + (self.virtual_stages - 1) * stage.of,
        }
    }

    /// Which of a stage's virtual stages makes the stage's `number`th forward pass, and of which micro-batch.
    fn forward_pass(self, stages: usize, number: usize) -> (usize, usize) {
        let at_a_time = self.at_a_time(stages);
        let of_a_round = at_a_time * self.virtual_stages;
        let (round, within) = (number / of_a_round, number % of_a_round);
        (within / at_a_time, round * at_a_time + within % at_a_time)
    }

    /// The passes of all stages, with their times on paper: each begins after the one before it on its stage, and after what it needs
    /// from its neighbours.
    fn on_paper(self, orders: &[Vec<StagePass>], micro_batches: usize) -> Vec<Vec<Timed>> {
        let mut stages: Vec<Vec<Timed>> = vec![Vec::new(); orders.len()];
        let none = Ends {
            forward: vec![None; micro_batches],
            backward: vec![None; micro_batches],
        };
        let mut ends = vec![none; orders.len() * self.virtual_stages];
        let of = orders.len();
        let defers_gradients = |number| self.deferred(Rank { number, of }) > 0;
        let passes: usize = orders.iter().map(Vec::len).sum();
        let mut made = 0;
        while made < passes {
            let made_before = made;
            for (stage, order) in orders.iter().enumerate() {
                while let Some(pass) = order.get(stages[stage].len()).copied() {
                    let Some(came) = pass.needs(&ends) else { break };
                    let before = stages[stage].last().map_or(0, |pass| pass.end);
                    let start = before.max(came);
                    let end = start + pass.kind.time(defers_gradients(stage));
                    stages[stage].push(Timed { pass, start, end });
                    ends[pass.virtual_stage].note(pass, end);
                    made += 1;
                }
            }
            assert!(made > made_before, "every pass gets what it waits for");
        }
        stages
    }
}

/// A stage's passes, and the deferred gradients of each, so many backward passes later.
fn with_deferred_gradients(
    passes: impl Iterator<Item = StagePass>,
    later: usize,
) -> Vec<StagePass> {
    let (mut all, mut deferred) = (Vec::new(), VecDeque::new());
    for pass in passes {
        all.push(pass);
        if pass.kind.is_backward() {
            let kind = TaskKind::DeferredGradients;
            deferred.push_back(StagePass { kind, ..pass });
        }
        if deferred.len() > later {
            all.extend(deferred.pop_front());
        }
    }
    all.extend(deferred);
    all
}

/// Which of its virtual stage's tables of activations each pass of a stage has.
struct Tables {
    of_passes: Vec<usize>,
    /// How many each virtual stage of the stage has.
    of_virtual_stages: Vec<usize>,
}

impl Tables {
    fn new(passes: impl Iterator<Item = StagePass>, stages: usize) -> Tables {
        let (mut of_passes, mut count) = (Vec::new(), Vec::new());
        let mut free: Vec<Vec<usize>> = Vec::new();
        let mut begun = HashMap::new();
        for pass in passes {
            if pass.kind == TaskKind::DeferredGradients {
                // Its backward pass has emptied the table.
                of_passes.push(0);
                continue;
            }
            let own = pass.virtual_stage / stages;
            if own >= count.len() {
                count.resize(own + 1, 0);
                free.resize(own + 1, Vec::new());
            }
            let of = (own, pass.micro_batch);
            let table = *begun.entry(of).or_insert_with(|| {
                free[own].pop().unwrap_or_else(|| {
                    count[own] += 1;
                    count[own] - 1
                })
            });
            if pass.kind.is_backward() {
                free[own].push(table);
            }
            of_passes.push(table);
        }
        Tables {
            of_passes,
            of_virtual_stages: count,
        }
    }
}

/// When a virtual stage's passes of each micro-batch end on paper; none for those that were not made yet.
#[derive(Clone)]
struct Ends {
    forward: Vec<Option<usize>>,
    backward: Vec<Option<usize>>,
}

impl Ends {
    fn note(&mut self, pass: StagePass, end: usize) {
        if pass.kind.is_forward() {
            self.forward[pass.micro_batch] = Some(end);
        }
        if pass.kind.is_backward() {
            self.backward[pass.micro_batch] = Some(end);
        }
    }
}

/// What a pass makes for other stages.
fn made(pass: StagePass, virtual_stages: usize) -> impl Iterator<Item = Carried> {
    let of = |input_of, is_gradient| Carried {
        input_of,
        is_gradient,
        micro_batch: pass.micro_batch,
    };
    let own = pass.virtual_stage;
    let activation = pass.kind.is_forward() && own + 1 < virtual_stages;
    let gradient = pass.kind.is_backward() && own > 0;
    let activation = activation.then(|| of(own + 1, false));
    activation
        .into_iter()
        .chain(gradient.then(|| of(own, true)))
}

/// What a stage exchanges, by its time on paper.
fn exchanges(
    stages: &[Vec<Timed>],
    stage: Rank,
    virtual_stages: usize,
) -> Vec<(usize, Vec<Handover>)> {
    let mut all: Vec<(usize, Handover)> = Vec::new();
    for (number, passes) in stages.iter().enumerate() {
        let is_sent = number == stage.number;
        for timed in passes {
            let made = made(timed.pass, virtual_stages);
            let own = made.filter(|of| is_sent || of.receiver(stage.of) == stage.number);
            all.extend(own.map(|of| (timed.end, Handover { of, is_sent })));
        }
    }
    all.sort_by_key(|(time, _)| *time);
    let by_time = all.chunk_by(|one, next| one.0 == next.0);
    let exchange = |together: &[(usize, Handover)]| {
        let transfers = together.iter().map(|(_, transfer)| *transfer);
        (together[0].0, transfers.collect())
    };
    by_time.map(exchange).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs all stages, each of which waits at an exchange until its neighbours are at theirs, and returns whether all came to
    /// their ends.
    fn ends(schedules: &[StageSchedule]) -> bool {
        let exchanges = |schedule: &StageSchedule| -> Vec<Vec<Handover>> {
            let before = schedule
                .tasks
                .iter()
                .flat_map(|task| task.exchanges.clone());
            before.chain(schedule.last.clone()).collect()
        };
        let all: Vec<Vec<Vec<Handover>>> = schedules.iter().map(exchanges).collect();
        let mut at = vec![0; all.len()];
        loop {
            let fits = |stage: usize, at: &[usize]| {
                let Some(own) = all[stage].get(at[stage]) else {
                    return false;
                };
                own.iter().all(|transfer| {
                    let peer = transfer.peer(all.len());
                    let other = Handover {
                        is_sent: !transfer.is_sent,
                        ..*transfer
                    };
                    let posted = all[peer].iter().take(at[peer] + 1);
                    posted.flatten().any(|there| *there == other)
                })
            };
            // A peer that has posted its part may have gone on since.
            let ready: Vec<usize> = (0..all.len()).filter(|stage| fits(*stage, &at)).collect();
            if ready.is_empty() {
                return at.iter().zip(&all).all(|(at, all)| *at == all.len());
            }
            ready.iter().for_each(|stage| at[*stage] += 1);
        }
    }

    /// Every order of a pipeline of so many stages and micro-batches.
    fn orders(stages: usize, micro_batches: usize) -> Vec<PipelineOrder> {
        let order = |schedule, virtual_stages| PipelineOrder {
            schedule,
            virtual_stages,
        };
        let mut all = vec![
            order(PipelineSchedule::Gpipe, 1),
            order(PipelineSchedule::OneForwardOneBackward, 1),
            order(PipelineSchedule::ZbH1, 1),
        ];
        if stages > 1 && micro_batches.is_multiple_of(stages) {
            all.extend((2..5).map(|each| order(PipelineSchedule::Interleaved, each)));
        }
        all
    }

    fn all(order: PipelineOrder, stages: usize, micro_batches: usize) -> Vec<StageSchedule> {
        Rank::all(stages)
            .map(|stage| order.of_stage(stage, micro_batches))
            .collect()
    }

    #[test]
    fn every_schedule_comes_to_its_end_and_needs_what_has_come() {
        let numbers = (1..7).flat_map(|stages| (1..14).map(move |many| (stages, many)));
        for (stages, micro_batches) in numbers.chain([(8, 11), (8, 32)]) {
            for order in orders(stages, micro_batches) {
                let schedules = all(order, stages, micro_batches);
                assert!(ends(&schedules), "{order:?}, {stages}, {micro_batches}");
                for schedule in &schedules {
                    assert_needs_come_first(schedule, micro_batches, order.virtual_stages);
                }
            }
        }
    }

    /// Each pass finds what it needs, sends follow the passes that make what is sent, and each virtual stage goes backward in the order of
    /// micro-batches.
    fn assert_needs_come_first(schedule: &StageSchedule, micro_batches: usize, each: usize) {
        let (mut came, mut made) = (Vec::new(), Vec::new());
        let mut backward = HashMap::<usize, Vec<usize>>::new();
        let mut later = backward.clone();
        for task in &schedule.tasks {
            let transfers = task.exchanges.iter().flatten();
            let (sent, received): (Vec<Handover>, Vec<_>) = transfers.partition(|one| one.is_sent);
            came.extend(received.iter().map(|one| one.of));
            assert!(sent.iter().all(|one| made.contains(&one.of)));
            let of = |input_of, is_gradient| Carried {
                input_of,
                is_gradient,
                micro_batch: task.micro_batch,
            };
            let (own, kind) = (task.virtual_stage, task.kind);
            if kind == TaskKind::DeferredGradients {
                assert!(backward[&own].contains(&task.micro_batch));
                later.entry(own).or_default().push(task.micro_batch);
            }
            assert!(!kind.is_forward() || own == 0 || came.contains(&of(own, false)));
            assert!(kind != TaskKind::Backward || came.contains(&of(own + 1, true)));
            made.extend(kind.is_forward().then(|| of(own + 1, false)));
            made.extend(kind.is_backward().then(|| of(own, true)));
            if kind.is_backward() {
                backward.entry(own).or_default().push(task.micro_batch);
            }
        }
        assert_eq!(backward.len(), each);
        let in_order: Vec<usize> = (0..micro_batches).collect();
        let mut all = backward.values().chain(later.values());
        let are = all.all(|order| *order == in_order);
        assert!(are, "gradients add up in order: {backward:?}");
    }

    /// If each pass received what it needs just before it, and sent what it made just after it, stages of 1F1B would wait for each
    /// other: the test notices that.
    #[test]
    fn transfers_one_by_one_never_end() {
        let mut schedules = all(PipelineOrder::ALONE, 4, 8);
        for (stage, schedule) in schedules.iter_mut().enumerate() {
            let mut one_by_one = Vec::new();
            for task in &schedule.tasks {
                let (forward, backward) = (task.kind.is_forward(), task.kind.is_backward());
                let one = |input_of, is_gradient, is_sent| Handover {
                    of: Carried {
                        input_of,
                        is_gradient,
                        micro_batch: task.micro_batch,
                    },
                    is_sent,
                };
                let both = [
                    (forward && stage > 0).then(|| one(stage, false, false)),
                    (backward && stage < 3).then(|| one(stage + 1, true, false)),
                    (forward && stage < 3).then(|| one(stage + 1, false, true)),
                    (backward && stage > 0).then(|| one(stage, true, true)),
                ];
                one_by_one.extend(both.into_iter().flatten().map(|one| vec![one]));
            }
            schedule
                .tasks
                .iter_mut()
                .for_each(|task| task.exchanges.clear());
            schedule.last = one_by_one;
        }
        assert!(!ends(&schedules));
    }

    #[test]
    fn as_many_micro_batches_are_under_way_as_published() {
        use PipelineSchedule::{Gpipe, OneForwardOneBackward, ZbH1};
        let tables = |schedule, micro_batches| -> Vec<Vec<usize>> {
            let order = PipelineOrder {
                schedule,
                virtual_stages: 1,
            };
            let stages = Rank::all(4);
            stages
                .map(|stage| order.under_way(stage, micro_batches))
                .collect()
        };
        assert_eq!(tables(Gpipe, 8), [[8], [8], [8], [1]]);
        assert_eq!(tables(OneForwardOneBackward, 8), [[4], [3], [2], [1]]);
        assert_eq!(tables(OneForwardOneBackward, 2), [[2], [2], [2], [1]]);
        assert_eq!(tables(ZbH1, 8), tables(OneForwardOneBackward, 8));
    }

    /// With those whose gradients are deferred, each stage has as many micro-batches as the first (Qi et al. 2023). A shorter step
    /// ([`PipelineOrder::few`]) comes to as many.
    #[test]
    fn as_many_are_deferred_under_zb_h1_as_published() {
        let order = PipelineOrder {
            schedule: PipelineSchedule::ZbH1,
            virtual_stages: 1,
        };
        for (stages, micro_batches) in (2..7).flat_map(|stages| [(stages, stages), (stages, 20)]) {
            for stage in Rank::all(stages) {
                let ends_with = match stage.number {
                    0 => TaskKind::Backward,
                    _ => TaskKind::DeferredGradients,
                };
                let most = |micro_batches| {
                    let (mut now, mut most) = (0, 0);
                    for pass in order.passes(stage, micro_batches) {
                        now += usize::from(pass.kind.is_forward());
                        most = most.max(now);
                        now -= usize::from(pass.kind == ends_with);
                    }
                    assert_eq!(now, 0);
                    most
                };
                assert_eq!(most(micro_batches), stages);
                assert_eq!(most(order.few(stage, micro_batches)), stages);
            }
        }
    }

    /// Over all its virtual stages, a stage has as many micro-batches under way as Narayanan et al. (2021) say. A shorter step
    /// ([`PipelineOrder::few`]) needs as many tables as a long one.
    #[test]
    fn as_many_are_under_way_in_interleaved_stages_as_published() {
        for (stages, virtual_stages, rounds) in (2..7).flat_map(|stages| {
            (2..5).flat_map(move |each| (1..9).map(move |rounds| (stages, each, rounds)))
        }) {
            let order = PipelineOrder {
                schedule: PipelineSchedule::Interleaved,
                virtual_stages,
            };
            let micro_batches = rounds * stages;
            for stage in Rank::all(stages) {
                let (mut now, mut most) = (0, 0);
                for pass in order.passes(stage, micro_batches) {
                    now += usize::from(pass.kind.is_forward());
                    most = most.max(now);
                    now -= usize::from(pass.kind.is_backward());
                }
                let after = stages - 1 - stage.number;
                let published = 2 * after + (virtual_stages - 1) * stages + 1;
                assert_eq!(most, published.min(micro_batches * virtual_stages));
                let few = order.few(stage, micro_batches);
                let tables = |count| order.under_way(stage, count);
                assert_eq!(tables(few), tables(micro_batches), "{order:?} {stage:?}");
            }
        }
    }

    /// The bubble is (p - 1) (F + B + W), or (p - 1) (F + B - W) with deferred gradients (Narayanan et al. 2021, Qi et al. 2023).
    #[test]
    fn time_has_the_published_bubble() {
        for order in orders(4, 8) {
            let of_stage = |stage| order.passes(stage, 8);
            let passes: Vec<_> = Rank::all(4).map(of_stage).collect();
            let stages = order.on_paper(&passes, 8);
            let end = stages.iter().flatten().map(|pass| pass.end).max().unwrap();
            let bubble = if order.schedule == PipelineSchedule::ZbH1 {
                6
            } else {
                12
            };
            let work = 12 * 8 * order.virtual_stages;
            assert_eq!(end, work + 3 * bubble, "{order:?}");
            let idle = order.idle_over_work(4, 8);
            assert!((end as f64 / work as f64 - 1.0 - idle).abs() < 1e-12);
        }
    }
}
