//! States by name: saved, restored bit by bit, and converted between formats.

use kernels::Kernels;
use kernels::cpu::Cpu;
use memory::{Arena, Category, DType, Layout, LayoutBuilder, Memory};
use optim::{
    AdamW, Hyperparameters, MasterFormat, MomentFormat, RestoreError, SavedState, StepNumbers,
    download_f32,
};
use std::collections::BTreeMap;
use std::rc::Rc;

const MOMENTS: [MomentFormat; 3] = [
    MomentFormat::F32,
    MomentFormat::Bf16,
    MomentFormat::Quantised,
];
const MASTERS: [MasterFormat; 3] = [
    MasterFormat::F32,
    MasterFormat::Remainder,
    MasterFormat::None,
];

/// Precise and quantisable matrices and vectors, none of them a whole number of blocks.
fn layout() -> Rc<Layout> {
    let mut builder = LayoutBuilder::default();
    let shapes: [(&str, &[usize]); 5] = [
        ("embed", &[70, 90]),
        ("small", &[5, 7]),
        ("large", &[90, 60]),
        ("norm", &[60]),
        ("bias", &[5001]),
    ];
    for (name, shape) in shapes {
        builder.add(name, shape);
    }
    Rc::new(builder.build_precise(|name, elements| name == "embed" || elements < 4096))
}

/// An optimizer with its weights.
struct Training {
    kernels: Cpu,
    memory: Memory,
    layout: Rc<Layout>,
    parameters: Arena,
    gradients: Arena,
    optimizer: AdamW,
}

/// What was saved, by name.
type Saved = BTreeMap<String, (DType, Vec<u8>)>;

fn noise(seed: usize, index: usize) -> f32 {
    let random = kernels::random::random_u32(seed as u64, index as u64);
    random as f32 / u32::MAX as f32 - 0.5
}

impl Training {
    fn new(dtype: DType, formats: (MomentFormat, MasterFormat)) -> Training {
        let (memory, layout) = (Memory::host(), layout());
        let kernels = Cpu::new(&memory, DType::F32).unwrap();
        let lease =
            |category, name, dtype| Arena::lease(&memory, category, name, &layout, dtype).unwrap();
        let hyperparameters = Hyperparameters {
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            clip_norm: 1.0,
        };
        let optimizer =
            AdamW::lease(&memory, &layout, dtype, formats, hyperparameters, None).unwrap();
        let mut training = Training {
            parameters: lease(Category::Parameter, "parameters", dtype),
            gradients: lease(Category::Gradient, "gradients", DType::F32),
            kernels,
            memory: memory.clone(),
            layout: layout.clone(),
            optimizer,
        };
        for entry in layout.entries() {
            let values: Vec<f32> = entry.range().map(|index| noise(1, index)).collect();
            let (optimizer, parameters) = (&mut training.optimizer, &mut training.parameters);
            optimizer
                .set_weights(&training.kernels, parameters, entry.offset, &values)
                .unwrap();
        }
        training
    }

    fn step(&mut self, step: usize) {
        for entry in self.layout.entries() {
            let values: Vec<f32> = entry.range().map(|at| noise(100 + step, at)).collect();
            let bytes: Vec<u8> = values
                .iter()
                .flat_map(|value| value.to_le_bytes())
                .collect();
            let out = self.gradients.flat_mut(entry.range());
            self.kernels.upload(out, &bytes).unwrap();
        }
        let loss = self
            .memory
            .lease(Category::Temporary, "loss", [1], DType::F32)
            .unwrap();
        let numbers = StepNumbers {
            step,
            update: step,
            learning_rate: 1e-2,
            seed: 3,
        };
        let (parameters, gradients) = (&mut self.parameters, &self.gradients);
        let (optimizer, kernels) = (&mut self.optimizer, &self.kernels);
        let begun = optimizer.begin(kernels, parameters, gradients, loss.view(), numbers);
        begun.unwrap();
        optimizer.finish(kernels, parameters, gradients).unwrap();
    }

    fn save(&self) -> Saved {
        let entries = 0..self.layout.entries().len();
        let states = entries.flat_map(|index| self.optimizer.named_states(index));
        let bytes = states.map(|state| {
            let size = state.view.elements() * state.view.dtype().size_in_bytes();
            let mut bytes = vec![0; size];
            self.kernels.download(&mut bytes, state.view).unwrap();
            (state.name, (state.view.dtype(), bytes))
        });
        bytes.collect()
    }

    fn weights(&self) -> Vec<u32> {
        let values = self.parameters.flat(0..self.layout.elements());
        let values = download_f32(&self.kernels, values).unwrap();
        values.into_iter().map(f32::to_bits).collect()
    }

    /// The weights of `other`, and the states that were saved.
    fn restore(&mut self, other: &Training, saved: &Saved) -> Result<(), RestoreError> {
        let weights: Vec<f32> = other.weights().into_iter().map(f32::from_bits).collect();
        let find = |name: &str| {
            let (dtype, bytes) = saved.get(name)?;
            Some(SavedState {
                dtype: *dtype,
                bytes,
            })
        };
        for (index, entry) in self.layout.entries().iter().enumerate() {
            let (optimizer, parameters) = (&mut self.optimizer, &mut self.parameters);
            let weights = &weights[entry.range()];
            optimizer.set_weights(&self.kernels, parameters, entry.offset, weights)?;
            optimizer.restore(&self.kernels, parameters, index, &find)?;
        }
        Ok(())
    }
}

/// Three steps in a format.
fn trained(dtype: DType, formats: (MomentFormat, MasterFormat)) -> Training {
    let mut training = Training::new(dtype, formats);
    (1..=3).for_each(|step| training.step(step));
    training
}

#[test]
fn a_restored_run_goes_on_with_the_same_bits() {
    for dtype in [DType::F32, DType::BF16] {
        for moments in MOMENTS {
            for master in MASTERS {
                let mut first = trained(dtype, (moments, master));
                let saved = first.save();
                let mut second = Training::new(dtype, (moments, master));
                assert_ne!(second.save(), saved, "steps change states");
                second.restore(&first, &saved).unwrap();
                let name = format!("{dtype:?} {moments:?} {master:?}");
                assert!(second.save() == saved, "{name}: restored");
                first.step(4);
                second.step(4);
                let (expected, actual) = (first.save(), second.save());
                assert!(expected != saved, "{name}: the step changes states");
                assert!(second.parameters.padding_is_zero(), "{name}: padding");
                let differ = |name: &&String| actual[*name] != expected[*name];
                let differ: Vec<&String> = expected.keys().filter(differ).collect();
                assert!(differ.is_empty(), "{name}: {differ:?} after a step");
                assert!(second.weights() == first.weights(), "{name}: weights");
            }
        }
    }
}

#[test]
fn states_have_the_names_of_their_format() {
    let names = |moments, master| -> Vec<String> {
        let saved = trained(DType::BF16, (moments, master)).save();
        let of = |name: &&String| name.starts_with("embed.") || name.starts_with("large.");
        saved.keys().filter(of).cloned().collect()
    };
    assert_eq!(
        names(MomentFormat::Quantised, MasterFormat::Remainder),
        [
            "embed.first_moment",
            "embed.remainder",
            "embed.second_moment",
            "large.first_moment.absmax",
            "large.first_moment.codes",
            "large.remainder",
            "large.second_moment.absmax",
            "large.second_moment.codes",
        ]
    );
    assert_eq!(
        names(MomentFormat::Bf16, MasterFormat::F32),
        [
            "embed.first_moment",
            "embed.master",
            "embed.second_moment",
            "large.first_moment",
            "large.master",
            "large.second_moment",
        ]
    );
    assert_eq!(names(MomentFormat::F32, MasterFormat::None).len(), 4);
}

fn floats((dtype, bytes): &(DType, Vec<u8>)) -> Vec<f32> {
    assert_eq!(*dtype, DType::F32);
    let words = bytes.chunks_exact(4);
    words
        .map(|word| f32::from_le_bytes(word.try_into().unwrap()))
        .collect()
}

/// 8-bit states restored as f32 are what their codes stand for; and f32 ones restored as 8-bit are quantised.
#[test]
fn quantised_moments_convert_to_f32_and_back() {
    use kernels::quantise::{BLOCK, SIGNED, UNSIGNED};
    let formats = |moments| (moments, MasterFormat::F32);
    let quantised = trained(DType::BF16, formats(MomentFormat::Quantised));
    let saved = quantised.save();
    let mut plain = Training::new(DType::BF16, formats(MomentFormat::F32));
    plain.restore(&quantised, &saved).unwrap();
    let widened = plain.save();
    for (map, kind) in [(&SIGNED, "first_moment"), (&UNSIGNED, "second_moment")] {
        for name in ["large", "bias"] {
            let (_, codes) = &saved[&format!("{name}.{kind}.codes")];
            let absmax = floats(&saved[&format!("{name}.{kind}.absmax")]);
            let values = floats(&widened[&format!("{name}.{kind}")]);
            assert_eq!(values.len(), codes.len());
            assert!(values.iter().any(|value| *value != 0.0));
            for (index, (value, code)) in values.iter().zip(codes).enumerate() {
                let expected = map.values[usize::from(*code)] * absmax[index / BLOCK];
                assert_eq!(*value, expected, "{name}.{kind} {index}");
            }
        }
        // What never was quantised stays as it was.
        let name = format!("embed.{kind}");
        assert_eq!(widened[&name], saved[&name]);
    }
    let mut back = Training::new(DType::BF16, formats(MomentFormat::Quantised));
    back.restore(&plain, &widened).unwrap();
    let again = back.save();
    for (name, state) in &saved {
        // There is no code for -1, so a block of the first moment may get another scale.
        if !name.contains("first_moment.") {
            assert_eq!(again[name], *state, "{name}");
        }
    }
    assert_eq!(again.len(), saved.len());
}

/// Masters of either format give the same f32; without one, the weights are all there is.
#[test]
fn masters_convert() {
    let first = trained(DType::BF16, (MomentFormat::F32, MasterFormat::F32));
    let saved = first.save();
    let mut split = Training::new(DType::BF16, (MomentFormat::F32, MasterFormat::Remainder));
    split.restore(&first, &saved).unwrap();
    let mut back = Training::new(DType::BF16, (MomentFormat::F32, MasterFormat::F32));
    back.restore(&split, &split.save()).unwrap();
    assert_eq!(back.save(), saved);
    assert!(back.weights() == first.weights());
    let mut none = Training::new(DType::BF16, (MomentFormat::F32, MasterFormat::None));
    none.restore(&first, &saved).unwrap();
    assert!(none.weights() == first.weights());
    back.restore(&none, &none.save()).unwrap();
    let masters = |saved: &Saved| floats(&saved["large.master"]);
    assert_ne!(masters(&back.save()), masters(&saved));
    assert!(
        masters(&back.save())
            .iter()
            .all(|value| value.to_bits() << 16 == 0)
    );
}

#[test]
fn what_is_missing_or_misfits_is_named() {
    for moments in MOMENTS {
        let formats = (moments, MasterFormat::Remainder);
        let first = trained(DType::BF16, formats);
        for (name, state) in first.save() {
            let mut saved = first.save();
            saved.remove(&name);
            let error = Training::new(DType::BF16, formats).restore(&first, &saved);
            // Without a remainder, the weights are taken as they are.
            assert_eq!(error.is_err(), !name.ends_with("remainder"), "{name}");
            if let Err(error) = error {
                let parameter = name.split('.').next().unwrap();
                assert!(
                    matches!(&error, RestoreError::Missing(missing) if missing.starts_with(parameter))
                );
            }
            let mut saved = first.save();
            let short = state.1[..state.1.len() - 1].to_vec();
            saved.insert(name.clone(), (state.0, short));
            let error = Training::new(DType::BF16, formats)
                .restore(&first, &saved)
                .unwrap_err();
            assert!(
                matches!(error, RestoreError::Misfit { .. }),
                "{name}: {error}"
            );
        }
    }
}
