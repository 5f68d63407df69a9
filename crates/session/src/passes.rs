//! The passes of a step's micro-batches, in the order of this rank's stage of a pipeline, and what is exchanged between them. Without a
//! pipeline each micro-batch goes forward and backward at once.

use crate::Result;
use crate::beside_targets::Beside;
use crate::neighbours::Neighbours;
use crate::session::{Session, own};
use crate::upload::{LentTokens, upload};
use data::{MicroBatch, StepBatch};
use kernels::{Section, StepTraffic, Traffic};
use memory::{Home, Layer, Phase};
use model::{
    Batch, BatchShape, DeferredGradients, DropoutSite, ModelError, Purpose, Randomness,
    ReplayCounts, Training, Work,
};
use settings::{
    Carried, Handover, OrderedTask, PassKind, Settings, StageTask, StepObjective, TaskKind,
};
use std::collections::HashMap;
use std::ops::Range;

/// The passes of a step.
struct Passes<'a> {
    /// The micro-batches that this rank makes, or its parts of them, each with the number in the step of its first part.
    own: Vec<(usize, &'a [MicroBatch])>,
    /// Micro-batches of the whole step, each part of one counted.
    micro_batches: usize,
    /// The sites of dropout with their layers.
    dropout_sites: Vec<(usize, DropoutSite)>,
    lent: Option<LentTokens>,
    /// Those between the forward and the backward pass of a virtual stage.
    under_way: HashMap<(usize, usize), BegunMicroBatch<'a>>,
    /// The gradients that backward passes have deferred, by virtual stage and micro-batch.
    deferred: HashMap<(usize, usize), DeferredGradients>,
    neighbours: Neighbours,
    /// The table and the block whose offloaded activations are still on their way to the host.
    leaving: Option<(usize, usize)>,
    replayed: ReplayCounts,
    /// What crossed for the last pass.
    crossed: StepTraffic,
}

/// A micro-batch on the device.
struct BegunMicroBatch<'a> {
    /// This rank's parts of it, or all of it.
    batches: Vec<Batch>,
    beside: Beside<'a>,
    section: Option<Section>,
}

impl Session {
    /// All passes of a step. Returns its replays, and what crossed for the last pass.
    pub(crate) fn run_micro_batches(
        &mut self,
        step: &StepBatch,
        lent: Option<LentTokens>,
        counted: usize,
    ) -> Result<(ReplayCounts, StepTraffic)> {
        let mut passes = Passes {
            own: own(&self.settings, step).collect(),
            micro_batches: step.micro.len(),
            dropout_sites: match self.settings.objective {
                StepObjective::NextTokens => self.model.architecture().dropout_sites(),
                // The model and what it is compared with must differ in what was learnt alone.
                StepObjective::Preferences { .. } | StepObjective::Policy => Vec::new(),
            },
            lent,
            under_way: HashMap::new(),
            deferred: HashMap::new(),
            neighbours: Neighbours::default(),
            leaving: None,
            replayed: self.model.no_replays(),
            crossed: StepTraffic::default(),
        };
        self.losses.begin_step(&*self.kernels, counted)?;
        self.saved.begin_step(&*self.kernels)?;
        let made = self.run_tasks(&mut passes);
        self.weights.forget_step_codes();
        if made.is_err() {
            // Other micro-batches may be between their passes. The first error is the one to report.
            let _ = self.saved.abandon(&*self.kernels);
            let _ = self.gradients.abandon(&*self.kernels);
        }
        made?;
        if self.settings.has_head() {
            self.losses.add_up(&*self.kernels)?;
        }
        if let (Some(ranks), Some(_)) = (&self.settings.ranks, &self.settings.pipeline) {
            self.losses.share_over_stages(&*self.kernels, ranks)?;
        }
        Ok((passes.replayed, passes.crossed))
    }

    /// All passes of a step, in the order of this stage's schedule, and the exchanges between them.
    fn run_tasks(&mut self, passes: &mut Passes) -> Result {
        let schedule = self.settings.schedule_of_stage(passes.own.len());
        for task in &schedule.tasks {
            for transfers in &task.exchanges {
                self.exchange(passes, transfers)?;
            }
            self.run_task(task, passes)?;
            passes.neighbours.give_back(&*self.kernels)?;
        }
        for transfers in &schedule.last {
            self.exchange(passes, transfers)?;
        }
        assert!(passes.deferred.is_empty(), "deferred gradients are added");
        Ok(passes.neighbours.give_back(&*self.kernels)?)
    }

    fn exchange(&mut self, passes: &mut Passes, transfers: &[Handover]) -> Result {
        let own = &passes.own;
        let shape = |index: usize| {
            let (_, parts) = own[index];
            BatchShape {
                rows: parts[0].rows,
                seq: parts[0].seq,
            }
        };
        let at = self.forward_in_step();
        passes.neighbours.exchange((&at, true), transfers, shape)
    }

    /// One pass of a micro-batch, or both, or its deferred gradients.
    fn run_task(&mut self, task: &StageTask, passes: &mut Passes) -> Result {
        let _place = self.memory.enter(Phase::Forward, Layer::Whole);
        let before = self.kernels.step_traffic();
        match task.of.kind {
            TaskKind::DeferredGradients => self.add_deferred_gradients(task.of, passes),
            TaskKind::Pass(kind) => self.run_pass((kind, task.of), task.table, passes),
        }?;
        passes.crossed = StepTraffic {
            update: Traffic::default(),
            ..self.kernels.step_traffic().since(before)
        };
        Ok(())
    }

    fn add_deferred_gradients(&mut self, task: OrderedTask, passes: &mut Passes) -> Result {
        if (self.stop)() {
            return Err(ModelError::Stopped.into());
        }
        let index = task.micro_batch;
        let deferred = passes.deferred.remove(&(task.virtual_stage, index));
        Ok(self.model.add_deferred_gradients(
            (&self.memory, &*self.kernels),
            &mut self.gradients,
            deferred.expect("its backward pass came before"),
            index + 1 == passes.own.len(),
        )?)
    }

    fn run_pass(
        &mut self,
        (kind, task): (PassKind, OrderedTask),
        table: usize,
        passes: &mut Passes,
    ) -> Result {
        let (index, count) = (task.micro_batch, passes.own.len());
        let layers = self.layers_of(task);
        let table = self.saved.table_of(layers.start, table);
        if passes.leaving.is_some_and(|(leaving, _)| leaving == table) {
            self.give_back_left(&mut passes.leaving)?;
        }
        let of = (task.virtual_stage, index);
        let begun = match passes.under_way.remove(&of) {
            Some(begun) => begun,
            None => self.begin_micro_batch(passes, index)?,
        };
        self.saved.use_table(table);
        self.pass((kind, task), &begun, passes)?;
        self.give_back_left(&mut passes.leaving)?;
        if layers.end == self.model.layers() && kind.is_forward() {
            self.losses.made(&*self.kernels, index)?;
        }
        if !kind.is_backward() {
            passes.leaving = Some((table, layers.end - 1));
            passes.under_way.insert(of, begun);
        } else if task.virtual_stage == self.settings.stage().number {
            (self.each_micro_batch)(index + 1, count);
        }
        Ok(())
    }

    /// The blocks of a pass.
    fn layers_of(&self, task: OrderedTask) -> Range<usize> {
        let layers = self.model.layers();
        self.settings.layers_of(task.virtual_stage, layers)
    }

    /// Gives back the device memory of what the last block offloaded, a pass after its copies began.
    fn give_back_left(&mut self, leaving: &mut Option<(usize, usize)>) -> Result {
        if let Some((table, layer)) = leaving.take() {
            self.saved.use_table(table);
            self.saved.give_back_left(&*self.kernels, layer)?;
        }
        Ok(())
    }

    /// Leases and uploads a micro-batch.
    fn begin_micro_batch<'a>(
        &mut self,
        passes: &Passes<'a>,
        index: usize,
    ) -> Result<BegunMicroBatch<'a>> {
        let (number, parts) = passes.own[index];
        let section = section(&self.settings, (index, passes.own.len()), &parts[0]);
        // Tokens of parts are not contiguous in what is lent.
        let lent = passes
            .lent
            .filter(|_| section.is_none() && parts.len() == 1);
        let lent = lent.map(|lent| lent.of(index, &parts[0]));
        let batches = parts.iter().zip(number..);
        let sites = &passes.dropout_sites;
        let batches = batches.map(|(part, number)| self.batch((number, part), sites, lent));
        let batches = batches.collect::<Result<Vec<_>>>()?;
        let beside = self.beside(&batches, &parts[0])?;
        Ok(BegunMicroBatch {
            batches,
            beside,
            section,
        })
    }

    /// Leases and uploads a micro-batch, or a part of one, with its number in the step.
    fn batch(
        &self,
        (number, micro): (usize, &MicroBatch),
        dropout_sites: &[(usize, DropoutSite)],
        lent: Option<LentTokens>,
    ) -> Result<Batch> {
        let (memory, kernels) = (&self.memory, &*self.kernels);
        let architecture = self.model.architecture();
        let mut batch = upload(memory, kernels, micro, lent)?;
        let losses = architecture.router_losses;
        if let (Some(lengths), Some(_)) = (micro.own_lengths(), losses) {
            batch = batch.with_lengths(memory, kernels, &lengths)?;
        }
        let randomness = Randomness {
            seed: self.settings.seed,
            step: self.step as u64 + 1,
            micro_batch: number as u64,
        };
        Ok(batch.with_dropout(memory, kernels, dropout_sites, randomness)?)
    }

    fn pass(
        &mut self,
        (kind, task): (PassKind, OrderedTask),
        begun: &BegunMicroBatch,
        passes: &mut Passes,
    ) -> Result {
        let (index, count) = (task.micro_batch, passes.own.len());
        if kind.is_backward() {
            self.gradients.begin_micro_batch(task.virtual_stage);
        }
        let layers = self.layers_of(task);
        let of_step = (passes.micro_batches, begun.beside.head_loss());
        let losses = self.losses.of_micro_batch(index == 0, of_step);
        let (kernels, neighbours) = (&*self.kernels, &mut passes.neighbours);
        let (stop, step_before) = (&*self.stop, self.in_flight.as_ref());
        let is_stopped = || {
            // Asked often while the device may be at the step before.
            if let Some(step_before) = step_before {
                step_before.note_if_made(kernels);
            }
            stop()
        };
        let carried = |input_of, is_gradient| Carried {
            input_of,
            is_gradient,
            micro_batch: index,
        };
        let own = task.virtual_stage;
        let gradient = match kind {
            PassKind::Backward => neighbours.take(kernels, carried(own + 1, true))?,
            PassKind::Forward | PassKind::ForwardBackward => {
                if let Some(input) = neighbours.take(kernels, carried(own, false))? {
                    self.saved.receive(layers.start, input);
                }
                None
            }
        };
        let defers = self.settings.defers_gradients() && kind.is_backward();
        let deferred = defers.then(|| passes.deferred.entry((own, index)).or_default());
        let work = Work {
            memory: &self.memory,
            kernels,
            weights: &mut self.weights,
            order: self.orders.get(&(kind, own)).cloned().unwrap_or_default(),
            saved: &mut self.saved,
            layers,
            batches: &begun.batches,
            purpose: Purpose::Training(Training {
                gradients: &mut self.gradients,
                optimizer: Some(&mut self.optimizer),
                is_first_micro_batch: index == 0,
                is_last_micro_batch: index + 1 == count,
                losses,
                deferred,
                is_stopped: &is_stopped,
            }),
        };
        if let Some(section) = begun.section {
            kernels.begin_section(section)?;
        }
        let made = match kind {
            PassKind::Forward => self.model.forward_on_pipeline_stage(work).map(Some),
            PassKind::Backward => {
                self.model
                    .backward_of_stage(work, gradient, &mut passes.replayed)
            }
            PassKind::ForwardBackward => self.model.forward_backward(work, &mut passes.replayed),
        };
        let ended = match begun.section {
            Some(_) => kernels.end_section(made.is_ok()),
            None => Ok(()),
        };
        if let Some(units) = self.weights.take_record() {
            self.orders.insert((kind, own), units.into());
        }
        if let Some(made) = made? {
            let of = match kind.is_backward() {
                true => carried(own, true),
                false => carried(own + 1, false),
            };
            neighbours.keep(of, made);
        }
        Ok(ended?)
    }
}

/// The name under which a micro-batch's calls can be repeated; none if they cannot. Attention makes other calls where documents are
/// packed.
///
/// The first micro-batch of a step differs from later ones: it overwrites gradients, and updates of what is not on the
/// device may run beside it. So does the last if something is not on the device: gradients leave, and states come.
fn section(
    settings: &Settings,
    (index, count): (usize, usize),
    micro: &MicroBatch,
) -> Option<Section> {
    let homes = &settings.homes;
    let all_on_device = homes.states == Home::Device && homes.gradients == Home::Device;
    let is_other = index == 0 || (index + 1 == count && !all_on_device);
    if settings.graphs_off.is_some() || is_other {
        return None;
    }
    let is_packed = usize::from(micro.documents.is_some());
    Some(Section([micro.rows, micro.seq, is_packed]))
}
