//! Experts whose matrices files have as inputs by outputs, gate and up alternating, with a tensor of biases (gpt-oss).

use crate::hugging_face::folders::{Tensors, tensors, written};
use files::{Disk, Dtype, TensorSource, narrow, write_tensors};
use memory::{DType, Layer, Layout};
use model::stages::ExpertLinear;
use model::{
    AdapterTarget, AdapterWeights, DrawingOrder, Fresh, Lora, ModelWeights, OutgoingWeights,
    ParameterPart, Parameters, Stored, WeightsError, initialise,
};
use std::path::Path;

pub const EXPERTS: usize = 3;
const HIDDEN: usize = 5;
const FFN: usize = 3;
pub const MODULE: &str = "model.layers.0.mlp.experts";

fn declared(parameters: Parameters) -> (Parameters, Layout) {
    block(parameters, [HIDDEN, FFN])
}

/// Gate and up, and the way down, of the experts of a block.
pub fn block(mut parameters: Parameters, [hidden, ffn]: [usize; 2]) -> (Parameters, Layout) {
    let mut own = parameters.of_part(Layer::Block(0), "model.layers.0.");
    for (name, [outputs, inputs], is_interleaved) in [
        ("mlp.experts.gate_up_proj", [2 * ffn, hidden], true),
        ("mlp.experts.down_proj", [hidden, ffn], false),
    ] {
        let stored = Stored::ExpertsTransposed { is_interleaved };
        ExpertLinear::declare(&mut own, name, [EXPERTS, outputs, inputs], stored);
        own.expert_vectors(&format!("{name}_bias"), [EXPERTS, outputs], is_interleaved);
    }
    let layout = parameters.layout(|_, _| false);
    (parameters, layout)
}

/// The place in memory of each element of a file's tensor.
fn places(name: &str) -> Vec<usize> {
    let mut places = Vec::new();
    for expert in 0..EXPERTS {
        let [inputs, outputs] = match name.contains("gate_up") {
            true => [HIDDEN, 2 * FFN],
            false => [FFN, HIDDEN],
        };
        let inputs = if name.ends_with("_bias") { 1 } else { inputs };
        for input in 0..inputs {
            for output in 0..outputs {
                let own = match name.contains("gate_up") {
                    true => output % 2 * FFN + output / 2,
                    false => output,
                };
                places.push((expert * outputs + own) * inputs + input);
            }
        }
    }
    places
}

/// Every element is its place in the arena, and exact in bf16.
fn arena(layout: &Layout) -> Vec<f32> {
    (0..layout.elements())
        .map(|place| (place % 251) as f32)
        .collect()
}

fn outgoing<'a>(
    parameters: &'a Parameters,
    layout: &'a Layout,
    arena: &'a [f32],
    dtype: DType,
) -> impl TensorSource + 'a {
    OutgoingWeights::new(parameters, dtype, move |index, elements| {
        let values = &arena[layout.entries()[index].range()][elements];
        Ok(narrow(values, dtype.into()))
    })
}

pub fn in_folder(source: &dyn TensorSource) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    write_tensors(&Disk, folder.path(), "model", source, u64::MAX).unwrap();
    folder
}

pub fn floats((dtype, _, bytes): &(Dtype, Vec<usize>, Vec<u8>)) -> Vec<f32> {
    let mut values = Vec::new();
    files::widen(*dtype, bytes, &mut values);
    values
}

pub fn read(weights: &ModelWeights, layout: &Layout) -> Vec<f32> {
    let mut arena = vec![0.0; layout.elements()];
    let set = |part: ParameterPart| -> Result<(), WeightsError> {
        let ParameterPart::Values(first, values) = part else {
            unreachable!("the layout has no codes");
        };
        arena[first..first + values.len()].copy_from_slice(values);
        Ok(())
    };
    weights.read(layout, &layout.all(), set).unwrap();
    arena
}

#[test]
fn files_have_each_element_in_its_place() {
    let (parameters, layout) = declared(Parameters::default());
    let arena = arena(&layout);
    for dtype in [DType::F32, DType::BF16] {
        let folder = in_folder(&outgoing(&parameters, &layout, &arena, dtype));
        let found = tensors(folder.path());
        for (name, shape) in [
            ("gate_up_proj", vec![EXPERTS, HIDDEN, 2 * FFN]),
            ("gate_up_proj_bias", vec![EXPERTS, 2 * FFN]),
            ("down_proj", vec![EXPERTS, FFN, HIDDEN]),
            ("down_proj_bias", vec![EXPERTS, HIDDEN]),
        ] {
            let name = format!("{MODULE}.{name}");
            assert_eq!(found[&name].1, shape, "{name}");
            let entry = &layout.entries()[layout.find(&name).unwrap()];
            let own = &arena[entry.range()];
            let expected: Vec<f32> = places(&name).into_iter().map(|place| own[place]).collect();
            assert_eq!(expected == own, name.ends_with("down_proj_bias"), "{name}");
            assert_eq!(floats(&found[&name]), expected, "{name}");
        }
        let weights = ModelWeights::open(folder.path(), &parameters).unwrap();
        let back = read(&weights, &layout);
        for entry in layout.entries() {
            assert_eq!(back[entry.range()], arena[entry.range()], "{}", entry.name);
        }
        // From file to file, in both types.
        for to in [DType::F32, DType::BF16] {
            let expected = in_folder(&outgoing(&parameters, &layout, &arena, to));
            let converted = in_folder(&weights.converted(to));
            assert!(tensors(converted.path()) == tensors(expected.path()));
        }
    }
}

/// The vectors of all experts are one vector, as biases are.
#[test]
fn biases_are_vectors() {
    let (parameters, _) = declared(Parameters::default());
    let shapes = parameters.in_layout().map(|one| one.shape.len());
    assert_eq!(shapes.collect::<Vec<_>>(), [3, 3, 1, 1]);
}

#[test]
fn fresh_weights_are_known_again() {
    let (parameters, layout) = declared(Parameters::default());
    let fresh = Fresh {
        deviation: 0.5,
        seed: 3,
    };
    let mut arena = vec![0.0; layout.elements()];
    initialise(
        &parameters,
        &layout,
        fresh,
        DrawingOrder::Any,
        |first, values| {
            arena[first..first + values.len()].copy_from_slice(values);
            Ok::<_, ()>(())
        },
    )
    .unwrap();
    let folder = in_folder(&outgoing(&parameters, &layout, &arena, DType::F32));
    let weights = ModelWeights::open(folder.path(), &parameters).unwrap();
    assert!(weights.are_fresh(fresh).unwrap());
    let name = format!("{MODULE}.gate_up_proj");
    let other = written(with(tensors(folder.path()), |all| {
        all.get_mut(&name).unwrap().2.rotate_left(4);
    }));
    let weights = ModelWeights::open(other.path(), &parameters).unwrap();
    assert!(!weights.are_fresh(fresh).unwrap());
}

fn with(mut tensors: Tensors, change: impl FnOnce(&mut Tensors)) -> Tensors {
    change(&mut tensors);
    tensors
}

const RANK: usize = 2;
const SCALE: f32 = 4.0;

/// Adapters on all experts.
pub fn lora() -> Lora {
    Lora {
        rank: RANK,
        alpha: f64::from(SCALE) * RANK as f64,
        targets: vec![
            AdapterTarget::new("experts.gate_up_proj").unwrap(),
            AdapterTarget::new("experts.down_proj").unwrap(),
        ],
        ..Lora::default()
    }
}

/// Factors under PEFT's names, in its order: `A [rank experts, inputs]`, expert by expert, and `B [outputs, rank experts]`, rank by
/// rank. Outputs are those of the file.
pub fn adapter(folder: &Path, [hidden, ffn]: [usize; 2]) -> Tensors {
    let mut all = Tensors::new();
    for (wrapper, outputs, inputs) in [(".base_layer", 2 * ffn, hidden), ("", hidden, ffn)] {
        for (factor, shape) in [
            ("lora_A", vec![RANK * EXPERTS, inputs]),
            ("lora_B", vec![outputs, RANK * EXPERTS]),
        ] {
            let name = format!("base_model.model.{MODULE}{wrapper}.{factor}.weight");
            let value = |at: usize| (at * at % 17) as f32 / 8.0;
            let bytes = (0..shape.iter().product()).flat_map(|at| value(at).to_le_bytes());
            all.insert(name, (Dtype::F32, shape, bytes.collect()));
        }
    }
    let source = crate::hugging_face::folders::listed(&all);
    write_tensors(&Disk, folder, "adapter_model", &source, u64::MAX).unwrap();
    all
}

/// As PEFT 0.21.2 merges `target_parameters` of experts that say `is_transposed`.
#[test]
fn adapters_are_added_as_peft_adds_them() {
    let (base, base_layout) = declared(Parameters::default());
    let (adapted, _) = declared(Parameters::adapted(lora()));
    let arena = arena(&base_layout);
    let folder = in_folder(&outgoing(&base, &base_layout, &arena, DType::F32));
    let factors_folder = tempfile::tempdir().unwrap();
    let factors = adapter(factors_folder.path(), [HIDDEN, FFN]);
    let weights = ModelWeights::open(folder.path(), &base).unwrap();
    let adapters = AdapterWeights::read(factors_folder.path(), &adapted).unwrap();
    let merged = in_folder(&adapters.merged_with(&weights, DType::F32, DType::F32));
    let (before, after) = (tensors(folder.path()), tensors(merged.path()));
    for (name, wrapper, outputs, inputs) in [
        ("gate_up_proj", ".base_layer", 2 * FFN, HIDDEN),
        ("down_proj", "", HIDDEN, FFN),
    ] {
        let factor = |factor: &str| {
            floats(&factors[&format!("base_model.model.{MODULE}{wrapper}.{factor}.weight")])
        };
        let (a, b) = (factor("lora_A"), factor("lora_B"));
        let name = format!("{MODULE}.{name}");
        let mut expected = floats(&before[&name]);
        for (at, value) in expected.iter_mut().enumerate() {
            let (expert, input, output) =
                (at / outputs / inputs, at / outputs % inputs, at % outputs);
            let terms = (0..RANK).map(|rank| {
                let a = a[(expert * RANK + rank) * inputs + input];
                a * b[output * RANK * EXPERTS + rank * EXPERTS + expert]
            });
            *value += SCALE * terms.sum::<f32>();
        }
        assert_eq!(floats(&after[&name]), expected, "{name}");
        let bias = format!("{name}_bias");
        assert!(after[&bias] == before[&bias]);
    }
    // The factors are written as they were read.
    let read = model::AdapterFactors::read(factors_folder.path(), &adapted).unwrap();
    let again = in_folder(&read.outgoing(DType::F32));
    assert!(tensors(again.path()) == factors);
}
