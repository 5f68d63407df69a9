//! Buffers: f32 beside weights of any type, used by stages, changed by no gradient, saved with the weights, and on every rank
//! as a whole.

use crate::common::harness::{Run, VOCAB, initial_values};
use bytemuck::cast_slice;
use files::{Disk, TensorSource, write_tensors};
use kernels::cpu::Cpu;
use kernels::operation::{BiasDropoutAdd, Fill};
use memory::{DType, Home, Homes, Layer, Layout, Memory, Rank, Role};
use model::stages::{Embedding, Head, Norm};
use model::{
    Activation, Architecture, Block, Extent, Initial, Io, Labels, Linear, ModelError, ModelWeights,
    OutgoingWeights, ParameterId, ParameterPart, Parameters, Pass, Policy, Stage, WeightsError,
};
use std::rc::Rc;
use units::{Ranks, Reduce, Weights, Zero};

const WIDTH: usize = 8;
const BUFFER: &str = "block.shift";

/// next x = x + a buffer.
struct Shift(ParameterId);

impl Stage for Shift {
    fn name(&self) -> &'static str {
        "shift"
    }

    fn io(&self) -> Io {
        Io {
            reads: vec![Activation::X],
            writes: vec![(Activation::NEXT_X, Extent::tokens(WIDTH))],
            ..Io::default()
        }
    }

    fn parameters(&self) -> Vec<ParameterId> {
        vec![self.0]
    }

    fn forward(&self, pass: &mut Pass) -> Result<(), ModelError> {
        let x = pass.pull(Activation::X)?;
        let mut out = pass.output(Activation::NEXT_X)?;
        if let Some(out) = &mut out {
            let value = 0.0;
            pass.kernels().run(Fill {
                out: out.view_mut(),
                value,
            })?;
            pass.kernels().run(BiasDropoutAdd {
                out: out.view_mut(),
                bias: Some(pass.parameter(self.0)),
                dropout: None,
                first: 0,
                scale: 1.0,
                residual: Some(x.view()),
            })?;
        }
        pass.put(Activation::NEXT_X, out);
        Ok(())
    }

    fn backward(&self, pass: &mut Pass) -> Result<(), ModelError> {
        assert!(
            pass.accumulate(self.0).is_none(),
            "a buffer has no gradient"
        );
        let dx = pass.gradient(Activation::NEXT_X);
        pass.file_gradient(Activation::X, dx);
        Ok(())
    }
}

fn architecture() -> Architecture {
    let mut parameters = Parameters::default();
    let mut first = parameters.of_part(Layer::Embedding, "");
    let embedding = Embedding::declare(&mut first, "embedding", [VOCAB, WIDTH]);
    let mut own = parameters.of_part(Layer::Block(0), "block.");
    let shift = own.buffer("shift", &[WIDTH], Initial::Zero);
    let mut last = parameters.of_part(Layer::Head, "");
    let head = Head {
        norm: Norm::rms(&mut last, "norm", WIDTH, 1e-5),
        linear: Linear::declare(&mut last, "head", [VOCAB, WIDTH], false),
        logit_multiplier: 1.0,
        cap: None,
    };
    let stages: [Box<dyn Stage>; 1] = [Box::new(Shift(shift))];
    let blocks = vec![Block::new(WIDTH, stages)];
    Architecture::new(Labels::DENSE, parameters, Box::new(embedding), blocks, head)
}

fn layout(ranks: Option<usize>) -> Layout {
    architecture()
        .parameters
        .layout_for(ranks, None, |_, _| false)
}

#[test]
fn a_buffer_is_used_and_never_trained() {
    let policy = Policy::keep_all(1);
    let layout = layout(None);
    let index = layout.find(BUFFER).unwrap();
    let entry = &layout.entries()[index];
    assert_eq!(
        (entry.role, index),
        (Role::Buffer, layout.entries().len() - 1)
    );
    let outcome = Run::on_cpu(architecture(), &policy).train(3);
    let initial = initial_values(index, BUFFER, WIDTH);
    let initial: Vec<u32> = initial.into_iter().map(f32::to_bits).collect();
    assert!(outcome.weights.ends_with(&initial));
    let mut shifted = Run::on_cpu(architecture(), &policy);
    shifted.set(index, &[1.0; WIDTH]);
    assert_ne!(shifted.train(3).losses, outcome.losses);
    let planned = Run::on_shapes(architecture(), &policy).train(3);
    assert_eq!(planned.peak_bytes, outcome.peak_bytes);
}

#[test]
fn wherever_weights_live_a_buffer_is_whole_and_f32() {
    for (home, zero) in [
        (Home::Device, None),
        (Home::Pinned, None),
        (Home::Device, Some(Zero::States)),
        (Home::Device, Some(Zero::Weights)),
        (Home::Pinned, Some(Zero::Weights)),
    ] {
        let ranks = zero.map(|zero| Ranks {
            rank: Rank { number: 1, of: 2 },
            stage: Rank::ALONE,
            sharing: 1,
            parts_each: 1,
            zero,
            bucket_bytes: 1 << 20,
            reduce: Reduce::MicroBatch,
            overlap_grad_reduce: true,
            overlap_param_gather: true,
            reshard_after_forward: true,
            shard_group: None,
        });
        let name = format!("{home:?} {zero:?}");
        let homes = Homes {
            weights: home,
            ..Homes::default()
        };
        let memory = Memory::host();
        let kernels = Cpu::new(&memory, DType::BF16).unwrap();
        let layout = Rc::new(layout(ranks.as_ref().map(|ranks| ranks.rank.of)));
        let index = layout.find(BUFFER).unwrap();
        let range = layout.entries()[index].range();
        let leased = Weights::lease(&memory, &layout, DType::BF16, &homes, ranks.as_ref());
        let mut weights = leased.unwrap();
        let values = [0.1f32; WIDTH];
        weights
            .store(&kernels, range.clone(), cast_slice(&values))
            .unwrap();
        let mut read = [0f32; WIDTH];
        let bytes = bytemuck::cast_slice_mut(&mut read);
        weights.read(&kernels, range.clone(), bytes).unwrap();
        assert_eq!(read, values, "{name}");
        assert_eq!(weights.view(index).slice::<f32>(), values, "{name}");
        assert_eq!(weights.dtype_of(&range), DType::F32);
        assert_eq!(weights.dtype_of(&layout.entries()[0].range()), DType::BF16);
        assert_eq!(
            weights.held().rows(&range).map(|rows| rows.len()),
            Some(WIDTH)
        );
        assert!(weights.padding_is_zero());
    }
    let layout = layout(Some(2));
    let owners = Rank::all(2).map(|rank| layout.own(rank).within_all(&layout.buffers()).elements());
    assert!(owners.eq([256, 0]), "one rank saves it");
}

#[test]
fn files_have_buffers_as_f32() {
    let architecture = architecture();
    let (parameters, layout) = (architecture.parameters, layout(None));
    let value = |element: usize| 1.0 + element as f32 / 4096.0;
    let arena: Vec<f32> = (0..layout.elements()).map(value).collect();
    let dtypes: Vec<DType> = parameters
        .in_layout()
        .map(|one| one.dtype(DType::BF16))
        .collect();
    let source = OutgoingWeights::new(&parameters, DType::BF16, |index, elements| {
        let values = &arena[layout.entries()[index].range()][elements];
        Ok(files::narrow(values, dtypes[index].into()))
    });
    assert_eq!(source.tensors().len(), layout.entries().len());
    let folder = tempfile::tempdir().unwrap();
    write_tensors(&Disk, folder.path(), "model", &source, u64::MAX).unwrap();
    let weights = ModelWeights::open(folder.path(), &parameters).unwrap();
    assert_eq!(weights.dtype(), DType::BF16);
    let mut read = vec![0.0; layout.elements()];
    let set = |part: ParameterPart| -> Result<(), WeightsError> {
        let ParameterPart::Values(offset, values) = part else {
            unreachable!("the layout has no codes");
        };
        read[offset..offset + values.len()].copy_from_slice(values);
        Ok(())
    };
    weights.read(&layout, &layout.all(), set).unwrap();
    for entry in layout.entries() {
        let is_exact = read[entry.range()] == arena[entry.range()];
        assert_eq!(is_exact, entry.role == Role::Buffer, "{}", entry.name);
    }
}
