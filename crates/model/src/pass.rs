//! One micro-batch on its way through the model: leases, the saved table, pulling and replaying.

use crate::gradients::Gradients;
use crate::model::{Batch, Model, ModelError};
use crate::policy::{Action, Policy};
use crate::saved::Saved;
use crate::stage::{Activation, ReplayCounts, Stage};
use kernels::{AttentionShape, KernelError, Kernels};
use memory::{Arena, Buffer, Category, DType, Dims, In, Layer, Memory, Phase};
use std::rc::Rc;

/// A stage of a certain block. The embedding comes before block 0, the head after the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Position {
    pub(crate) layer: usize,
    pub(crate) stage: Stage,
}

/// What else happens while a micro-batch passes through the model.
pub trait Beside {
    /// Just before a part of the model runs forward: its weights may still be written.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    fn before_forward(
        &mut self,
        part: Layer,
        parameters: &mut Arena,
        gradients: &Arena,
    ) -> Result<(), KernelError>;

    /// When the forward pass is done, the head's gradients are there, and the blocks go backward.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    fn before_backward(&mut self) -> Result<(), KernelError>;
}

/// Nothing else happens.
pub struct Nothing;

impl Beside for Nothing {
    fn before_forward(&mut self, _: Layer, _: &mut Arena, _: &Arena) -> Result<(), KernelError> {
        Ok(())
    }

    fn before_backward(&mut self) -> Result<(), KernelError> {
        Ok(())
    }
}

/// The forward and backward pass of one micro-batch.
pub(crate) struct Pass<'a> {
    pub(crate) kernels: &'a dyn Kernels,
    pub(crate) memory: &'a Memory,
    pub(crate) model: &'a Model,
    pub(crate) parameters: &'a mut Arena,
    pub(crate) gradients: &'a mut Gradients,
    pub(crate) policy: &'a Policy,
    pub(crate) beside: &'a mut dyn Beside,
    pub(crate) batch: &'a Batch,
    pub(crate) saved: &'a mut Saved,
    pub(crate) replayed: ReplayCounts,
    /// The stage whose backward pass runs; none during forward.
    pub(crate) backward_at: Option<Position>,
    /// What that stage has let go of before its end.
    pub(crate) let_go: [bool; Activation::ALL.len()],
}

impl Pass<'_> {
    /// Reads a parameter.
    pub(crate) fn parameter(&self, index: usize) -> In<'_> {
        self.parameters.view(index)
    }

    /// Before a part of the model runs forward.
    pub(crate) fn before_forward(&mut self, part: Layer) -> Result<(), ModelError> {
        let gradients = self.gradients.arena();
        Ok(self
            .beside
            .before_forward(part, self.parameters, gradients)?)
    }

    /// Tokens of the micro-batch.
    pub(crate) fn tokens(&self) -> usize {
        self.batch.rows * self.batch.seq
    }

    pub(crate) fn attention_shape(&self) -> AttentionShape {
        let config = &self.model.config;
        AttentionShape {
            batch: self.batch.rows,
            seq: self.batch.seq,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
        }
    }

    /// Leases a temporary of the compute type.
    pub(crate) fn temporary(
        &self,
        name: &'static str,
        shape: impl Into<Dims>,
    ) -> Result<Buffer, ModelError> {
        Ok(self
            .memory
            .lease(Category::Temporary, name, shape, self.model.dtype)?)
    }

    /// Leases an f32 temporary.
    pub(crate) fn temporary_f32(
        &self,
        name: &'static str,
        shape: impl Into<Dims>,
    ) -> Result<Buffer, ModelError> {
        Ok(self
            .memory
            .lease(Category::Temporary, name, shape, DType::F32)?)
    }

    /// An activation that a stage reads. During backward, one that was dropped is made again.
    pub(crate) fn pull(
        &mut self,
        layer: usize,
        activation: Activation,
    ) -> Result<Rc<Buffer>, ModelError> {
        if self.saved.is_absent(layer, activation) {
            assert!(
                self.backward_at.is_some(),
                "forward keeps {} until its last reader",
                activation.name()
            );
            self.replay(self.producer(layer, activation))?;
        }
        self.bring_back(layer, activation)?;
        let buffer = self.saved.get(layer, activation);
        Ok(buffer
            .expect("a replay files the outputs that are still needed")
            .clone())
    }

    /// An activation that a stage writes, if it is there already.
    pub(crate) fn pull_unless_absent(
        &mut self,
        layer: usize,
        activation: Activation,
    ) -> Result<Option<Rc<Buffer>>, ModelError> {
        if self.saved.is_absent(layer, activation) {
            return Ok(None);
        }
        self.pull(layer, activation).map(Some)
    }

    fn replay(&mut self, position: Position) -> Result<(), ModelError> {
        let layer = match position.stage {
            Stage::Embedding => Layer::Embedding,
            _ => Layer::Block(position.layer),
        };
        let _place = self.memory.enter(Phase::Recompute, layer);
        self.replayed.add(position.stage);
        self.run_stage(position)
    }

    /// Leases a stage's output, if the model has it, anybody needs it and it is not there: forward needs what is kept and what a
    /// later stage reads; a replay needs what the rest of backward reads.
    pub(crate) fn output(
        &self,
        layer: usize,
        activation: Activation,
    ) -> Result<Option<Buffer>, ModelError> {
        let table = &self.model.table;
        if !table.has(activation) {
            return Ok(None);
        }
        let kept = self.policy.action(layer, activation) != Action::Recompute;
        let wanted = match self.backward_at {
            None => kept || table.first_and_last_reader(activation).is_some(),
            Some(at) => {
                let released = self.last_use(layer, activation);
                let let_go = released == at && self.let_go[activation as usize];
                released <= at && !let_go && self.saved.is_absent(layer, activation)
            }
        };
        if !wanted {
            return Ok(None);
        }
        let category = match self.backward_at {
            None if kept => Category::Activation,
            _ => Category::Temporary,
        };
        let (dims, dtype) = self.shape(activation);
        Ok(Some(self.memory.lease(
            category,
            activation.name(),
            dims,
            dtype,
        )?))
    }

    /// Shape and type of an activation of this micro-batch.
    pub(crate) fn shape(&self, activation: Activation) -> (Dims, DType) {
        let (rows, seq) = (self.batch.rows, self.batch.seq);
        self.model.activation_shape(activation, rows, seq)
    }

    /// Files a stage's output for those who read it.
    pub(crate) fn put(&mut self, layer: usize, activation: Activation, buffer: Option<Buffer>) {
        if let Some(buffer) = buffer {
            self.saved.put(layer, activation, buffer);
        }
    }

    /// Runs a stage of the forward pass; of what no later stage reads, drops what is recomputed and sends away what is
    /// offloaded.
    pub(crate) fn forward_stage(&mut self, position: Position) -> Result<(), ModelError> {
        self.run_stage(position)?;
        let Position { layer, stage } = position;
        let model = self.model;
        for activation in model.table.last_used_by(stage) {
            match self.policy.action(layer, activation) {
                Action::Keep => {}
                Action::Recompute => self.saved.release(layer, activation),
                Action::Offload => self.send(layer, activation)?,
            }
        }
        Ok(())
    }

    /// Runs the backward pass of a stage and releases what it was the last to need.
    pub(crate) fn backward_stage<T>(
        &mut self,
        position: Position,
        run: impl FnOnce(&mut Self) -> Result<T, ModelError>,
    ) -> Result<T, ModelError> {
        self.backward_at = Some(position);
        self.let_go = Default::default();
        let result = run(self)?;
        let table = &self.model.table;
        for activation in table.activations() {
            if table.released_after(activation) == position.stage {
                self.saved.release(position.layer, activation);
            }
        }
        Ok(result)
    }

    /// Lets go of an activation before the end of the stage's backward pass, if no other stage needs it after that.
    pub(crate) fn release(&mut self, layer: usize, activation: Activation, buffer: Rc<Buffer>) {
        drop(buffer);
        if self.backward_at == Some(self.last_use(layer, activation)) {
            self.let_go[activation as usize] = true;
            self.saved.release(layer, activation);
        }
    }

    /// Takes an activation in the stage after whose backward pass it is released anyway, to overwrite it.
    pub(crate) fn take(
        &mut self,
        layer: usize,
        activation: Activation,
    ) -> Result<Buffer, ModelError> {
        assert_eq!(
            self.backward_at,
            Some(self.last_use(layer, activation)),
            "{} is needed after this stage",
            activation.name()
        );
        drop(self.pull(layer, activation)?);
        self.let_go[activation as usize] = true;
        Ok(self.saved.take(layer, activation))
    }

    /// The stage after whose backward pass an activation is released.
    fn last_use(&self, layer: usize, activation: Activation) -> Position {
        Position {
            layer,
            stage: self.model.table.released_after(activation),
        }
    }

    /// The stage that makes an activation.
    fn producer(&self, layer: usize, activation: Activation) -> Position {
        let at = |layer, stage| Position { layer, stage };
        match (layer, activation) {
            (0, Activation::X) => at(0, Stage::Embedding),
            (_, Activation::X) => at(layer - 1, Stage::MlpDown),
            _ => at(layer, self.model.table.producer(activation)),
        }
    }
}
