//! In which order a stage of a pipeline works on the micro-batches of a step.
//!
//! A stage has one run of neighbouring blocks, or several: virtual stages. Virtual stage `k` of a pipeline of `p` stages is of stage
//! `k % p`.

use super::stage_tasks::{OrderedTask, PassKind, StageSchedule, StageTask, TaskKind};
use super::tasks_on_paper::{TIMES, TimedTask, exchanges, on_paper};
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
            self.tasks(stage, micro_batches)
        });
        let virtual_stages = stage.of * self.virtual_stages;
        let stages = on_paper(&orders.collect::<Vec<_>>(), (virtual_stages, micro_batches));
        let own = &stages[stage.number];
        let tables = Tables::new(own.iter().map(|timed| timed.task), stage.of);
        let mut exchanges = exchanges(&stages, stage, virtual_stages)
            .into_iter()
            .peekable();
        let task = |(timed, table): (&TimedTask, &usize)| {
            let mut before = Vec::new();
            while let Some((_, transfers)) = exchanges.next_if(|(time, _)| *time <= timed.start) {
                before.push(transfers);
            }
            StageTask {
                exchanges: before,
                of: timed.task,
                table: *table,
            }
        };
        StageSchedule {
            tasks: own.iter().zip(&tables.of_tasks).map(task).collect(),
            last: exchanges.map(|(_, transfers)| transfers).collect(),
        }
    }

    /// How many micro-batches of so many are between the forward and backward passes of each virtual stage of a stage at most.
    pub fn under_way(self, stage: Rank, micro_batches: usize) -> Vec<usize> {
        let tasks = self.tasks(stage, micro_batches);
        Tables::new(tasks.into_iter(), stage.of).of_virtual_stages
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
        let [forward, backward, deferred] = TIMES.map(|time| time as f64);
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

    /// A stage's tasks, in order.
    fn tasks(self, stage: Rank, micro_batches: usize) -> Vec<OrderedTask> {
        let all = micro_batches * self.virtual_stages;
        let pass = |kind, (own, micro_batch)| OrderedTask {
            kind: TaskKind::Pass(kind),
            virtual_stage: own * stage.of + stage.number,
            micro_batch,
        };
        let of = |number| self.forward_pass(stage.of, number);
        let forward = |number| pass(PassKind::Forward, of(number));
        let backward = |number| {
            let (own, micro_batch) = of(number);
            let own = self.virtual_stages - 1 - own;
            pass(PassKind::Backward, (own, micro_batch))
        };
        let ahead = self.ahead(stage, micro_batches).min(all);
        let first = (0..ahead).map(forward);
        let pairs = (ahead..all).flat_map(|one| [forward(one), backward(one - ahead)]);
        let last = (all - ahead..all).map(backward);
        let passes = first.chain(pairs).chain(last);
        // The head goes backward at once.
        let head = stage.of * self.virtual_stages - 1;
        let passes = passes.filter_map(|pass| match pass.kind.is_forward() {
            _ if pass.virtual_stage != head => Some(pass),
            true => Some(OrderedTask {
                kind: TaskKind::Pass(PassKind::ForwardBackward),
                ..pass
            }),
            false => None,
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
}

/// A stage's passes, and the deferred gradients of each, so many backward passes later.
fn with_deferred_gradients(
    passes: impl Iterator<Item = OrderedTask>,
    later: usize,
) -> Vec<OrderedTask> {
    let (mut all, mut deferred) = (Vec::new(), VecDeque::new());
    for pass in passes {
        all.push(pass);
        if pass.kind.is_backward() {
            let kind = TaskKind::DeferredGradients;
            deferred.push_back(OrderedTask { kind, ..pass });
        }
        if deferred.len() > later {
            all.extend(deferred.pop_front());
        }
    }
    all.extend(deferred);
    all
}

/// Which of its virtual stage's tables of activations each task of a stage has.
struct Tables {
    of_tasks: Vec<usize>,
    /// How many each virtual stage of the stage has.
    of_virtual_stages: Vec<usize>,
}

impl Tables {
    fn new(tasks: impl Iterator<Item = OrderedTask>, stages: usize) -> Tables {
        let (mut of_tasks, mut count) = (Vec::new(), Vec::new());
        let mut free: Vec<Vec<usize>> = Vec::new();
        let mut begun = HashMap::new();
        for task in tasks {
            let own = task.virtual_stage / stages;
            if own >= count.len() {
                count.resize(own + 1, 0);
                free.resize(own + 1, Vec::new());
            }
            let of = (own, task.micro_batch);
            let table = *begun.entry(of).or_insert_with(|| {
                free[own].pop().unwrap_or_else(|| {
                    count[own] += 1;
                    count[own] - 1
                })
            });
            if task.kind.is_backward() {
                free[own].push(table);
            }
            of_tasks.push(table);
        }
        Tables {
            of_tasks,
            of_virtual_stages: count,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::stage_tasks::{Carried, Handover};
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
            let OrderedTask {
                kind,
                virtual_stage: own,
                micro_batch,
            } = task.of;
            let transfers = task.exchanges.iter().flatten();
            let (sent, received): (Vec<Handover>, Vec<_>) = transfers.partition(|one| one.is_sent);
            came.extend(received.iter().map(|one| one.of));
            assert!(sent.iter().all(|one| made.contains(&one.of)));
            let of = |input_of, is_gradient| Carried {
                input_of,
                is_gradient,
                micro_batch,
            };
            if kind == TaskKind::DeferredGradients {
                assert!(backward[&own].contains(&micro_batch));
                later.entry(own).or_default().push(micro_batch);
            }
            assert!(!kind.is_forward() || own == 0 || came.contains(&of(own, false)));
            assert!(
                kind != TaskKind::Pass(PassKind::Backward) || came.contains(&of(own + 1, true))
            );
            made.extend(kind.is_forward().then(|| of(own + 1, false)));
            made.extend(kind.is_backward().then(|| of(own, true)));
            if kind.is_backward() {
                backward.entry(own).or_default().push(micro_batch);
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
                let (forward, backward) = (task.of.kind.is_forward(), task.of.kind.is_backward());
                let one = |input_of, is_gradient, is_sent| Handover {
                    of: Carried {
                        input_of,
                        is_gradient,
                        micro_batch: task.of.micro_batch,
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
                    0 => TaskKind::Pass(PassKind::Backward),
                    _ => TaskKind::DeferredGradients,
                };
                let most = |micro_batches| {
                    let (mut now, mut most) = (0, 0);
                    for pass in order.tasks(stage, micro_batches) {
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
                for pass in order.tasks(stage, micro_batches) {
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
            let of_stage = |stage| order.tasks(stage, 8);
            let passes: Vec<_> = Rank::all(4).map(of_stage).collect();
            let stages = on_paper(&passes, (4 * order.virtual_stages, 8));
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
