//! A trial on an open GPU: both kinds of kernels compute cases on random data, and what comes of them is compared.

use crate::kernel_trial::{BEGUN, Verdict};
use kernels::cuda::{BLOCKS_ENOUGH, Cuda, CudaDevice, CudaDriver, KernelKind};
use kernels::random::random_u32;
use kernels::{Fault, KernelError, Kernels};
use memory::DType::BF16;
use memory::{Buffer, Category, DType, Dims, In, Memory, OutOfMemory};
use std::fmt;
use std::io::Write;
use std::ops::Range;

/// The share of the terms' magnitudes by which two sums of the same terms, each exact in f32, may differ: tensor cores align the terms of a
/// block, and so lose up to a few units of the last place of the sum so far. It is a few times that for random terms.
pub(super) const OF_TERMS: f32 = 1.0 / 65_536.0;

/// The share of a result in bf16 that two roundings may differ by: each kind rounds by half a unit of its last place, together 2^-7 of it.
const OF_BF16: f32 = 1.0 / 128.0;

/// Random numbers begin again after so many: 4 times a prime, so that rows of a matrix are not alike.
const PERIOD: usize = 4 * 65_521;

pub(super) type Result<T, E = Stopped> = std::result::Result<T, E>;

/// Something that kernels of both kinds compute.
pub(super) trait Case: fmt::Display {
    /// Computes it, and looks at the results. Kernels for 8.0 do so first.
    fn results(&mut self, gpu: &TrialGpu) -> Result<Vec<Looked>>;
}

/// What elements of a result may differ by between kinds, beside roundings to bf16.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Tolerance {
    /// This.
    pub(super) absolute: f32,
    /// And this share of the largest of its row.
    pub(super) of_row: f32,
    /// So many elements are a row.
    pub(super) row: usize,
}

impl Tolerance {
    /// The same for all elements.
    pub(super) fn of_all(absolute: f32) -> Tolerance {
        Tolerance {
            absolute,
            of_row: 0.0,
            row: usize::MAX,
        }
    }
}

/// A result: bytes of some of its rows.
#[derive(PartialEq)]
pub(super) struct Looked {
    pub(super) what: &'static str,
    pub(super) dtype: DType,
    pub(super) parts: Vec<(Vec<u8>, Tolerance)>,
}

fn values(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let values = bytes.chunks_exact(dtype.size_in_bytes());
    let value = |bytes: &[u8]| {
        let mut whole = [0; 4];
        // A bf16 is the upper half of an f32.
        whole[4 - bytes.len()..].copy_from_slice(bytes);
        f32::from_le_bytes(whole)
    };
    values.map(value).collect()
}

impl Looked {
    /// The first element that is too far from that of the kernels for 8.0.
    pub(super) fn mistake(&self, right: &Looked) -> Option<String> {
        let of_bf16 = if self.dtype == BF16 { OF_BF16 } else { 0.0 };
        let of_row = |(is, right): (&[f32], &[f32]), bound: &Tolerance| {
            let largest = right.iter().fold(0f32, |most, value| most.max(value.abs()));
            let common = bound.absolute + bound.of_row * largest;
            let mut both = is.iter().zip(right);
            both.find_map(|(is, right)| {
                let bound = common + of_bf16 * is.abs().max(right.abs());
                let difference = (is - right).abs();
                let is_near = is == right || (difference.is_finite() && difference <= bound);
                (!is_near).then(|| {
                    format!(
                        "an element of {} is {is}, by the kernels for 8.0 {right}, and may differ by {bound:.1e}",
                        self.what
                    )
                })
            })
        };
        let mut parts = self.parts.iter().zip(&right.parts);
        parts.find_map(|((is, bound), (right, _))| {
            let [is, right] = [is, right].map(|bytes| values(self.dtype, bytes));
            let mut rows = is.chunks(bound.row).zip(right.chunks(bound.row));
            rows.find_map(|rows| of_row(rows, bound))
        })
    }
}

/// An open GPU with kernels of one kind.
pub(super) struct TrialGpu {
    memory: Memory,
    pub(super) kernels: Kernels<Cuda<CudaDriver>>,
}

impl TrialGpu {
    fn open(index: usize) -> Result<TrialGpu> {
        let device = CudaDevice::open(index)?;
        let memory = Memory::device(device.clone());
        let driver = CudaDriver::new(&device)?;
        let kernels = Cuda::new(driver, &memory, BF16)?;
        Ok(TrialGpu { memory, kernels })
    }

    /// With kernels of a kind, which compute as many tiles a block as so many blocks leave to each.
    fn by(self, kind: KernelKind, blocks_enough: usize) -> TrialGpu {
        let kernels = self.kernels.with_attention_by(kind).with_experts_by(kind);
        TrialGpu {
            kernels: kernels.with_blocks_enough(blocks_enough),
            ..self
        }
    }

    pub(super) fn room(&self, dtype: DType, dims: impl Into<Dims>) -> Result<Buffer> {
        let memory = &self.memory;
        Ok(memory.lease_persistent(Category::Temporary, "trial", dims, dtype)?)
    }

    /// Random numbers from -1 to 1.
    pub(super) fn random(&self, dtype: DType, dims: impl Into<Dims>, key: u64) -> Result<Buffer> {
        self.random_within(1.0, dtype, dims, key)
    }

    /// Random numbers up to `most`, a power of two, and as far below 0.
    pub(super) fn random_within(
        &self,
        most: f32,
        dtype: DType,
        dims: impl Into<Dims>,
        key: u64,
    ) -> Result<Buffer> {
        let mut buffer = self.room(dtype, dims)?;
        let unit = |at| random_u32(key, at) as i32 as f32 / (1u64 << 31) as f32;
        let numbers = (0..PERIOD as u64).map(|at| (most * unit(at)).to_le_bytes());
        let pattern: Vec<u8> = match dtype {
            BF16 => numbers.flat_map(|bytes| [bytes[2], bytes[3]]).collect(),
            _ => numbers.flatten().collect(),
        };
        self.kernels.fill_with(buffer.view_mut(), &pattern)?;
        Ok(buffer)
    }

    /// Whole numbers of a type with 4 bytes.
    pub(super) fn numbers(&self, dtype: DType, numbers: &[u32]) -> Result<Buffer> {
        let mut buffer = self.room(dtype, [numbers.len()])?;
        let bytes = numbers.iter().flat_map(|number| number.to_le_bytes());
        let bytes: Vec<u8> = bytes.collect();
        self.kernels.upload(buffer.view_mut(), &bytes)?;
        Ok(buffer)
    }

    /// Downloads some rows of a matrix.
    pub(super) fn look(
        &self,
        what: &'static str,
        of: In,
        rows: Vec<(Range<usize>, Tolerance)>,
    ) -> Result<Looked> {
        let read = |(rows, bound): (Range<usize>, Tolerance)| {
            let some = of.rows(rows);
            let mut bytes = vec![0; some.bytes()];
            self.kernels.download(&mut bytes, some)?;
            Ok((bytes, bound))
        };
        Ok(Looked {
            what,
            dtype: of.dtype(),
            parts: rows.into_iter().map(read).collect::<Result<_>>()?,
        })
    }
}

/// Why a result was not computed.
pub(super) enum Stopped {
    /// There was no memory for it.
    NoRoom(String),
    /// The device failed.
    Failed(String),
}

impl From<OutOfMemory> for Stopped {
    fn from(error: OutOfMemory) -> Stopped {
        Stopped::NoRoom(error.to_string())
    }
}

impl From<KernelError> for Stopped {
    fn from(error: KernelError) -> Stopped {
        match error.fault {
            Fault::DeviceFull => Stopped::NoRoom(error.to_string()),
            _ => Stopped::Failed(error.to_string()),
        }
    }
}

impl Stopped {
    /// What this says of kernels for 9.0.
    fn verdict(self, kind: KernelKind, case: &impl Case) -> Verdict {
        match (self, kind) {
            (Stopped::Failed(reason), KernelKind::Sm90) => {
                Verdict::Faulted(format!("{reason} ({case})"))
            }
            (Stopped::Failed(reason) | Stopped::NoRoom(reason), _) => Verdict::Untried(reason),
        }
    }
}

/// What comes of a trial of these cases on the GPU with this number.
pub(super) fn verdict<C: Case>(index: usize, cases: Vec<C>) -> Verdict {
    match TrialGpu::open(index) {
        Ok(gpu) => tried(gpu, cases).unwrap_or_else(|verdict| verdict),
        Err(Stopped::NoRoom(why) | Stopped::Failed(why)) => Verdict::Untried(why),
    }
}

/// Makes all cases, up to the first that speaks against the kernels.
fn tried<C: Case>(mut gpu: TrialGpu, cases: Vec<C>) -> Result<Verdict, Verdict> {
    use KernelKind::{Sm80, Sm90};
    for mut case in cases {
        let mut results = Vec::new();
        // The second time a block computes as many tiles of experts as it does of a large run: that changes no bit either.
        for (kind, blocks_enough) in [(Sm80, BLOCKS_ENOUGH), (Sm90, BLOCKS_ENOUGH), (Sm90, 1)] {
            gpu = gpu.by(kind, blocks_enough);
            if kind == Sm90 {
                // Whoever started this process reads it. If it cannot be written, nobody waits for it.
                let _ = writeln!(std::io::stderr(), "{BEGUN}");
            }
            let found = case.results(&gpu);
            results.push(found.map_err(|stopped| stopped.verdict(kind, &case))?);
        }
        let [right, first, second] = &results[..] else {
            unreachable!("three were computed");
        };
        let mut compared = first.iter().zip(right);
        if let Some(mistake) = compared.find_map(|(is, right)| is.mistake(right)) {
            return Err(Verdict::Wrong(format!("{mistake} ({case})")));
        }
        if let Some((result, _)) = first.iter().zip(second).find(|(one, other)| one != other) {
            return Err(Verdict::TwoResults(format!("{} ({case})", result.what)));
        }
    }
    Ok(Verdict::Passed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use memory::DType::F32;

    /// A row of one element, or of two of which the other is 1.
    fn looked(dtype: DType, value: f32, bound: Tolerance) -> Looked {
        let row = [value, 1.0];
        let bytes = row.iter().take(bound.row.min(2)).flat_map(|value| {
            let kept = 4 - dtype.size_in_bytes();
            value.to_le_bytes().into_iter().skip(kept)
        });
        Looked {
            what: "a result",
            dtype,
            parts: vec![(bytes.collect(), bound)],
        }
    }

    /// Two roundings to bf16 may be one unit of the last place apart; other elements as far as their bound says, and without one not at
    /// all.
    #[test]
    fn what_is_within_the_bound_is_no_mistake() {
        let of_terms = |terms: f32| Tolerance::of_all(OF_TERMS * terms / 4.0);
        let of_row = Tolerance {
            of_row: 1.0 / 64.0,
            row: 2,
            absolute: 0.0,
        };
        for (dtype, value, other, bound, wrong) in [
            (BF16, 1.0, 1.0 + 1.0 / 128.0, of_terms(64.0), false),
            (BF16, 1.0, 1.0 + 2.0 / 128.0, of_terms(64.0), true),
            (F32, 30.0, 30.01, of_terms(4096.0), false),
            (F32, 30.0, 30.1, of_terms(4096.0), true),
            (F32, 0.0, 1e-9, of_terms(0.0), true),
            (F32, 0.25, 0.25, of_terms(0.0), false),
            (F32, f32::NAN, 1.0, of_terms(4096.0), true),
            (F32, 1.0, f32::NAN, of_terms(4096.0), true),
            (F32, 0.1, 0.115, of_row, false),
            (F32, 0.1, 0.117, of_row, true),
            (F32, 0.1, f32::INFINITY, of_row, true),
        ] {
            let [is, right] = [value, other].map(|value| looked(dtype, value, bound));
            let mistake = is.mistake(&right);
            assert_eq!(mistake.is_some(), wrong, "{value} {other} {bound:?}");
        }
    }
}
