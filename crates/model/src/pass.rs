//! One micro-batch on its way through the model: what a stage computes with, pulling and replaying.

use crate::architecture::Position;
use crate::stage::Declared;
use crate::{
    Action, Activation, Batch, DropoutSite, LayerActivation, LayerCache, Model, ModelError,
    ParameterId, Purpose, ReplayCounts, Saved,
};
use kernels::{Dropout, Init, Kernels};
use memory::{Arena, Buffer, Category, DType, Dims, In, Layer, Memory, Out, Phase, PlaceGuard};
use std::rc::Rc;

/// Everything that a micro-batch passes through the model with.
pub struct Work<'a> {
    /// What leases come from.
    pub memory: &'a Memory,
    /// What computes.
    pub kernels: &'a dyn Kernels,
    /// Weights.
    pub parameters: &'a mut Arena,
    /// The table of activations; empty before and after, whatever happens.
    pub saved: &'a mut Saved,
    /// The micro-batch.
    pub batch: &'a Batch,
    /// What it passes through the model for.
    pub purpose: Purpose<'a>,
}

/// The stage that runs, in which direction, and what it has pulled of what it declared.
struct Running<'a> {
    at: Position,
    is_backward: bool,
    parameters: &'a [ParameterId],
    /// A bit for each of what it declared.
    pulled: u32,
}

/// The forward and backward pass of one micro-batch, as its stages see it.
///
/// Methods that name an activation mean that of the block whose stage runs, [`Activation::NEXT_X`] that of the next.
pub struct Pass<'a> {
    pub(crate) model: &'a Model,
    pub(crate) work: Work<'a>,
    pub(crate) replayed: ReplayCounts,
    running: Running<'a>,
    /// The stage whose backward pass runs; none during forward.
    backward_at: Option<Position>,
    /// What that stage has let go of before its end.
    let_go: Vec<Activation>,
    /// Gradients of activations, until the stage that wrote these takes them.
    flowing: Vec<(LayerActivation, Buffer)>,
}

impl<'a> Pass<'a> {
    pub(crate) fn new(model: &'a Model, work: Work<'a>) -> Pass<'a> {
        Pass {
            replayed: model.no_replays(),
            model,
            work,
            running: Running {
                at: Position::EMBEDDING,
                is_backward: false,
                parameters: &[],
                pulled: 0,
            },
            backward_at: None,
            let_go: Vec::new(),
            flowing: Vec::new(),
        }
    }

    /// What computes.
    pub fn kernels(&self) -> &'a dyn Kernels {
        self.work.kernels
    }

    /// The micro-batch.
    pub fn batch(&self) -> &'a Batch {
        self.work.batch
    }

    /// Tokens of the micro-batch.
    pub fn tokens(&self) -> usize {
        self.work.batch.shape.tokens()
    }

    /// Compute type.
    pub fn dtype(&self) -> DType {
        self.model.dtype()
    }

    /// The table of the rotary embedding, `[2, s, head_dim / 2]` f32: cosines, sines.
    ///
    /// # Panics
    /// If the architecture has none.
    pub fn rotary_table(&self) -> In<'a> {
        self.model.rotary_table()
    }

    /// Dropout at a site of the block whose stage runs, the same in replays and in the backward pass; none in evaluation.
    pub fn dropout(&self, DropoutSite { site, rate }: DropoutSite) -> Option<Dropout> {
        let randomness = self.work.purpose.randomness().filter(|_| rate > 0.0)?;
        let layer = self.running.at.layer as u64;
        Some(Dropout {
            probability: rate,
            key: randomness.key(layer << 32 | u64::from(site)),
        })
    }

    /// Where the keys and values of earlier tokens are, and those of these tokens go; none where all tokens of a sequence
    /// pass at once.
    pub fn cache(&mut self) -> Option<LayerCache<'_>> {
        let layer = self.running.at.layer;
        match &mut self.work.purpose {
            Purpose::Inference(Some(cached)) => Some(cached.of_layer(layer)),
            _ => None,
        }
    }

    /// What happens to an activation between forward and backward. Where there is no backward, it goes after its last
    /// reader.
    fn action(&self, at: LayerActivation) -> Action {
        match self.work.purpose {
            Purpose::Training(_) => self.work.saved.action(at),
            Purpose::Inference(_) => Action::Recompute,
        }
    }

    /// Reads a parameter.
    pub fn parameter(&self, id: ParameterId) -> In<'_> {
        self.work.parameters.view(self.index(id))
    }

    /// Where to write the next contribution to a parameter's gradient, and what to add it to.
    pub fn accumulate(&mut self, id: ParameterId) -> (Out<'_>, Init<'static>) {
        let index = self.index(id);
        self.work.purpose.training().gradients.accumulate(index)
    }

    /// The first of some parameters, and where to write the next contributions to the gradients of all, which were
    /// declared in this order.
    pub fn parameter_and_gradients<const N: usize>(
        &mut self,
        ids: [ParameterId; N],
    ) -> (In<'_>, [(Out<'_>, Init<'static>); N]) {
        let indices = ids.map(|id| self.index(id));
        let training = self.work.purpose.training();
        let gradients = training.gradients.accumulate_all(indices);
        (self.work.parameters.view(indices[0]), gradients)
    }

    /// Where a parameter that the stage declared stands in the layout.
    fn index(&self, id: ParameterId) -> usize {
        assert!(
            self.running.parameters.contains(&id),
            "{} uses a parameter that it does not declare",
            self.stage(self.running.at).stage.name()
        );
        self.model.index(id)
    }

    /// What happens from now on, until the guard is dropped, counts as of this phase and part of the model.
    pub(crate) fn enter(&self, phase: Phase, layer: Layer) -> PlaceGuard {
        self.work.memory.enter(phase, layer)
    }

    /// Leases a temporary of the compute type.
    ///
    /// # Errors
    /// [`ModelError::OutOfMemory`] if it is refused.
    pub fn temporary(
        &self,
        name: &'static str,
        shape: impl Into<Dims>,
    ) -> Result<Buffer, ModelError> {
        self.lease(Category::Temporary, name, shape, self.dtype())
    }

    /// Leases an f32 temporary.
    ///
    /// # Errors
    /// As [`Pass::temporary`].
    pub fn temporary_f32(
        &self,
        name: &'static str,
        shape: impl Into<Dims>,
    ) -> Result<Buffer, ModelError> {
        self.lease(Category::Temporary, name, shape, DType::F32)
    }

    fn lease(
        &self,
        category: Category,
        name: &'static str,
        shape: impl Into<Dims>,
        dtype: DType,
    ) -> Result<Buffer, ModelError> {
        Ok(self.work.memory.lease(category, name, shape, dtype)?)
    }

    /// An activation that the stage reads. During backward, one that was dropped is made again.
    ///
    /// # Errors
    /// [`ModelError`] if a replay fails.
    ///
    /// # Panics
    /// If the stage did not declare it.
    pub fn pull(&mut self, activation: Activation) -> Result<Rc<Buffer>, ModelError> {
        let running = self.stage(self.running.at);
        let mut declared = running.io.reads_of(self.running.is_backward).iter();
        let Some(place) = declared.position(|read| *read == activation) else {
            let (stage, undeclared) = (running.stage.name(), activation.name());
            panic!("{stage} pulls {undeclared}, which it does not declare");
        };
        self.running.pulled |= 1 << place;
        self.pull_at(self.of_block(activation))
    }

    /// An output of the stage that is there already, in a replay that was asked for another.
    ///
    /// # Errors
    /// As [`Pass::pull`].
    pub fn made_before(
        &mut self,
        activation: Activation,
    ) -> Result<Option<Rc<Buffer>>, ModelError> {
        let at = self.of_block(activation);
        if self.work.saved.is_absent(at) {
            return Ok(None);
        }
        self.pull_at(at).map(Some)
    }

    fn pull_at(&mut self, at: LayerActivation) -> Result<Rc<Buffer>, ModelError> {
        if let Some(live) = self.work.saved.get(at) {
            return Ok(live.clone());
        }
        if self.work.saved.is_absent(at) {
            assert!(
                self.backward_at.is_some(),
                "forward keeps {at} until its last reader"
            );
            self.replay(self.model.architecture().producer(at))?;
        }
        let Work {
            memory, kernels, ..
        } = self.work;
        let shape = self.work.batch.shape;
        self.work.saved.bring_back(memory, kernels, at, shape)?;
        let buffer = self.work.saved.get(at);
        Ok(buffer
            .expect("a replay files the outputs that are still needed")
            .clone())
    }

    fn replay(&mut self, at: Position) -> Result<(), ModelError> {
        let layer = match at.stage {
            None => Layer::Embedding,
            Some(_) => Layer::Block(at.layer),
        };
        let _place = self.enter(Phase::Recompute, layer);
        self.replayed.add(self.stage(at).stage.name());
        self.run(at, false)
    }

    /// Runs a stage in one direction, and sees to it that it reads what it declares.
    pub(crate) fn run(&mut self, at: Position, is_backward: bool) -> Result<(), ModelError> {
        let Declared {
            stage,
            io,
            parameters,
        } = self.stage(at);
        let running = Running {
            at,
            is_backward,
            parameters,
            pulled: 0,
        };
        let outer = std::mem::replace(&mut self.running, running);
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

    /// The parameters that may be asked for now, where no stage runs.
    pub(crate) fn allow(&mut self, parameters: &'a [ParameterId]) {
        self.running.parameters = parameters;
    }

    fn stage(&self, at: Position) -> &'a Declared {
        self.model.architecture().stage(at)
    }

    /// Leases an output of the stage, if anybody needs it and it is not there: forward needs what is kept and what a
    /// later stage reads; a replay needs what the rest of backward reads.
    ///
    /// # Errors
    /// [`ModelError::OutOfMemory`] if it is refused.
    pub fn output(&self, activation: Activation) -> Result<Option<Buffer>, ModelError> {
        let at = self.of_block(activation);
        let architecture = self.model.architecture();
        let kept = self.action(at) != Action::Recompute;
        let is_wanted = match self.backward_at {
            None => kept || architecture.is_read(at),
            Some(backward_at) => {
                let released = architecture.released_after(at);
                let let_go = released == backward_at && self.let_go.contains(&at.activation);
                released <= backward_at && !let_go && self.work.saved.is_absent(at)
            }
        };
        if !is_wanted {
            return Ok(None);
        }
        let category = match self.backward_at {
            None if kept => Category::Activation,
            _ => Category::Temporary,
        };
        let (dims, dtype) = self.shape(activation);
        self.lease(category, at.activation.name(), dims, dtype)
            .map(Some)
    }

    /// Shape and type of an output of the stage.
    pub fn shape(&self, activation: Activation) -> (Dims, DType) {
        let extent = self.stage(self.running.at).io.extent(activation);
        let extent = extent.expect("a stage asks for the shapes of what it writes");
        extent.resolve(self.work.batch.shape, self.dtype())
    }

    /// Files an output of the stage for those who read it.
    pub fn put(&mut self, activation: Activation, buffer: Option<Buffer>) {
        let at = self.of_block(activation);
        if let Some(buffer) = buffer {
            self.work.saved.put(at, buffer);
        }
    }

    /// Runs a stage of the forward pass; of what no later stage reads, drops what is recomputed and sends away what is
    /// offloaded.
    pub(crate) fn forward_stage(&mut self, at: Position) -> Result<(), ModelError> {
        self.run(at, false)?;
        for activation in self.model.architecture().last_used_by(at) {
            match self.action(activation) {
                Action::Keep => {}
                Action::Recompute => self.work.saved.release(activation),
                Action::Offload => self.work.saved.send(self.work.kernels, activation)?,
            }
        }
        Ok(())
    }

    /// Runs the backward pass of a stage and releases what it was the last to need.
    pub(crate) fn backward_stage(&mut self, at: Position) -> Result<(), ModelError> {
        self.backward_at = Some(at);
        self.let_go.clear();
        self.run(at, true)?;
        for activation in self.model.architecture().released_by(at) {
            self.work.saved.release(activation);
        }
        Ok(())
    }

    /// Lets go of an activation before the end of the stage's backward pass, if no other stage needs it after that.
    pub fn release(&mut self, activation: Activation, buffer: Rc<Buffer>) {
        drop(buffer);
        let at = self.of_block(activation);
        if self.backward_at == Some(self.model.architecture().released_after(at)) {
            self.let_go.push(activation);
            self.work.saved.release(at);
        }
    }

    /// Takes an activation in the stage after whose backward pass it is released anyway, to overwrite it.
    ///
    /// # Errors
    /// As [`Pass::pull`].
    ///
    /// # Panics
    /// If another stage needs it after this one.
    pub fn take(&mut self, activation: Activation) -> Result<Buffer, ModelError> {
        let at = self.of_block(activation);
        let last = Some(self.model.architecture().released_after(at));
        assert_eq!(self.backward_at, last, "{at} is needed after this stage");
        drop(self.pull(activation)?);
        self.let_go.push(activation);
        Ok(self.work.saved.take(at))
    }

    /// Takes the gradient of what the stage wrote.
    ///
    /// # Panics
    /// If no later stage filed one.
    pub fn gradient(&mut self, of: Activation) -> Buffer {
        let at = self.of_block(of);
        let gradient = self.take_gradient(at);
        gradient.unwrap_or_else(|| panic!("nobody filed the gradient of {at}"))
    }

    /// The gradient of what the stage read, and what to add its contribution to: to what later stages filed, or to
    /// nothing, on a fresh lease.
    ///
    /// # Errors
    /// [`ModelError::OutOfMemory`] if the lease is refused.
    pub fn gradient_to_add(
        &mut self,
        of: Activation,
    ) -> Result<(Buffer, Init<'static>), ModelError> {
        let at = self.of_block(of);
        if let Some(gradient) = self.take_gradient(at) {
            return Ok((gradient, Init::Accumulate));
        }
        let extent = self.model.architecture().extent(at);
        let (dims, _) = extent.resolve(self.work.batch.shape, self.dtype());
        Ok((self.temporary(of.gradient_name(), dims)?, Init::Overwrite))
    }

    /// Files the gradient of what the stage read.
    ///
    /// # Panics
    /// If there is one: [`Pass::gradient_to_add`] gives it, to be added to.
    pub fn file_gradient(&mut self, of: Activation, gradient: Buffer) {
        self.file_gradient_at(self.of_block(of), gradient);
    }

    pub(crate) fn file_gradient_at(&mut self, at: LayerActivation, gradient: Buffer) {
        let is_first = self.flowing.iter().all(|(other, _)| *other != at);
        assert!(is_first, "the gradient of {at} is there already");
        self.flowing.push((at, gradient));
    }

    fn take_gradient(&mut self, at: LayerActivation) -> Option<Buffer> {
        let found = self.flowing.iter().position(|(other, _)| *other == at)?;
        Some(self.flowing.swap_remove(found).1)
    }

    /// Whether every gradient of an activation has been taken.
    pub(crate) fn gradients_are_taken(&self) -> bool {
        self.flowing.is_empty()
    }

    /// The activation of the block whose stage runs, or of the next.
    fn of_block(&self, activation: Activation) -> LayerActivation {
        self.model
            .architecture()
            .of_block(self.running.at, activation)
    }
}
