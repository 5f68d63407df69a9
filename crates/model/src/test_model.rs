//! A small model on the CPU, for tests of its passes.

use crate::{
    Architecture, Attention, Batch, BatchShape, CachedSequences, Computation, DeferredGradients,
    DrawingOrder, Fresh, HeadLoss, Model, ModelConfig, Policy, Purpose, SavedActivations, StepLoss,
    Training, Work, initialise,
};
use kernels::Kernels;
use kernels::cpu::Cpu;
use memory::{Buffer, Category, DType, Home, Homes, Memory};
use std::rc::Rc;
use units::{Gradients, Weights};

const SHAPE: BatchShape = BatchShape { rows: 2, seq: 5 };

/// Two blocks of Llama, with everything that a micro-batch needs.
pub(crate) struct TestModel {
    pub(crate) memory: Memory,
    pub(crate) model: Model,
    pub(crate) weights: Weights,
    pub(crate) gradients: Gradients,
    pub(crate) saved: SavedActivations,
    pub(crate) kernels: Box<Kernels>,
    batch: Batch,
    loss: Buffer,
    scale: Buffer,
}

impl TestModel {
    /// Makes a model that recomputes by this specification.
    pub(crate) fn new(recompute: &str) -> TestModel {
        let text = r#"{"hidden": 8, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 4, "ffn": 12, "vocab": 17}"#;
        let config: ModelConfig = serde_json::from_str(text).unwrap();
        let policy = Policy::with_layers(config.labels(), recompute, &Default::default(), 2);
        let architecture = Architecture::of(&config, Attention::Eager);
        let (memory, dtype) = (Memory::host(), DType::F32);
        let kernels: Box<Kernels> = Box::new(Cpu::new(&memory, dtype).unwrap());
        let layout = Rc::new(architecture.parameters.layout(|_, _| false));
        let parameters = architecture.parameters.clone();
        let mut weights = Weights::lease(&memory, &layout, dtype, &Homes::default(), None).unwrap();
        let fresh = Fresh {
            deviation: 0.3,
            seed: 1,
        };
        initialise(
            &parameters,
            &layout,
            fresh,
            DrawingOrder::Any,
            |offset, values| {
                let range = offset..offset + values.len();
                weights.store(&*kernels, range, bytemuck::cast_slice(values))
            },
        )
        .unwrap();
        let saved = architecture.lease_saved(
            &memory,
            dtype,
            &policy.unwrap(),
            (SHAPE, &[crate::HeldBlocks::all(architecture.blocks.len())]),
        );
        let computation = Computation {
            dtype,
            seq: SHAPE.seq,
            head_chunk: 4,
        };
        let model = Model::new(
            architecture,
            layout.clone(),
            &memory,
            &*kernels,
            computation,
        );
        let ids: Vec<i32> = (0..SHAPE.tokens() as i32).collect();
        let lease = |name| memory.lease_persistent(Category::Input, name, [1], dtype);
        let mut scale = lease("scale").unwrap();
        let targets = [1.0 / SHAPE.tokens() as f32];
        kernels
            .upload(scale.view_mut(), bytemuck::cast_slice(&targets))
            .unwrap();
        TestModel {
            gradients: Gradients::lease(&memory, &layout, dtype, &Home::Device, None).unwrap(),
            batch: Batch::upload(&memory, &*kernels, SHAPE, &ids, &ids).unwrap(),
            loss: lease("loss").unwrap(),
            scale,
            saved: saved.unwrap(),
            model: model.unwrap(),
            weights,
            kernels,
            memory,
        }
    }

    /// Runs a function with the work of a training step that may be stopped.
    pub(crate) fn train<T>(
        &mut self,
        is_stopped: &dyn Fn() -> bool,
        run: impl for<'w> FnOnce(&'w Model, Work<'w>) -> T,
    ) -> T {
        self.train_deferring(is_stopped, None, run)
    }

    /// As [`TestModel::train`], with a place for deferred gradients.
    pub(crate) fn train_deferring<T>(
        &mut self,
        is_stopped: &dyn Fn() -> bool,
        deferred: Option<&mut DeferredGradients>,
        run: impl for<'w> FnOnce(&'w Model, Work<'w>) -> T,
    ) -> T {
        self.gradients.begin_step();
        let training = Training {
            gradients: &mut self.gradients,
            optimizer: None,
            is_first_micro_batch: true,
            is_last_micro_batch: true,
            losses: vec![StepLoss {
                sums: self.loss.view_mut(),
                are_first: [true; 4],
                micro_batches: 1,
                gradient_scale: self.scale.view(),
                of_head: HeadLoss::NextTokens,
            }],
            deferred,
            is_stopped,
        };
        let work = Work {
            memory: &self.memory,
            kernels: &*self.kernels,
            weights: &mut self.weights,
            order: Rc::default(),
            saved: &mut self.saved,
            layers: 0..self.model.layers(),
            batches: std::slice::from_ref(&self.batch),
            purpose: Purpose::Training(training),
        };
        run(&self.model, work)
    }

    /// Runs a function with the work of a forward pass.
    pub(crate) fn infer<T>(&mut self, run: impl for<'w> FnOnce(&'w Model, Work<'w>) -> T) -> T {
        let cached: Option<CachedSequences> = None;
        let work = Work {
            memory: &self.memory,
            kernels: &*self.kernels,
            weights: &mut self.weights,
            order: Rc::default(),
            saved: &mut self.saved,
            layers: 0..self.model.layers(),
            batches: std::slice::from_ref(&self.batch),
            purpose: Purpose::Inference(cached),
        };
        run(&self.model, work)
    }
}
