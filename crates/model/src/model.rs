//! A model: configuration, layout, tables; runs micro-batches.

use crate::gradients::Gradients;
use crate::parameters::ParameterIds;
use crate::pass::{Beside, Pass};
use crate::policy::Policy;
use crate::saved::Saved;
use crate::stage::{Activation, ReplayCounts};
use crate::table::{Attention, StageTable};
use crate::{ModelConfig, rope};
use kernels::{Init, KernelError, Kernels};
use memory::{Arena, Buffer, Category, DType, Dims, Layer, Layout, Memory, OutOfMemory};
use std::rc::Rc;

/// Why a pass could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A lease was refused.
    #[error(transparent)]
    OutOfMemory(#[from] OutOfMemory),
    /// An operation was called wrongly, or the device failed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

/// A micro-batch in device memory.
pub struct Batch {
    /// Sequences.
    pub rows: usize,
    /// Tokens in each.
    pub seq: usize,
    /// `[rows seq]` i32, each within the vocabulary.
    pub input_ids: Buffer,
    /// `[rows seq]` i32; negative: masked.
    pub targets: Buffer,
}

impl Batch {
    /// Leases and uploads a micro-batch of `rows` sequences of `seq` tokens.
    ///
    /// # Errors
    /// [`ModelError`] if memory is refused or the slices have other lengths.
    pub fn upload(
        memory: &Memory,
        kernels: &dyn Kernels,
        (rows, seq): (usize, usize),
        input_ids: &[i32],
        targets: &[i32],
    ) -> Result<Batch, ModelError> {
        let send = |name, data: &[i32]| -> Result<Buffer, ModelError> {
            let mut buffer = memory.lease(Category::Input, name, [rows * seq], DType::I32)?;
            kernels.upload(buffer.view_mut(), bytemuck::cast_slice(data))?;
            Ok(buffer)
        };
        Ok(Batch {
            rows,
            seq,
            input_ids: send("input_ids", input_ids)?,
            targets: send("targets", targets)?,
        })
    }
}

/// What the micro-batches of one step add up.
pub struct StepTotals<'a> {
    /// `[1]` f32: sum of the losses of all targets so far.
    pub loss: &'a mut Buffer,
    /// Replays so far.
    pub replayed: &'a mut ReplayCounts,
    /// Whether nothing has been added yet.
    pub is_first: bool,
    /// Gradients are multiplied by this: 1 / targets of the whole step.
    pub gradient_scale: f32,
}

/// A decoder-only transformer.
pub struct Model {
    pub(crate) config: ModelConfig,
    pub(crate) layout: Rc<Layout>,
    pub(crate) ids: ParameterIds,
    /// `[2, s, head_dim / 2]` f32: cosines, sines.
    pub(crate) rope: Buffer,
    pub(crate) dtype: DType,
    pub(crate) head_chunk: usize,
    pub(crate) attention: Attention,
    pub(crate) table: StageTable,
}

impl Model {
    /// A model with parameters in a layout made from its configuration ([`crate::layout`]), for sequences of `seq`
    /// tokens, that computes in `dtype` and with this kind of attention, and runs its head in chunks of `head_chunk`
    /// tokens.
    ///
    /// # Errors
    /// [`ModelError`] if the rotary table does not fit.
    pub fn new(
        config: ModelConfig,
        layout: Rc<Layout>,
        memory: &Memory,
        kernels: &dyn Kernels,
        seq: usize,
        dtype: DType,
        head_chunk: usize,
        attention: Attention,
    ) -> Result<Model, ModelError> {
        let table = StageTable::new(config.qk_norm, attention);
        let ids = ParameterIds::new(&config, &layout);
        let shape = [2, seq, config.head_dim / 2];
        let mut rope =
            memory.lease_persistent(Category::Parameter, "rotary_table", shape, DType::F32)?;
        if !rope.is_shape() {
            kernels.upload(
                rope.view_mut(),
                bytemuck::cast_slice(&rope::table(&config, seq)),
            )?;
        }
        Ok(Model {
            config,
            layout,
            ids,
            rope,
            dtype,
            head_chunk,
            attention,
            table,
        })
    }

    /// The configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Where each parameter lies.
    pub fn layout(&self) -> &Rc<Layout> {
        &self.layout
    }

    /// Compute type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Shape and type of an activation for `rows` sequences of `seq` tokens.
    pub fn activation_shape(
        &self,
        activation: Activation,
        rows: usize,
        seq: usize,
    ) -> (Dims, DType) {
        let config = &self.config;
        let tokens = rows * seq;
        match activation {
            Activation::X | Activation::H1 | Activation::X2 | Activation::H2 => {
                (Dims::from([tokens, config.hidden]), self.dtype)
            }
            Activation::Rstd1 | Activation::Rstd2 => (Dims::from([tokens]), DType::F32),
            Activation::Q | Activation::QRaw | Activation::O => {
                (Dims::from([tokens, config.q_width()]), self.dtype)
            }
            Activation::K | Activation::KRaw | Activation::V => {
                (Dims::from([tokens, config.kv_width()]), self.dtype)
            }
            Activation::Lse => (Dims::from([rows, config.heads, seq]), DType::F32),
            Activation::Probs => (Dims::from([rows, config.heads, seq, seq]), self.dtype),
            Activation::Gate | Activation::Up | Activation::Act => {
                (Dims::from([tokens, config.ffn]), self.dtype)
            }
        }
    }

    /// The matrices that each part reads first, in forward order: the embedding, the blocks, the head. By their index in
    /// the layout; a tied embedding is the first part's.
    pub fn matrices_by_part(&self) -> Vec<(Layer, Vec<usize>)> {
        let ids = &self.ids;
        let blocks = ids.blocks.iter().enumerate().map(|(index, block)| {
            let attention = [block.q_proj, block.k_proj, block.v_proj, block.o_proj];
            let mlp = [block.gate_proj, block.up_proj, block.down_proj];
            let matrices = attention.into_iter().chain(mlp).collect();
            (Layer::Block(index), matrices)
        });
        let head = [ids.lm_head]
            .into_iter()
            .filter(|id| *id != ids.embed_tokens);
        let mut parts = vec![(Layer::Embedding, vec![ids.embed_tokens])];
        parts.extend(blocks);
        parts.push((Layer::Head, head.collect()));
        parts
    }

    /// What its stages read and write.
    pub fn table(&self) -> &StageTable {
        &self.table
    }

    /// Forward and backward of one micro-batch: adds its loss to the totals and its gradients to `gradients`. `saved`
    /// is empty before and after, whatever happens.
    ///
    /// # Errors
    /// [`ModelError`] if a lease is refused; the step is then lost, the parameters are not. Copies that were under way
    /// are done when it returns.
    pub fn forward_backward(
        &self,
        memory: &Memory,
        kernels: &dyn Kernels,
        parameters: &mut Arena,
        gradients: &mut Gradients,
        policy: &Policy,
        saved: &mut Saved,
        beside: &mut dyn Beside,
        batch: &Batch,
        totals: &mut StepTotals,
    ) -> Result<(), ModelError> {
        let mut pass = Pass {
            kernels,
            memory,
            model: self,
            parameters,
            gradients,
            policy,
            beside,
            batch,
            saved,
            replayed: ReplayCounts::default(),
            backward_at: None,
            let_go: Default::default(),
        };
        let outcome = pass.forward_backward(totals);
        let replayed = pass.replayed;
        totals.replayed.add_all(&replayed);
        if outcome.is_err() {
            saved.abandon(kernels)?;
        }
        outcome
    }
}

impl Pass<'_> {
    fn forward_backward(&mut self, totals: &mut StepTotals) -> Result<(), ModelError> {
        self.forward()?;
        let init = if totals.is_first {
            Init::Overwrite
        } else {
            Init::Accumulate
        };
        let dx = self.head(totals.loss, init, totals.gradient_scale)?;
        self.beside.before_backward()?;
        self.backward(dx)?;
        totals.is_first = false;
        assert!(
            self.saved.is_empty(),
            "every activation is released by the last stage that needs it"
        );
        Ok(())
    }
}
