//! A call of an operation, and what it must give.

use crate::DTYPES;
use crate::compare::Expected;
use crate::device::Device;
use crate::host::Host;
use crate::poison::clean_and_poisoned;
use kernels::KernelError;
use memory::DType;
use std::collections::BTreeMap;
use std::fmt::Debug;

/// A call on inputs that follow from its fields, which tell it apart.
pub trait Case: Debug {
    /// Calls the operation and returns its outputs.
    fn run(&self, device: &Device) -> Result<Vec<Host>, KernelError>;

    /// What the oracle expects of the outputs.
    fn expected(&self) -> Vec<Expected>;
}

/// The cases of some operations for a compute type.
pub type Cases = fn(DType) -> Vec<Box<dyn Case>>;

/// Runs a case that must be accepted.
pub fn run(case: &dyn Case, device: &Device) -> Vec<Host> {
    case.run(device)
        .unwrap_or_else(|error| panic!("{case:?} on {}: {error}", device.name))
}

/// The worst error of each output by its name, as a share of what is allowed.
type Shares = Vec<(&'static str, f64)>;

/// Runs a case on devices and judges its outputs.
pub fn judge(case: &dyn Case, devices: &[Device]) {
    let expected = case.expected();
    for device in devices {
        judge_outputs(case, device, &run(case, device), &expected);
    }
}

fn judge_outputs(
    case: &dyn Case,
    device: &Device,
    outputs: &[Host],
    expected: &[Expected],
) -> Shares {
    assert_eq!(outputs.len(), expected.len(), "{case:?}");
    let judged = outputs.iter().zip(expected).map(|(output, expected)| {
        let judged = expected.judge(output, device.kernels.target());
        let share = judged.unwrap_or_else(|message| {
            panic!(
                "`{}` of {case:?} on {}: {message}",
                expected.name, device.name
            )
        });
        (expected.name, share)
    });
    judged.collect()
}

/// Judges every case on every implementation that computes, on poisoned memory: outputs are fully written. What was in
/// the memory before changes no bit.
pub fn conform(cases: Cases) {
    for dtype in DTYPES {
        let pairs = clean_and_poisoned(dtype);
        let mut worst: BTreeMap<(&str, &str), f64> = BTreeMap::new();
        for case in cases(dtype) {
            let expected = case.expected();
            for [clean, poisoned] in &pairs {
                let outputs = run(case.as_ref(), poisoned);
                for (name, share) in judge_outputs(case.as_ref(), poisoned, &outputs, &expected) {
                    let largest = worst.entry((&poisoned.name, name)).or_default();
                    *largest = largest.max(share);
                }
                let same = run(case.as_ref(), clean) == outputs;
                assert!(same, "{case:?} on {}: poison shows", clean.name);
            }
        }
        for ((device, name), share) in worst {
            println!(
                "{device}: {name}: {:.1} % of the allowed error",
                100.0 * share
            );
        }
    }
}
