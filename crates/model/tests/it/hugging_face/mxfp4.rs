//! Experts in MXFP4, as gpt-oss is published, against transformers (`benches/peers/mxfp4_reference.py`).

use crate::hugging_face::folders::{Tensors, tensors, written};
use crate::hugging_face::transposed_experts::{
    EXPERTS, MODULE, adapter, block, floats, in_folder, lora, read,
};
use files::Dtype;
use kernels::quantise::{BlockScale, dequantise_block};
use memory::{Codes, DType};
use model::{AdapterWeights, Lora, ModelWeights, ParameterPart, Parameters, WeightsError};
use std::collections::BTreeMap;

const HIDDEN: usize = 64;
const FFN: usize = 32;
const SIZES: [usize; 2] = [HIDDEN, FFN];

/// Matrices with their outputs and inputs, and the seed of the script.
const MATRICES: [(&str, [usize; 2], u64); 2] = [
    ("gate_up_proj", [2 * FFN, HIDDEN], 5),
    ("down_proj", [HIDDEN, FFN], 7),
];

/// The bytes of the script.
fn hashed(count: usize, seed: u64) -> Vec<u8> {
    let byte = |place: u64| ((((place + seed) * 2_654_435_761) % (1 << 32)) >> 24) as u8;
    (0..count as u64).map(byte).collect()
}

fn quantised() -> Tensors {
    let mut all = Tensors::new();
    for (name, [outputs, inputs], seed) in MATRICES {
        let blocks = EXPERTS * outputs * inputs / 32;
        let exponent = |byte: u8| match byte {
            0..64 => [0, 1, 2, 252][usize::from(byte % 4)],
            _ => 120 + byte % 16,
        };
        let exponents = hashed(blocks, seed + 1).into_iter().map(exponent);
        let shape = vec![EXPERTS, outputs, inputs / 32];
        let codes = [&shape[..], &[16]].concat();
        let name = format!("{MODULE}.{name}");
        all.insert(
            format!("{name}_blocks"),
            (Dtype::U8, codes, hashed(16 * blocks, seed)),
        );
        all.insert(
            format!("{name}_scales"),
            (Dtype::U8, shape, exponents.collect()),
        );
        let bias = vec![1.5f32; EXPERTS * outputs];
        let bias = bias.iter().flat_map(|value| value.to_le_bytes()).collect();
        all.insert(
            format!("{name}_bias"),
            (Dtype::F32, vec![EXPERTS, outputs], bias),
        );
    }
    all
}

fn coded() -> Parameters {
    let base = Some(Codes::Mxfp4);
    Parameters::adapted(Lora { base, ..lora() })
}

#[test]
fn a_folder_is_widened_to_the_bits_of_transformers() {
    let folder = written(quantised());
    let (parameters, layout) = block(Parameters::default(), SIZES);
    let weights = ModelWeights::open(folder.path(), &parameters).unwrap();
    let plain = in_folder(&weights.converted(DType::BF16));
    let widened = tensors(plain.path());
    for (name, shape, crc) in [
        ("gate_up_proj", vec![EXPERTS, HIDDEN, 2 * FFN], 0x8f00_bed2),
        ("down_proj", vec![EXPERTS, FFN, HIDDEN], 0x2e27_18f0),
    ] {
        let (dtype, found, bytes) = &widened[&format!("{MODULE}.{name}")];
        assert_eq!((*dtype, found), (Dtype::BF16, &shape));
        assert_eq!(crc32fast::hash(bytes), crc, "{name}");
    }
    // What is trained has the same values as the plain folder.
    let of_plain = ModelWeights::open(plain.path(), &parameters).unwrap();
    assert!(read(&weights, &layout) == read(&of_plain, &layout));
    assert!(weights.fingerprint().unwrap() != of_plain.fingerprint().unwrap());
}

/// Codes and exponents of the rows of memory: gate's, then up's.
#[test]
fn codes_are_handed_over_in_the_order_of_memory() {
    let stored = quantised();
    let folder = written(stored.clone());
    let (parameters, layout) = block(coded(), SIZES);
    let weights = ModelWeights::open(folder.path(), &parameters).unwrap();
    let mut found: BTreeMap<usize, Vec<u8>> = BTreeMap::new();
    let set = |part: ParameterPart| -> Result<(), WeightsError> {
        if let ParameterPart::Codes(entry, part) = part {
            let places = Codes::Mxfp4.places(layout.entries()[entry].elements());
            let matrix = found.entry(entry).or_insert(vec![0; places.bytes]);
            matrix[part.first..part.first + part.bytes.len()].copy_from_slice(part.bytes);
        }
        Ok(())
    };
    weights.read(&layout, &layout.all(), set).unwrap();
    assert_eq!(found.len(), 2);
    let (plain, plain_layout) = block(Parameters::default(), SIZES);
    let values = ModelWeights::open(folder.path(), &plain).unwrap();
    let values = read(&values, &plain_layout);
    for (entry, bytes) in found {
        let entry = &layout.entries()[entry];
        let [_, outputs, inputs] = entry.shape[..] else {
            panic!("experts have three sizes");
        };
        let places = Codes::Mxfp4.places(entry.elements());
        let (codes, exponents) = (&bytes[places.codes], &bytes[places.absmax_codes]);
        let of_files = |end: &str, row: usize, bytes: usize| {
            let all = &stored[&format!("{}{end}", entry.name)].2;
            all[row * bytes..(row + 1) * bytes].to_vec()
        };
        for row in 0..EXPERTS * outputs {
            let (expert, output) = (row / outputs, row % outputs);
            let there = match entry.name.ends_with("gate_up_proj") {
                true => output % FFN * 2 + output / FFN,
                false => output,
            };
            let there = expert * outputs + there;
            let (own, of_block) = (inputs / 2, inputs / 32);
            assert_eq!(
                codes[row * own..(row + 1) * own],
                of_files("_blocks", there, own)
            );
            assert_eq!(
                exponents[row * of_block..(row + 1) * of_block],
                of_files("_scales", there, of_block)
            );
        }
        let mut widened = vec![0.0; entry.elements()];
        let blocks = widened.chunks_mut(32).zip(codes.chunks(16));
        for ((own, codes), exponent) in blocks.zip(exponents) {
            dequantise_block(codes, BlockScale::Exponent(*exponent), own);
        }
        let index = plain_layout.find(&entry.name).unwrap();
        assert!(widened == values[plain_layout.entries()[index].range()]);
    }
}

/// Adapters on codes are merged into a folder of codes, and into one with their values.
#[test]
fn adapters_are_added_to_the_values_of_codes() {
    let mut folder = quantised();
    for (_, (_, _, bytes)) in folder
        .iter_mut()
        .filter(|(name, _)| name.ends_with("_scales"))
    {
        // Near 1, so that sums are finite and the factors count.
        bytes
            .iter_mut()
            .for_each(|exponent| *exponent = 120 + *exponent % 16);
    }
    let folder = written(folder);
    let (base, _) = block(Parameters::default(), SIZES);
    let (adapted, _) = block(coded(), SIZES);
    let weights = ModelWeights::open(folder.path(), &base).unwrap();
    let plain = in_folder(&weights.converted(DType::BF16));
    let factors = tempfile::tempdir().unwrap();
    adapter(factors.path(), SIZES);
    let adapters = AdapterWeights::read(factors.path(), &adapted).unwrap();
    let merged = |weights: &ModelWeights| {
        let folder = in_folder(&adapters.merged_with(weights, DType::F32, DType::BF16));
        tensors(folder.path())
    };
    let of_codes = merged(&weights);
    assert!(of_codes == merged(&ModelWeights::open(plain.path(), &base).unwrap()));
    let name = format!("{MODULE}.gate_up_proj");
    let before = floats(&tensors(plain.path())[&name]);
    assert_ne!(floats(&of_codes[&name]), before);
}

#[test]
fn hostile_folders_get_a_sentence() {
    let refused = |words: &[&str], change: &dyn Fn(&mut Tensors)| {
        let mut all = quantised();
        change(&mut all);
        let folder = written(all);
        for parameters in [Parameters::default(), coded()] {
            let (parameters, layout) = block(parameters, SIZES);
            let opened = ModelWeights::open(folder.path(), &parameters);
            let set = |_: ParameterPart| Ok::<(), WeightsError>(());
            let read = opened.and_then(|weights| weights.read(&layout, &layout.all(), set));
            let error = read.unwrap_err().to_string();
            for word in words {
                assert!(error.contains(word), "{word}: {error}");
            }
        }
    };
    let name = |end: &str| format!("{MODULE}.gate_up_proj_{end}");
    refused(&["gate_up_proj_scales", "exponent 253"], &|all| {
        *all.get_mut(&name("scales")).unwrap().2.last_mut().unwrap() = 253;
    });
    refused(
        &[
            "gate_up_proj_blocks` has codes in MXFP4",
            "gate_up_proj_scales`, are missing",
        ],
        &|all| {
            all.remove(&name("scales"));
        },
    );
    let wrong =
        "gate_up_proj_blocks` is U8 of [2, 64, 2, 16]; the model needs U8 of [3, 64, 2, 16]";
    refused(&[wrong], &|all| {
        let (_, shape, bytes) = all.get_mut(&name("blocks")).unwrap();
        shape[0] -= 1;
        bytes.truncate(2 * 64 * 32);
    });
    refused(&["gate_up_proj_scales` is I8 of [3, 64, 2]"], &|all| {
        all.get_mut(&name("scales")).unwrap().0 = Dtype::I8;
    });
}

/// Experts that are plain in a folder of codes stay plain: nobody asked to make codes of them.
#[test]
fn plain_experts_among_codes_are_named() {
    let folder = written(quantised());
    let (plain, _) = block(Parameters::default(), SIZES);
    let weights = ModelWeights::open(folder.path(), &plain).unwrap();
    let widened = in_folder(&weights.converted(DType::BF16));
    let name = format!("{MODULE}.down_proj");
    let mut all = quantised();
    all.retain(|other, _| !other.starts_with(&name) || other.ends_with("_bias"));
    all.insert(name.clone(), tensors(widened.path())[&name].clone());
    let folder = written(all);
    let (parameters, _) = block(coded(), SIZES);
    let error = ModelWeights::open(folder.path(), &parameters).unwrap_err();
    let error = error.to_string();
    assert!(
        error.contains(&name) && error.contains("lora.base_skip"),
        "{error}"
    );
    assert!(ModelWeights::open(folder.path(), &plain).is_ok());
}
