//! A call of an operation, and what it must give.

use crate::DTYPES;
use crate::compare::Expected;
use crate::device::{Device, computing};
use crate::host::Host;
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

/// Runs a case and judges its outputs: for each its name, and its worst error as a share of what is allowed.
pub fn judge(case: &dyn Case, device: &Device) -> Vec<(&'static str, f64)> {
    let (outputs, expected) = (run(case, device), case.expected());
    assert_eq!(outputs.len(), expected.len(), "{case:?}");
    let judged = outputs.iter().zip(expected).map(|(output, expected)| {
        let expected = expected.on(device.kernels.target());
        let share = expected.judge(output).unwrap_or_else(|message| {
            panic!(
                "`{}` of {case:?} on {}: {message}",
                expected.name, device.name
            )
        });
        (expected.name, share)
    });
    judged.collect()
}

/// Judges every case on every implementation that computes. Memory is poisoned: outputs are fully written.
pub fn conform(cases: Cases) {
    for dtype in DTYPES {
        for device in computing(dtype) {
            device.memory.set_poison(true);
            let mut worst: BTreeMap<&str, f64> = BTreeMap::new();
            for case in cases(dtype) {
                for (name, share) in judge(case.as_ref(), &device) {
                    let largest = worst.entry(name).or_default();
                    *largest = largest.max(share);
                }
            }
            for (name, share) in worst {
                println!(
                    "{}: {name}: {:.1} % of the allowed error",
                    device.name,
                    100.0 * share
                );
            }
        }
    }
}
