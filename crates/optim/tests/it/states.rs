//! States by name: saved, restored bit by bit, and converted between formats.

use crate::common::{Saved, Training, trained};
use kernels::split::round_to_24_bits;
use memory::DType;
use optim::{MasterFormat, MomentFormat, RestoreError};

const MOMENTS: [MomentFormat; 3] = [
    MomentFormat::F32,
    MomentFormat::Bf16,
    MomentFormat::Quantised,
];
const MASTERS: [MasterFormat; 4] = [
    MasterFormat::F32,
    MasterFormat::Remainder,
    MasterFormat::RemainderByte,
    MasterFormat::None,
];

#[test]
fn a_restored_run_goes_on_with_the_same_bits() {
    for dtype in [DType::F32, DType::BF16] {
        for moments in MOMENTS {
            for master in MASTERS {
                let mut first = trained((dtype, moments, master));
                let saved = first.save();
                let mut second = Training::new((dtype, moments, master));
                assert_ne!(second.save(), saved, "steps change states");
                second.restore(&first, &saved).unwrap();
                let name = format!("{dtype:?} {moments:?} {master:?}");
                assert!(second.save() == saved, "{name}: restored");
                first.steps([4]);
                second.steps([4]);
                let (expected, actual) = (first.save(), second.save());
                assert!(expected != saved, "{name}: the step changes states");
                assert!(second.weights.padding_is_zero(), "{name}: padding");
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
        let saved = trained((DType::BF16, moments, master)).save();
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
    let formats = |moments| (DType::BF16, moments, MasterFormat::F32);
    let quantised = trained(formats(MomentFormat::Quantised));
    let saved = quantised.save();
    let mut plain = Training::new(formats(MomentFormat::F32));
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
    let mut back = Training::new(formats(MomentFormat::Quantised));
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

/// Masters of either exact format give the same f32; of 24 bits, the nearest; without one, the weights are all there is.
#[test]
fn masters_convert() {
    let first = trained((DType::BF16, MomentFormat::F32, MasterFormat::F32));
    let saved = first.save();
    let mut split = Training::new((DType::BF16, MomentFormat::F32, MasterFormat::Remainder));
    split.restore(&first, &saved).unwrap();
    let mut back = Training::new((DType::BF16, MomentFormat::F32, MasterFormat::F32));
    back.restore(&split, &split.save()).unwrap();
    assert_eq!(back.save(), saved);
    assert!(back.weights() == first.weights());
    let masters = |saved: &Saved| floats(&saved["large.master"]);
    let format = (DType::BF16, MomentFormat::F32, MasterFormat::RemainderByte);
    let mut byte = Training::new(format);
    byte.restore(&split, &split.save()).unwrap();
    assert_eq!(byte.save()["large.remainder"].0, DType::U8);
    back.restore(&byte, &byte.save()).unwrap();
    let rounded: Vec<f32> = masters(&saved).into_iter().map(round_to_24_bits).collect();
    assert_ne!(rounded, masters(&saved));
    assert_eq!(masters(&back.save()), rounded);
    assert!(back.weights() == byte.weights() && byte.weights() != first.weights());
    let mut again = Training::new(format);
    again.restore(&back, &back.save()).unwrap();
    assert!(again.save() == byte.save() && again.weights() == byte.weights());
    let mut none = Training::new((DType::BF16, MomentFormat::F32, MasterFormat::None));
    none.restore(&first, &saved).unwrap();
    assert!(none.weights() == first.weights());
    back.restore(&none, &none.save()).unwrap();
    assert_ne!(masters(&back.save()), masters(&saved));
    assert!(
        masters(&back.save())
            .iter()
            .all(|value| value.to_bits() << 16 == 0)
    );
}

#[test]
fn what_is_missing_or_misfits_is_named() {
    let masters = [MasterFormat::Remainder, MasterFormat::RemainderByte];
    for (moments, master) in MOMENTS
        .into_iter()
        .flat_map(|one| masters.map(|master| (one, master)))
    {
        let formats = (DType::BF16, moments, master);
        let first = trained(formats);
        for (name, state) in first.save() {
            let mut saved = first.save();
            saved.remove(&name);
            let error = Training::new(formats).restore(&first, &saved);
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
            let error = Training::new(formats).restore(&first, &saved).unwrap_err();
            assert!(
                matches!(error, RestoreError::Misfit { .. }),
                "{name}: {error}"
            );
        }
    }
}
