//! In which order a stage of a pipeline works on the micro-batches of a step, and when it exchanges what with its neighbours.
//!
//! All stages work on paper: a forward pass takes one unit of time, a backward pass two, and what a pass makes is exchanged the moment
//! it ends. Everything that a stage sends and receives at one time is one exchange, which comes before the first pass that the stage
//! begins at that time or later. So every exchange waits only for passes and exchanges that are earlier on paper, on any stage, and no
//! order of events can make stages wait for each other in a circle.

use choices::choices;
use memory::Rank;

choices! {
    /// The order in which a pipeline's stages work.
    PipelineSchedule {
        /// All forward passes, then all backward passes (Huang et al. 2019).
        Gpipe = "gpipe",
        /// As few micro-batches under way as keep all stages busy: then each forward pass is followed by a backward pass (Narayanan et
        /// al. 2019).
        OneForwardOneBackward = "1f1b",
    }
}

/// What a stage does with a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskKind {
    /// The forward pass.
    Forward,
    /// The backward pass.
    Backward,
    /// Both, one after the other: the last stage, whose head computes a loss and its gradient together, and a run without a
    /// pipeline.
    ForwardBackward,
}

impl TaskKind {
    /// Whether a micro-batch begins with it.
    pub fn is_forward(self) -> bool {
        self != TaskKind::Backward
    }

    /// Whether a micro-batch ends with it.
    pub fn is_backward(self) -> bool {
        self != TaskKind::Forward
    }

    /// Its time on paper.
    fn time(self) -> usize {
        match self {
            TaskKind::Forward => 1,
            TaskKind::Backward => 2,
            TaskKind::ForwardBackward => 3,
        }
    }
}

/// What stages hand each other: the residual stream between two blocks, or its gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handover {
    /// Whether it is the gradient, which goes to the stage before; otherwise the activation, which goes to the stage after.
    pub is_gradient: bool,
    /// Whether this stage sends it; otherwise it receives it.
    pub is_sent: bool,
    /// The micro-batch, by its number among this rank's.
    pub micro_batch: usize,
}

impl Handover {
    /// The stage at its other end.
    pub fn peer(self, stage: usize) -> usize {
        match self.is_gradient == self.is_sent {
            true => stage - 1,
            false => stage + 1,
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
    /// The micro-batch, by its number among this rank's.
    pub micro_batch: usize,
    /// Which of the stage's tables of activations the micro-batch has.
    pub table: usize,
}

/// All that a stage does in a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageSchedule {
    /// Its passes, in order.
    pub tasks: Vec<StageTask>,
    /// What is exchanged after the last.
    pub last: Vec<Vec<Handover>>,
    /// Tables of activations: how many micro-batches are under way at most.
    pub tables: usize,
}

/// A pass in the order of a stage, with its times on paper.
#[derive(Clone, Copy)]
struct Timed {
    kind: TaskKind,
    micro_batch: usize,
    start: usize,
    end: usize,
}

impl PipelineSchedule {
    /// What one stage does in a step of so many micro-batches of its own.
    pub fn of_stage(self, stage: Rank, micro_batches: usize) -> StageSchedule {
        let stages = on_paper(&self.orders(stage.of, micro_batches), micro_batches);
        let own = &stages[stage.number];
        let mut exchanges = exchanges(&stages, stage.number).into_iter().peekable();
        let (mut free, mut tables): (Vec<usize>, _) = (Vec::new(), 0);
        let mut table_of = vec![0; micro_batches];
        let task = |task: &Timed| {
            if task.kind.is_forward() {
                table_of[task.micro_batch] = free.pop().unwrap_or_else(|| {
                    tables += 1;
                    tables - 1
                });
            }
            let table = table_of[task.micro_batch];
            if task.kind.is_backward() {
                free.push(table);
            }
            let mut before = Vec::new();
            while let Some((_, transfers)) = exchanges.next_if(|(time, _)| *time <= task.start) {
                before.push(transfers);
            }
            StageTask {
                exchanges: before,
                kind: task.kind,
                micro_batch: task.micro_batch,
                table,
            }
        };
        StageSchedule {
            tasks: own.iter().map(task).collect(),
            last: exchanges.map(|(_, transfers)| transfers).collect(),
            tables,
        }
    }

    /// How many micro-batches of so many are between a stage's forward and backward passes at most.
    pub fn under_way(self, stage: Rank, micro_batches: usize) -> usize {
        let after = stage.of - 1 - stage.number;
        match self {
            // The last stage goes backward at once.
            _ if after == 0 => 1,
            PipelineSchedule::Gpipe => micro_batches,
            PipelineSchedule::OneForwardOneBackward => (after + 1).min(micro_batches),
        }
    }

    /// The order of each stage's passes.
    fn orders(self, stages: usize, micro_batches: usize) -> Vec<Vec<(TaskKind, usize)>> {
        let all = 0..micro_batches;
        let of_stage = |stage: usize| -> Vec<(TaskKind, usize)> {
            if stage + 1 == stages {
                return all
                    .clone()
                    .map(|one| (TaskKind::ForwardBackward, one))
                    .collect();
            }
            let ahead = match self {
                PipelineSchedule::Gpipe => micro_batches,
                PipelineSchedule::OneForwardOneBackward => (stages - 1 - stage).min(micro_batches),
            };
            let forward = |one| (TaskKind::Forward, one);
            let backward = |one| (TaskKind::Backward, one);
            let first = (0..ahead).map(forward);
            let pairs =
                (ahead..micro_batches).flat_map(|one| [forward(one), backward(one - ahead)]);
            let last = (micro_batches - ahead..micro_batches).map(backward);
            first.chain(pairs).chain(last).collect()
        };
        (0..stages).map(of_stage).collect()
    }
}

/// When a stage's passes of each micro-batch end on paper; none for those that were not made yet.
#[derive(Clone)]
struct Ends {
    forward: Vec<Option<usize>>,
    backward: Vec<Option<usize>>,
}

/// The passes of all stages, with their times on paper: each begins after the one before it on its stage, and after what it needs
/// from its neighbours.
fn on_paper(orders: &[Vec<(TaskKind, usize)>], micro_batches: usize) -> Vec<Vec<Timed>> {
    let mut stages: Vec<Vec<Timed>> = vec![Vec::new(); orders.len()];
    let none = Ends {
        forward: vec![None; micro_batches],
        backward: vec![None; micro_batches],
    };
    let mut ends = vec![none; orders.len()];
    let passes: usize = orders.iter().map(Vec::len).sum();
    let mut made = 0;
    while made < passes {
        let made_before = made;
        for (stage, order) in orders.iter().enumerate() {
            while let Some((kind, micro_batch)) = order.get(stages[stage].len()).copied() {
                let came = match (kind, stage.checked_sub(1)) {
                    (TaskKind::Backward, _) => ends[stage + 1].backward[micro_batch],
                    (_, Some(before)) => ends[before].forward[micro_batch],
                    (_, None) => Some(0),
                };
                let Some(came) = came else { break };
                let before = stages[stage].last().map_or(0, |pass| pass.end);
                let start = before.max(came);
                let end = start + kind.time();
                stages[stage].push(Timed {
                    kind,
                    micro_batch,
                    start,
                    end,
                });
                if kind.is_forward() {
                    ends[stage].forward[micro_batch] = Some(end);
                }
                if kind.is_backward() {
                    ends[stage].backward[micro_batch] = Some(end);
                }
                made += 1;
            }
        }
        assert!(made > made_before, "every pass gets what it waits for");
    }
    stages
}

/// What a stage exchanges, by its time on paper.
fn exchanges(stages: &[Vec<Timed>], stage: usize) -> Vec<(usize, Vec<Handover>)> {
    let mut all: Vec<(usize, Handover)> = Vec::new();
    let mut add = |of: usize, is_sent: bool, is_gradient: bool| {
        for pass in &stages[of] {
            let makes = match is_gradient {
                false => pass.kind.is_forward(),
                true => pass.kind.is_backward(),
            };
            if makes {
                let transfer = Handover {
                    is_gradient,
                    is_sent,
                    micro_batch: pass.micro_batch,
                };
                all.push((pass.end, transfer));
            }
        }
    };
    if let Some(before) = stage.checked_sub(1) {
        add(before, false, false);
        add(stage, true, true);
    }
    if stage + 1 < stages.len() {
        add(stage, true, false);
        add(stage + 1, false, true);
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
                    let peer = transfer.peer(stage);
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

    fn all(kind: PipelineSchedule, stages: usize, micro_batches: usize) -> Vec<StageSchedule> {
        Rank::all(stages)
            .map(|stage| kind.of_stage(stage, micro_batches))
            .collect()
    }

    #[test]
    fn every_schedule_comes_to_its_end_and_needs_what_has_come() {
        for kind in [
            PipelineSchedule::Gpipe,
            PipelineSchedule::OneForwardOneBackward,
        ] {
            for (stages, micro_batches) in [
                (1, 1),
                (1, 4),
                (2, 1),
                (2, 5),
                (3, 2),
                (4, 8),
                (5, 3),
                (8, 11),
            ] {
                let schedules = all(kind, stages, micro_batches);
                assert!(ends(&schedules), "{kind:?}, {stages}, {micro_batches}");
                for (stage, schedule) in schedules.iter().enumerate() {
                    let mut came = Vec::new();
                    let mut made = Vec::new();
                    for task in &schedule.tasks {
                        let transfers = task.exchanges.iter().flatten();
                        came.extend(transfers.filter(|one| !one.is_sent).copied());
                        let needs = |is_gradient| Handover {
                            is_gradient,
                            is_sent: false,
                            micro_batch: task.micro_batch,
                        };
                        assert!(
                            !task.kind.is_forward() || stage == 0 || came.contains(&needs(false))
                        );
                        assert!(task.kind != TaskKind::Backward || came.contains(&needs(true)));
                        for sent in task.exchanges.iter().flatten().filter(|one| one.is_sent) {
                            assert!(made.contains(&(sent.is_gradient, sent.micro_batch)));
                        }
                        made.extend(task.kind.is_forward().then_some((false, task.micro_batch)));
                        made.extend(task.kind.is_backward().then_some((true, task.micro_batch)));
                    }
                    let backward = schedule.tasks.iter().filter(|task| task.kind.is_backward());
                    let order: Vec<usize> = backward.map(|task| task.micro_batch).collect();
                    assert_eq!(
                        order,
                        (0..micro_batches).collect::<Vec<_>>(),
                        "gradients add up in order"
                    );
                }
            }
        }
    }

    /// If each pass received what it needs just before it, and sent what it made just after it, stages of 1F1B would wait for each
    /// other: the test notices that.
    #[test]
    fn transfers_one_by_one_never_end() {
        let mut schedules = all(PipelineSchedule::OneForwardOneBackward, 4, 8);
        for (stage, schedule) in schedules.iter_mut().enumerate() {
            let mut one_by_one = Vec::new();
            for task in &schedule.tasks {
                let (forward, backward) = (task.kind.is_forward(), task.kind.is_backward());
                let one = |is_gradient, is_sent| Handover {
                    is_gradient,
                    is_sent,
                    micro_batch: task.micro_batch,
                };
                let both = [
                    (forward && stage > 0).then(|| one(false, false)),
                    (backward && stage < 3).then(|| one(true, false)),
                    (forward && stage < 3).then(|| one(false, true)),
                    (backward && stage > 0).then(|| one(true, true)),
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
        let tables = |kind: PipelineSchedule, micro_batches| -> Vec<usize> {
            let schedules = all(kind, 4, micro_batches);
            let tables = schedules.iter().map(|schedule| schedule.tables);
            let under_way = Rank::all(4).map(|stage| kind.under_way(stage, micro_batches));
            assert!(tables.clone().eq(under_way));
            tables.collect()
        };
        assert_eq!(tables(PipelineSchedule::Gpipe, 8), [8, 8, 8, 1]);
        assert_eq!(
            tables(PipelineSchedule::OneForwardOneBackward, 8),
            [4, 3, 2, 1]
        );
        assert_eq!(
            tables(PipelineSchedule::OneForwardOneBackward, 2),
            [2, 2, 2, 1]
        );
    }

    /// The bubble is (p - 1) / m of the work (Narayanan et al. 2021).
    #[test]
    fn time_has_the_published_bubble() {
        for kind in [
            PipelineSchedule::Gpipe,
            PipelineSchedule::OneForwardOneBackward,
        ] {
            let stages = on_paper(&kind.orders(4, 8), 8);
            let end = stages.iter().flatten().map(|pass| pass.end).max();
            assert_eq!(end, Some(3 * (8 + 3)), "{kind:?}");
        }
    }
}
