//! The tasks of a pipeline's stages with their times on paper, from which it follows when stages exchange what.
//!
//! Every task of a kind takes the same time, and what a pass makes is exchanged the moment it ends. Everything that a stage sends and
//! receives at one time is one exchange, which comes before the first task that the stage begins at that time or later. So every exchange
//! waits only for tasks and exchanges that are earlier on paper, on any stage, and no order of events can make stages wait for each other
//! in a circle.

use super::stage_tasks::{Carried, Handover, OrderedTask, PassKind, TaskKind};
use memory::Rank;

/// The times of a forward pass, of a backward pass without gradients of matrices, and of these. Attention's backward pass takes longer
/// than its forward pass and has no matrices, so gradients of matrices take the shortest time, as in a run. If all took equally long, a
/// stage that defers them would begin exchanges before its neighbour's longer pass ends, and wait.
pub(super) const TIMES: [usize; 3] = [4, 5, 3];

/// A task with its times on paper.
#[derive(Clone, Copy)]
pub(super) struct TimedTask {
    pub(super) task: OrderedTask,
    pub(super) start: usize,
    pub(super) end: usize,
}

/// The time of a task on a stage that defers gradients of matrices, or does not.
fn time(kind: TaskKind, defers_gradients: bool) -> usize {
    let [forward, backward, matrices] = TIMES;
    let backward = match defers_gradients {
        true => backward,
        false => backward + matrices,
    };
    match kind {
        TaskKind::Pass(PassKind::Forward) => forward,
        TaskKind::Pass(PassKind::Backward) => backward,
        TaskKind::Pass(PassKind::ForwardBackward) => forward + backward,
        TaskKind::DeferredGradients => matrices,
    }
}

/// When a virtual stage's passes of each micro-batch end on paper; none for those that were not made yet.
#[derive(Clone)]
struct Ends {
    forward: Vec<Option<usize>>,
    backward: Vec<Option<usize>>,
}

impl Ends {
    fn note(&mut self, task: OrderedTask, end: usize) {
        if task.kind.is_forward() {
            self.forward[task.micro_batch] = Some(end);
        }
        if task.kind.is_backward() {
            self.backward[task.micro_batch] = Some(end);
        }
    }
}

impl OrderedTask {
    /// When what it needs from other virtual stages has been made; none if that is not known yet.
    fn needs(self, ends: &[Ends]) -> Option<usize> {
        let (own, micro_batch) = (self.virtual_stage, self.micro_batch);
        match (self.kind, own.checked_sub(1)) {
            (TaskKind::Pass(PassKind::Backward), _) => ends[own + 1].backward[micro_batch],
            (TaskKind::Pass(_), Some(before)) => ends[before].forward[micro_batch],
            (TaskKind::Pass(_), None) | (TaskKind::DeferredGradients, _) => Some(0),
        }
    }
}

/// The times of all stages' tasks: each begins after the one before it on its stage, and after what it needs from its neighbours.
pub(super) fn on_paper(
    orders: &[Vec<OrderedTask>],
    (virtual_stages, micro_batches): (usize, usize),
) -> Vec<Vec<TimedTask>> {
    let mut stages: Vec<Vec<TimedTask>> = vec![Vec::new(); orders.len()];
    let none = Ends {
        forward: vec![None; micro_batches],
        backward: vec![None; micro_batches],
    };
    let mut ends = vec![none; virtual_stages];
    let is_deferred = |task: &OrderedTask| task.kind == TaskKind::DeferredGradients;
    let defer = orders.iter().map(|order| order.iter().any(is_deferred));
    let defer: Vec<bool> = defer.collect();
    let tasks: usize = orders.iter().map(Vec::len).sum();
    let mut made = 0;
    while made < tasks {
        let made_before = made;
        for (stage, order) in orders.iter().enumerate() {
            while let Some(task) = order.get(stages[stage].len()).copied() {
                let Some(came) = task.needs(&ends) else { break };
                let before = stages[stage].last().map_or(0, |task| task.end);
                let start = before.max(came);
                let end = start + time(task.kind, defer[stage]);
                stages[stage].push(TimedTask { task, start, end });
                ends[task.virtual_stage].note(task, end);
                made += 1;
            }
        }
        assert!(made > made_before, "every task gets what it waits for");
    }
    stages
}

/// What a task makes for other stages.
fn made(task: OrderedTask, virtual_stages: usize) -> impl Iterator<Item = Carried> {
    let of = |input_of, is_gradient| Carried {
        input_of,
        is_gradient,
        micro_batch: task.micro_batch,
    };
    let own = task.virtual_stage;
    let activation = task.kind.is_forward() && own + 1 < virtual_stages;
    let gradient = task.kind.is_backward() && own > 0;
    let activation = activation.then(|| of(own + 1, false));
    activation
        .into_iter()
        .chain(gradient.then(|| of(own, true)))
}

/// What a stage exchanges, by its time on paper.
pub(super) fn exchanges(
    stages: &[Vec<TimedTask>],
    stage: Rank,
    virtual_stages: usize,
) -> Vec<(usize, Vec<Handover>)> {
    let mut all: Vec<(usize, Handover)> = Vec::new();
    for (number, tasks) in stages.iter().enumerate() {
        let is_sent = number == stage.number;
        for timed in tasks {
            let made = made(timed.task, virtual_stages);
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
