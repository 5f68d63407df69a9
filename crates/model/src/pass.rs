//! One micro-batch on its way through the model: what stages compute with, pull and replay.

use crate::parts::PartState;
use crate::position::StagePosition;
use crate::stage::Declared;
use crate::stages::Rotary;
use crate::{
    Action, Activation, Batch, BatchShape, DropoutSite, Extent, LayerActivation, LayerCache,
    LayerState, LossPart, Model, ParameterId, Purpose, ReplayCounts, Result, SavedActivations,
    StepLoss,
};
use kernels::operation::{ByColumns, Sum};
use kernels::{Dropout, Init, Kernels};
use memory::{Buffer, Category, DType, Dims, In, Layer, Memory, Out, Phase, PlaceGuard};
use std::ops::Range;
use std::rc::Rc;
use units::Weights;

/// What a micro-batch needs to pass through the model.
pub struct Work<'a> {
    /// Where leases come from.
    pub memory: &'a Memory,
    /// The device that computes.
    pub kernels: &'a Kernels,
    /// Weights.
    pub weights: &'a mut Weights,
    /// The order in which the pass uses the units of weights.
    pub order: Rc<[usize]>,
    /// The tables of activations, with the one in use for the first part, and the next ones for the others. They are empty before a
    /// micro-batch's forward pass and after its backward pass, even one that fails.
    pub saved: &'a mut SavedActivations,
    /// The blocks that the pass runs: all, or those of a stage of a pipeline. The embedding is before the first block of all, and
    /// the head after the last.
    pub layers: Range<usize>,
    /// The micro-batch: what this rank has of its sequences, whole or in parts.
    pub batches: &'a [Batch],
    /// Why it passes through the model: to train, or to infer.
    pub purpose: Purpose<'a>,
}

/// The stage that runs, its direction, and which of its declared reads it has pulled.
pub(crate) struct Running<'a> {
    pub(crate) at: StagePosition,
    is_backward: bool,
    parameters: &'a [ParameterId],
    /// A bit for each activation that the stage declares to read.
    pulled: u32,
}

/// The forward and backward pass of one micro-batch, as its stages see it.
///
/// Methods that take an activation mean that of the block whose stage runs; [`Activation::NEXT_X`] means
/// [`Activation::X`] of the next block.
pub struct Pass<'a> {
    pub(crate) model: &'a Model,
    pub(crate) work: Work<'a>,
    pub(crate) replayed: ReplayCounts,
    pub(crate) running: Running<'a>,
    /// The stage whose backward pass runs; none during forward.
    pub(crate) backward_at: Option<StagePosition>,
    /// The number of the part that runs.
    pub(crate) part: usize,
    /// What the pass keeps for each part.
    pub(crate) parts: Vec<PartState>,
    /// The table of the first part.
    pub(crate) first_table: usize,
}

impl<'a> Pass<'a> {
    pub(crate) fn new(model: &'a Model, mut work: Work<'a>) -> Pass<'a> {
        work.weights.begin_pass(&work.order);
        if let Purpose::Training(training) = &mut work.purpose {
            training.gradients.use_part(0);
        }
        Pass {
            parts: work.batches.iter().map(|_| PartState::default()).collect(),
            part: 0,
            first_table: work.saved.table_in_use(),
            replayed: model.no_replays(),
            model,
            work,
            running: Running {
                at: StagePosition::EMBEDDING,
                is_backward: false,
                parameters: &[],
                pulled: 0,
            },
            backward_at: None,
        }
    }

    /// The device that computes.
    pub fn kernels(&self) -> &'a Kernels {
        self.work.kernels
    }

    /// The whole micro-batch, even if the stage runs on a tile; of its sequences the part that runs.
    pub fn batch(&self) -> &'a Batch {
        &self.work.batches[self.part]
    }

    /// Compute type.
    pub fn dtype(&self) -> DType {
        self.model.dtype()
    }

    /// The tables of a rotary embedding, `[2, rows, columns / 2]` f32 each: cosines, sines. The first is that of keys, and of queries
    /// unless there is a second.
    ///
    /// # Panics
    /// If the architecture does not have it.
    pub fn rotary_tables(&self, rotary: &Rotary) -> (In<'a>, Option<In<'a>>) {
        self.model.rotary_tables(rotary)
    }

    /// Dropout at a site of the block whose stage runs. It is the same in replays and in the backward pass; none in
    /// evaluation.
    pub fn dropout(&self, site: DropoutSite) -> Option<Dropout<'a>> {
        let keys = self.batch().dropout.as_ref()?;
        keys.at(self.running.at.layer, site)
    }

    /// Whether adapters add to what layers compute.
    pub(crate) fn has_adapters(&self) -> bool {
        !matches!(self.work.purpose, Purpose::Reference)
    }

    /// Whether a cache has what layers keep of earlier tokens; if not, all tokens of a sequence pass at once.
    pub fn has_cache(&self) -> bool {
        matches!(self.work.purpose, Purpose::Inference(Some(_)))
    }

    /// The states that the cache has for the gated delta rule of the running stage's layer, beside parameters; none without a cache.
    pub(crate) fn state_and_parameters<const N: usize>(
        &mut self,
        ids: [ParameterId; N],
    ) -> Option<(LayerState<'_>, [In<'_>; N])> {
        let indices = ids.map(|id| self.index(id));
        let layer = self.running.at.layer;
        match &mut self.work.purpose {
            Purpose::Inference(Some(cached)) => {
                let parameters = indices.map(|index| self.work.weights.view(index));
                Some((cached.state_of_layer(layer), parameters))
            }
            _ => None,
        }
    }

    /// The keys and values of earlier tokens, with room for those of these tokens, beside a parameter, which may be none.
    pub(crate) fn cache_and_parameter(
        &mut self,
        id: Option<ParameterId>,
    ) -> Option<(LayerCache<'_>, Option<In<'_>>)> {
        let index = id.map(|id| self.index(id));
        let layer = self.running.at.layer;
        match &mut self.work.purpose {
            Purpose::Inference(Some(cached)) => {
                let parameter = index.map(|index| self.work.weights.view(index));
                Some((cached.of_layer(layer), parameter))
            }
            _ => None,
        }
    }

    /// What happens to an activation between forward and backward. Without a backward pass, and on a tile, it is
    /// dropped after its last reader.
    fn action(&self, at: LayerActivation) -> Action {
        match self.work.purpose {
            Purpose::Training(_) if !self.is_within(at) => self.work.saved.action(at),
            _ => Action::Recompute,
        }
    }

    /// Reads a parameter.
    pub fn parameter(&self, id: ParameterId) -> In<'_> {
        self.work.weights.view(self.index(id))
    }

    /// Reads several parameters as one, stacked by rows; none if they are not contiguous in the layout.
    pub fn parameters(&self, ids: &[ParameterId]) -> Option<In<'_>> {
        self.work.weights.joined(&self.indices(ids))
    }

    /// Whether several parameters are contiguous in the layout, and of one kind.
    pub(crate) fn lie_together(&self, ids: &[ParameterId]) -> bool {
        self.sizes(ids).is_some()
    }

    /// The sizes of several parameters as one; none unless they are contiguous in the layout, and of one kind.
    pub(crate) fn sizes(&self, ids: &[ParameterId]) -> Option<Dims> {
        let joined = self.work.weights.layout().joined(&self.indices(ids));
        joined.map(|(_, sizes)| sizes)
    }

    /// Whether a parameter is stored as codes.
    pub(crate) fn is_coded(&self, id: ParameterId) -> bool {
        let entry = &self.work.weights.layout().entries()[self.index(id)];
        entry.codes.is_some()
    }

    /// Writes the values of a matrix that is stored as codes.
    pub(crate) fn widen(&self, id: ParameterId, out: Out) -> Result {
        let weights = &self.work.weights;
        Ok(weights.widen(self.kernels(), self.index(id), out)?)
    }

    /// Where to write the next contribution to the gradients of several parameters as one, and what to add it to; none
    /// if they are not contiguous in the layout, or not all trained.
    pub fn accumulate_joined(&mut self, ids: &[ParameterId]) -> Option<(Out<'_>, Init<'static>)> {
        let indices = self.indices(ids);
        if !ids.iter().all(|id| id.is_trained()) {
            return None;
        }
        let gradients = &mut *self.work.purpose.training().gradients;
        gradients.accumulate_joined(&indices)
    }

    /// The same for several vectors side by side, which may lie apart; none unless all are trained.
    pub(crate) fn accumulate_by_columns(
        &mut self,
        ids: &[ParameterId],
    ) -> Option<(ByColumns<Out<'_>>, Init<'static>)> {
        if !ids.iter().all(|id| id.is_trained()) {
            return None;
        }
        if self.lie_together(ids) {
            let (joined, init) = self.accumulate_joined(ids)?;
            return Some((joined.into(), init));
        }
        let indices = self.indices(ids);
        let gradients = &mut *self.work.purpose.training().gradients;
        let (apart, init) = gradients.accumulate_apart(&indices);
        Some((ByColumns::of(apart)?, init))
    }

    pub(crate) fn indices(&self, ids: &[ParameterId]) -> Vec<usize> {
        ids.iter().map(|id| self.index(*id)).collect()
    }

    /// Where to write the next contribution to a parameter's gradient, and what to add it to; none if it is not trained.
    pub fn accumulate(&mut self, id: ParameterId) -> Option<(Out<'_>, Init<'static>)> {
        self.accumulate_joined(&[id])
    }

    /// Leases room for the gradients of the untrained ones among some parameters, for operations that compute the
    /// gradients of all.
    ///
    /// # Errors
    /// [`ModelError::OutOfMemory`](crate::ModelError::OutOfMemory) if it is refused.
    pub fn unused_gradients<const N: usize>(
        &mut self,
        ids: [ParameterId; N],
    ) -> Result<[Option<Buffer>; N]> {
        let dtype = self.work.purpose.training().gradients.dtype();
        let mut unused = [const { None }; N];
        for (id, unused) in ids
            .iter()
            .zip(&mut unused)
            .filter(|(id, _)| !id.is_trained())
        {
            let sizes = Dims::try_from(self.parameter(*id).dims());
            let sizes = sizes.expect("a parameter has one to four sizes");
            *unused = Some(self.lease(Category::Temporary, "unused_gradient", sizes, dtype)?);
        }
        Ok(unused)
    }

    /// Leases room for what is added to a gradient, of the gradients' type.
    ///
    /// # Errors
    /// As [`Pass::temporary`].
    pub(crate) fn gradient_of(&mut self, name: &'static str, sizes: Dims) -> Result<Buffer> {
        let dtype = self.work.purpose.training().gradients.dtype();
        self.lease(Category::Temporary, name, sizes, dtype)
    }

    /// Some vectors, and where to write the next contributions to their gradients. They were declared in this order. `unused` has
    /// room for the gradients of untrained ones.
    pub fn parameters_and_gradients<'p, const N: usize>(
        &'p mut self,
        ids: [ParameterId; N],
        unused: &'p mut [Option<Buffer>; N],
    ) -> ([In<'p>; N], [(Out<'p>, Init<'static>); N]) {
        let indices = ids.map(|id| self.index(id));
        let trained: Vec<ParameterId> = ids.into_iter().filter(|id| id.is_trained()).collect();
        let trained = self.indices(&trained);
        let training = self.work.purpose.training();
        let mut trained = training.gradients.accumulate_all(&trained).into_iter();
        let gradients = unused.each_mut().map(|unused| match unused {
            Some(unused) => (unused.view_mut(), Init::Overwrite),
            None => trained.next().expect("what is trained has a gradient"),
        });
        let weights = &*self.work.weights;
        (indices.map(|index| weights.view(index)), gradients)
    }

    /// The same for a matrix, whose gradient lies in that of its unit, which vectors' do not.
    pub fn matrix_and_gradient<'p>(
        &'p mut self,
        id: ParameterId,
        unused: &'p mut Option<Buffer>,
    ) -> (In<'p>, (Out<'p>, Init<'static>)) {
        let index = self.index(id);
        let gradients = &mut *self.work.purpose.training().gradients;
        let gradient = match unused {
            Some(unused) => (unused.view_mut(), Init::Overwrite),
            None => {
                let trained = gradients.accumulate_joined(&[index]);
                trained.expect("one matrix lies together")
            }
        };
        (self.work.weights.view(index), gradient)
    }

    /// The index in the layout of a parameter that the stage declared.
    fn index(&self, id: ParameterId) -> usize {
        assert!(
            self.running.parameters.contains(&id),
            "{} uses a parameter that it does not declare",
            self.stage(self.running.at).stage.name()
        );
        self.model.index(id)
    }

    /// `[1]` f32: the factor on gradients of losses, 1 / targets of the whole step, 1 / pairs under preferences, or 1 for a policy.
    ///
    /// # Panics
    /// If this is a forward pass alone.
    pub fn gradient_scale(&self) -> In<'_> {
        match &self.work.purpose {
            Purpose::Training(training) => training.losses[self.part].gradient_scale,
            Purpose::Inference(_) | Purpose::Reference => {
                panic!("only training steps have gradients")
            }
        }
    }

    /// Adds a stage's own losses, any number of f32 values, to the sum of the targets' losses. The step's loss divides
    /// this sum by the number of targets. Call it in a backward pass, because replays run forward passes again.
    ///
    /// # Errors
    /// [`ModelError::Kernel`](crate::ModelError::Kernel) if the device fails.
    ///
    /// # Panics
    /// If no backward pass runs.
    pub fn add_loss(&mut self, losses: In) -> Result {
        assert!(
            self.running.is_backward,
            "a loss is added in a backward pass, which no replay repeats"
        );
        self.add_to_loss(LossPart::Targets, losses)
    }

    /// The loss of the step so far, of the part that runs.
    pub(crate) fn step_loss(&mut self) -> &mut StepLoss<'a> {
        let part = self.part;
        &mut self.work.purpose.training().losses[part]
    }

    pub(crate) fn add_to_loss(&mut self, part: LossPart, losses: In) -> Result {
        let kernels = self.work.kernels;
        let (out, init) = self.step_loss().part(part);
        Ok(kernels.run(Sum {
            out,
            x: losses,
            init,
        })?)
    }

    /// Where to write a micro-batch's next contribution to what the running stage counts over a step
    /// ([`crate::Stage::statistics`]), and what to add it to. Call it in a backward pass, because replays run forward
    /// passes again.
    ///
    /// # Panics
    /// If the stage declares none, or no backward pass runs.
    pub fn accumulate_statistics(&mut self) -> (Out<'_>, Init<'static>) {
        assert!(
            self.running.is_backward,
            "statistics are counted in a backward pass, which no replay repeats"
        );
        self.work.saved.statistics.accumulate(self.running.at)
    }

    /// Until the guard is dropped, leases count for this phase and part of the model.
    pub(crate) fn enter(&self, phase: Phase, layer: Layer) -> PlaceGuard {
        self.work.memory.enter(phase, layer)
    }

    /// Leases a temporary of the compute type.
    ///
    /// # Errors
    /// [`ModelError::OutOfMemory`](crate::ModelError::OutOfMemory) if it is refused.
    pub fn temporary(&self, name: &'static str, shape: impl Into<Dims>) -> Result<Buffer> {
        self.lease(Category::Temporary, name, shape, self.dtype())
    }

    /// Leases an f32 temporary.
    ///
    /// # Errors
    /// As [`Pass::temporary`].
    pub fn temporary_f32(&self, name: &'static str, shape: impl Into<Dims>) -> Result<Buffer> {
        self.lease(Category::Temporary, name, shape, DType::F32)
    }

    pub(crate) fn lease(
        &self,
        category: Category,
        name: &'static str,
        shape: impl Into<Dims>,
        dtype: DType,
    ) -> Result<Buffer> {
        Ok(self.work.memory.lease(category, name, shape, dtype)?)
    }

    /// An activation that the stage reads. In the backward pass, a dropped one is replayed.
    ///
    /// # Errors
    /// `ModelError` if a replay fails.
    ///
    /// # Panics
    /// If the stage did not declare it.
    pub fn pull(&mut self, activation: Activation) -> Result<Rc<Buffer>> {
        let running = self.stage(self.running.at);
        let mut declared = running.io.reads_of(self.running.is_backward).iter();
        let Some(place) = declared.position(|read| *read == activation) else {
            let (stage, undeclared) = (running.stage.name(), activation.name());
            panic!("{stage} pulls {undeclared}, which it does not declare");
        };
        self.running.pulled |= 1 << place;
        self.pull_at(self.of_block(activation))
    }

    /// An output of the stage that exists already, when a replay was asked for another one.
    ///
    /// # Errors
    /// As [`Pass::pull`].
    pub fn made_before(&mut self, activation: Activation) -> Result<Option<Rc<Buffer>>> {
        let at = self.of_block(activation);
        if self.is_absent(at) {
            return Ok(None);
        }
        self.pull_at(at).map(Some)
    }

    fn is_absent(&self, at: LayerActivation) -> bool {
        match &self.own().tiles {
            Some(tiles) if self.is_within(at) => tiles.get(at).is_none(),
            _ => self.work.saved.is_absent(at),
        }
    }

    pub(crate) fn is_within(&self, at: LayerActivation) -> bool {
        self.model.architecture().is_within(at)
    }

    /// The sequences whose rows an activation has: those of a tile, or of the whole micro-batch.
    pub(crate) fn shape_of(&self, at: LayerActivation) -> BatchShape {
        match self.is_within(at) {
            true => self.shape_of_tile(),
            false => self.batch().shape,
        }
    }

    /// Pulls an activation, or a tile's rows of it.
    fn pull_at(&mut self, at: LayerActivation) -> Result<Rc<Buffer>> {
        let Some(tiles) = &self.own().tiles else {
            return self.pull_whole(at);
        };
        if let Some(made) = tiles.get(at) {
            return Ok(made.clone());
        }
        let tokens = tiles.tokens.clone();
        if !self.is_within(at) {
            return Ok(self.pull_outside(at)?.frozen_rows(tokens));
        }
        self.replay(at)?;
        let made = self.own().tiles.as_ref().and_then(|tiles| tiles.get(at));
        Ok(made.expect("a replay makes what is read").clone())
    }

    pub(crate) fn pull_whole(&mut self, at: LayerActivation) -> Result<Rc<Buffer>> {
        if let Some(live) = self.work.saved.get(at) {
            return Ok(live.clone());
        }
        if self.work.saved.is_absent(at) {
            self.replay(at)?;
        }
        let Work {
            memory, kernels, ..
        } = self.work;
        let shape = self.batch().shape;
        self.work.saved.bring_back(memory, kernels, at, shape)?;
        let buffer = self.work.saved.get(at);
        Ok(buffer
            .expect("a replay files the outputs that are still needed")
            .clone())
    }

    /// Replays the stage that makes an activation.
    fn replay(&mut self, of: LayerActivation) -> Result {
        assert!(
            self.backward_at.is_some(),
            "forward keeps {of} until its last reader"
        );
        let at = self.model.architecture().producer(of);
        let layer = match at.stage {
            None => Layer::Embedding,
            Some(_) => Layer::Block(at.layer),
        };
        let _place = self.enter(Phase::Recompute, layer);
        // Counts one replay per stage, not one per tile or part.
        if self.first_token() == 0 && self.part() == 0 {
            self.replayed.add(self.stage(at).stage.name());
        }
        match self.own().tiles {
            Some(_) => self.run(at, false),
            None => self.replay_whole(at),
        }?;
        // The replay may have released the unit of the stage that asked for it, which goes on now.
        self.use_own_matrices()
    }

    /// Runs a stage in one direction, and checks that it pulls all that it declares to read.
    pub(crate) fn run(&mut self, at: StagePosition, is_backward: bool) -> Result {
        let Declared {
            stage,
            io,
            parameters,
            parameters_with_cache,
        } = self.stage(at);
        let running = Running {
            at,
            is_backward,
            parameters: match self.work.purpose {
                Purpose::Inference(Some(_)) => parameters_with_cache,
                _ => parameters,
            },
            pulled: 0,
        };
        let outer = std::mem::replace(&mut self.running, running);
        self.use_matrices(at, is_backward)?;
        match is_backward {
            false => stage.forward(self)?,
            true => stage.backward(self)?,
        }
        let done = std::mem::replace(&mut self.running, outer);
        let mut declared = io.reads_of(is_backward).iter().enumerate();
        if let Some((_, unread)) = declared.find(|(place, _)| done.pulled & (1 << place) == 0) {
            let (stage, unread) = (stage.name(), unread.name());
            panic!("{stage} declares that it reads {unread}, and never pulls it");
        }
        Ok(())
    }

    /// Sets the parameters that may be read where no stage runs, and brings their unit to the device.
    pub(crate) fn allow(&mut self, parameters: &'a [ParameterId]) -> Result {
        self.running.parameters = parameters;
        let unit = self.unit_of(parameters);
        unit.map_or(Ok(()), |unit| self.use_unit(unit))
    }

    /// Brings the matrices that a stage reads in one direction to the device.
    fn use_matrices(&mut self, at: StagePosition, is_backward: bool) -> Result {
        let declared = self.stage(at);
        let reads = !is_backward || declared.stage.reads_matrices_backward();
        match self.unit_of(&declared.parameters) {
            Some(unit) if reads => self.use_unit(unit),
            _ => Ok(()),
        }
    }

    /// Brings the running stage's own matrices back, after other units were used.
    pub(crate) fn use_own_matrices(&mut self) -> Result {
        self.use_matrices(self.running.at, self.running.is_backward)
    }

    /// Brings a unit of weights to the device, where it stays until another is used, and starts fetching the next
    /// units.
    pub(crate) fn use_unit(&mut self, unit: usize) -> Result {
        let work = &mut self.work;
        if work.weights.use_unit(work.kernels, unit)? {
            work.weights.look_ahead(work.kernels)?;
        }
        Ok(())
    }

    /// The unit of the matrices among some parameters; none if all are vectors.
    pub(crate) fn unit_of(&self, parameters: &[ParameterId]) -> Option<usize> {
        self.model.unit_of(parameters)
    }

    fn stage(&self, at: StagePosition) -> &'a Declared {
        self.model.architecture().stage(at)
    }

    /// Leases an output of the stage if it is needed and absent. The forward pass needs outputs that are kept or that a
    /// later stage reads; a replay needs those that the rest of the backward pass reads.
    ///
    /// # Errors
    /// [`ModelError::OutOfMemory`](crate::ModelError::OutOfMemory) if it is refused.
    pub fn output(&mut self, activation: Activation) -> Result<Option<Buffer>> {
        let extent = self.extent(activation);
        self.output_of(activation, extent)
    }

    /// As [`Pass::output`], with so many columns: for passes with a cache, in which other things may stand in the places
    /// of activations.
    ///
    /// # Errors
    /// As [`Pass::output`].
    pub fn output_as_wide(
        &mut self,
        activation: Activation,
        columns: usize,
    ) -> Result<Option<Buffer>> {
        self.output_of(activation, &Extent::tokens(columns))
    }

    fn output_of(&mut self, activation: Activation, extent: &Extent) -> Result<Option<Buffer>> {
        let at = self.of_block(activation);
        if !self.is_wanted(at) {
            return Ok(None);
        }
        let category = match self.backward_at {
            None if self.action(at) != Action::Recompute => Category::Activation,
            _ => Category::Temporary,
        };
        let is_within = self.is_within(at);
        let extent = match self.work.purpose {
            Purpose::Training(_) => *extent,
            Purpose::Inference(_) | Purpose::Reference => extent.uncoded(),
        };
        let (dims, dtype) = extent.resolve(self.shape_of(at), self.dtype());
        let (memory, name) = (self.work.memory, at.activation.name());
        let lease = || Ok(memory.lease(category, name, dims, dtype)?);
        match &mut self.own_mut().tiles {
            Some(tiles) if !is_within => tiles.output(at, lease),
            _ => lease(),
        }
        .map(Some)
    }

    /// Whether [`Pass::output`] leases an output of the stage.
    pub fn wants(&self, activation: Activation) -> bool {
        self.is_wanted(self.of_block(activation))
    }

    fn is_wanted(&self, at: LayerActivation) -> bool {
        let architecture = self.model.architecture();
        let Some(backward_at) = self.backward_at else {
            return self.action(at) != Action::Recompute || architecture.is_read(at);
        };
        let replayed = self.own().tiles.as_ref().map(|tiles| tiles.replayed);
        match (replayed, self.is_within(at)) {
            // A replay of whole outputs has tiles of its own, in which every stage starts afresh.
            (Some(Some(_)), true) => return architecture.is_read(at) && self.is_absent(at),
            // On tiles, whole outputs are made only by the stage that is replayed for them.
            (Some(replayed), false) if replayed != Some(self.running.at) => return false,
            _ => {}
        }
        let released = architecture.released_after(at);
        let let_go = released == backward_at && self.own().let_go.contains(&at.activation);
        released <= backward_at && !let_go && self.is_absent(at)
    }

    /// Shape and type of an output of the stage.
    pub fn shape(&self, activation: Activation) -> (Dims, DType) {
        let extent = self.extent(activation);
        extent.resolve(self.shape_of_tile(), self.dtype())
    }

    fn extent(&self, activation: Activation) -> &'a Extent {
        let extent = self.stage(self.running.at).io.extent(activation);
        extent.expect("a stage asks for the shapes of what it writes")
    }

    /// Files an output of the stage, for the stages that read it.
    pub fn put(&mut self, activation: Activation, buffer: Option<Buffer>) {
        let at = self.of_block(activation);
        match (buffer, &mut self.own_mut().tiles) {
            (Some(buffer), Some(tiles)) => tiles.put(at, buffer),
            (Some(buffer), None) => self.work.saved.put(at, buffer),
            (None, _) => {}
        }
    }

    /// Runs a stage of the forward pass. If no later stage reads an activation, it is dropped if it is recomputed, or
    /// sent to the host if it is offloaded.
    pub(crate) fn forward_stage(&mut self, at: StagePosition) -> Result {
        self.run(at, false)?;
        self.each_part_if_joined(at, |pass| pass.after_forward(at))
    }

    /// Handles activations after their last use. On a tile these are those of the tile; after the last tile, those of
    /// the whole micro-batch.
    pub(crate) fn after_forward(&mut self, at: StagePosition) -> Result {
        for activation in self.model.architecture().last_used_by(at) {
            match self
                .exists_here(activation)
                .then(|| self.action(activation))
            {
                None | Some(Action::Keep) => {}
                Some(Action::Recompute) => self.drop_activation(activation),
                Some(Action::Offload) => self.work.saved.send(self.work.kernels, activation)?,
            }
        }
        Ok(())
    }

    /// Whether an activation exists where stages run now: on a tile, or on the whole micro-batch.
    fn exists_here(&self, at: LayerActivation) -> bool {
        self.own().tiles.is_some() == self.is_within(at)
    }

    fn drop_activation(&mut self, at: LayerActivation) {
        if let Some(tiles) = &mut self.own_mut().tiles {
            return drop(tiles.take(at));
        }
        let readers = self.deferred_readers(at);
        self.work.saved.release_deferred(at, readers);
    }

    /// Runs the backward pass of a stage, and then releases the activations that no later one needs.
    pub(crate) fn backward_stage(&mut self, at: StagePosition) -> Result {
        self.backward_at = Some(at);
        self.each_part_if_joined(at, |pass| {
            pass.own_mut().let_go.clear();
            Ok(())
        })?;
        self.run(at, true)?;
        self.each_part_if_joined(at, |pass| {
            pass.after_backward(at);
            Ok(())
        })
    }

    /// As [`Pass::after_forward`].
    pub(crate) fn after_backward(&mut self, at: StagePosition) {
        for activation in self.model.architecture().released_by(at) {
            if self.exists_here(activation) {
                self.drop_activation(activation);
            }
        }
    }

    /// Releases an activation before the end of the stage's backward pass, if no other stage needs it any more.
    pub fn release(&mut self, activation: Activation, buffer: Rc<Buffer>) {
        drop(buffer);
        let at = self.of_block(activation);
        let is_last = self.backward_at == Some(self.model.architecture().released_after(at));
        if is_last && self.exists_here(at) {
            self.own_mut().let_go.push(activation);
            self.drop_activation(at);
        }
    }

    /// Takes an activation, to overwrite it. Call it in the backward pass after which the activation is released.
    ///
    /// # Errors
    /// As [`Pass::pull`].
    ///
    /// # Panics
    /// If another stage, or another tile, needs it after this one.
    pub fn take(&mut self, activation: Activation) -> Result<Buffer> {
        let at = self.of_block(activation);
        let last = Some(self.model.architecture().released_after(at));
        assert_eq!(self.backward_at, last, "{at} is needed after this stage");
        drop(self.pull(activation)?);
        self.own_mut().let_go.push(activation);
        Ok(match &mut self.own_mut().tiles {
            Some(tiles) => tiles.take(at).expect("no other tile needs it"),
            None => self.work.saved.take(at),
        })
    }

    /// The activation of the block whose stage runs, or of the next block.
    pub(crate) fn of_block(&self, activation: Activation) -> LayerActivation {
        self.model
            .architecture()
            .of_block(self.running.at, activation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stages::NormStage;
    use crate::test_model::TestModel;

    const H1: LayerActivation = LayerActivation {
        layer: 1,
        activation: NormStage::H1,
    };

    /// The bits of an activation pulled after the forward pass, and the number of replays that this took.
    fn pulled(recompute: &str) -> (Vec<u32>, usize) {
        let mut fixture = TestModel::new(recompute);
        fixture.train(&|| false, |model, work| {
            let mut pass = Pass::new(model, work);
            pass.forward().unwrap();
            pass.backward_at = Some(StagePosition::new(1, 1));
            let buffer = pass.pull_whole(H1).unwrap();
            let values = buffer.view().slice::<f32>().iter();
            let bits = values.map(|value| value.to_bits()).collect();
            drop(buffer);
            let replayed = pass.replayed.total();
            pass.abandon().unwrap();
            (bits, replayed)
        })
    }

    #[test]
    fn what_was_dropped_is_made_again_with_the_same_bits() {
        let (kept, no_replays) = pulled("none");
        let (replayed, replays) = pulled("layernorm");
        assert_eq!((no_replays, replays), (0, 1));
        assert_eq!(kept, replayed);
        assert!(kept.iter().any(|bits| *bits != 0));
    }

    /// Whether the first norm's output and its statistics are leased in the forward pass.
    fn wanted(pass: &mut Pass) -> [bool; 2] {
        pass.running.at = StagePosition::new(0, 0);
        [NormStage::H1, NormStage::RSTD1].map(|of| pass.wants(of))
    }

    /// Only the backward pass reads statistics, so they are not made where there is none, or where they are dropped.
    #[test]
    fn an_output_that_nobody_needs_is_not_leased() {
        let train = |recompute| {
            let mut fixture = TestModel::new(recompute);
            fixture.train(&|| false, |model, work| wanted(&mut Pass::new(model, work)))
        };
        assert_eq!(train("none"), [true, true]);
        assert_eq!(train("full"), [true, false]);
        let inferred =
            TestModel::new("none").infer(|model, work| wanted(&mut Pass::new(model, work)));
        assert_eq!(inferred, [true, false]);
    }
}
