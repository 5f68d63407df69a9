//! The loss of preferences, with its gradient.

use crate::case::Case;
use crate::compare::{Expected, Rule};
use crate::device::Device;
use crate::host::Host;
use kernels::KernelError;
use memory::DType;

#[derive(Debug)]
struct Preference {
    pairs: usize,
    /// Largest of the sums' random entries.
    range: f64,
    /// Added to the reference's sum of every chosen sequence.
    shift: f64,
    beta: f32,
    scale: f32,
}

impl Preference {
    /// The sums under the model and under the reference, and the scale.
    fn tensors(&self) -> [Host; 3] {
        let count = [2 * self.pairs];
        let reference = Host::random(DType::F32, count, self.range, 2).values();
        let shift = [self.shift, 0.0].into_iter().cycle();
        let reference = reference.into_iter().zip(shift);
        [
            Host::random(DType::F32, count, self.range, 1),
            Host::new(DType::F32, count, reference.map(|(sum, shift)| sum + shift)),
            Host::new(DType::F32, [1], [f64::from(self.scale)]),
        ]
    }

    /// The marks of each pair, and its factor.
    fn oracle(&self) -> Vec<([f64; 4], f64)> {
        let [policy, reference, _] = self.tensors().map(|host| host.values());
        let (beta, scale) = (f64::from(self.beta), f64::from(self.scale));
        let of = |pair: usize| {
            let reward = |sequence: usize| beta * (reference[sequence] - policy[sequence]);
            let (chosen, rejected) = (reward(2 * pair), reward(2 * pair + 1));
            let doubt = (rejected - chosen).exp();
            let preferred = f64::from(u8::from(chosen > rejected));
            let marks = [doubt.ln_1p(), chosen, rejected, preferred];
            (marks, scale * beta * doubt / (1.0 + doubt))
        };
        (0..self.pairs).map(of).collect()
    }
}

impl Case for Preference {
    fn run(&self, device: &Device) -> Result<Vec<Host>, KernelError> {
        let [policy, reference, scale] = self.tensors().map(|host| device.put(&host));
        let mut factors = device.room(DType::F32, [2 * self.pairs]);
        let mut marks = device.room(DType::F32, [4, self.pairs]);
        device.run(kernels::PreferenceLoss {
            factors: factors.view_mut(),
            marks: marks.view_mut(),
            policy: policy.view(),
            reference: reference.view(),
            scale: scale.view(),
            beta: self.beta,
        })?;
        let marks = device.take(&marks);
        let values = marks.values();
        let rows = values.chunks(self.pairs.max(1));
        let rows = rows.map(|row| Host::new(DType::F32, [self.pairs], row.to_vec()));
        Ok([device.take(&factors)].into_iter().chain(rows).collect())
    }

    fn expected(&self) -> Vec<Expected> {
        let pairs = self.oracle();
        let factors = pairs.iter().flat_map(|(_, factor)| [*factor, -factor]);
        let row = |row: usize| pairs.iter().map(|(marks, _)| marks[row]).collect();
        vec![
            Expected::new("preference: factors", factors.collect(), Rule::Standard),
            Expected::new("preference: losses", row(0), Rule::Standard),
            Expected::new("preference: chosen", row(1), Rule::Standard),
            Expected::new("preference: rejected", row(2), Rule::Standard),
            Expected::new("preference: preferred", row(3), Rule::Exact),
        ]
    }
}

/// Margins near zero, and pairs alone that are as good as decided, whose small numbers no other entry dwarfs.
pub fn cases(_: DType) -> Vec<Box<dyn Case>> {
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    for (pairs, range, shift) in [
        (1, 3.0, 0.0),
        (1, 1.0, 150.0),
        (1, 1.0, -150.0),
        (37, 30.0, 0.0),
        (300, 3.0, 1.0),
    ] {
        for (beta, scale) in [(0.1, 1.0 / 8.0), (0.5, 1.0)] {
            cases.push(Box::new(Preference {
                pairs,
                range,
                shift,
                beta,
                scale,
            }));
        }
    }
    cases
}
