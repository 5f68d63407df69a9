//! Products of experts by both kinds of kernels, on random data: one expert with as many rows as any can have, one without, one with a
//! single row, and others with few; rows in order, and found by a table; weights by rows and by columns; gradients in either type, new
//! and added.
//!
//! Factors are bf16 between -1 and 1, so their products are exact in f32, and a sum of n of them differs between two orders by what f32
//! rounds: tensor cores align the terms of a block, and so lose up to a few units of the last place of the sum so far. [`OF_TERMS`] of
//! n / 4, the mean sum of the terms' magnitudes, is a few times that for random terms, and less than a usual term. A result in bf16 is
//! rounded once more by each kind: half a unit of its last place each, together up to 2^-7 of it.

use crate::kernel_trial::{BEGUN, ELEMENTS_MAX, ExpertWidths, Verdict};
use kernels::cuda::{BLOCKS_ENOUGH, Cuda, CudaDevice, CudaDriver, KernelKind};
use kernels::operation::{ExpertRows, GroupedGradient, GroupedMatmul};
use kernels::random::random_u32;
use kernels::{Fault, Init, KernelError, Kernels};
use memory::DType::{BF16, F32, I32};
use memory::{Buffer, Category, DType, Dims, In, Memory, OutOfMemory};
use std::fmt;
use std::io::Write;
use std::ops::Range;

/// The share of the terms' magnitudes that sums in two orders may differ by.
const OF_TERMS: f32 = 1.0 / 65_536.0;

/// The share of a result in bf16 that two roundings may differ by.
const OF_BF16: f32 = 1.0 / 128.0;

/// Random numbers begin again after so many: 4 times a prime, so that rows of a matrix are not alike.
const PERIOD: usize = 4 * 65_521;

/// Rows of the experts that follow the first three: up to this, less 1.
const FEW: usize = 61;

type Result<T, E = Stopped> = std::result::Result<T, E>;

type CudaKernels = Kernels<Cuda<CudaDriver>>;

/// What kernels of both kinds compute.
#[derive(Clone, Copy, Debug)]
struct Case {
    inputs: usize,
    outputs: usize,
    form: Form,
}

#[derive(Clone, Copy, Debug)]
enum Form {
    /// `out = x weights^T`.
    Product { by_table: bool },
    /// `dx = dy weights`.
    InputGradient { by_table: bool },
    /// `dweights = dy^T x`.
    WeightGradient {
        dtype: DType,
        accumulates: bool,
        /// Whether tables find the rows of `dy`, and those of `x`.
        by_table: [bool; 2],
    },
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Case {
            inputs, outputs, ..
        } = self;
        let table = |by_table: bool| if by_table { " by a table" } else { "" };
        match self.form {
            Form::Product { by_table } => {
                write!(
                    f,
                    "product of {inputs} x {outputs}, rows{}",
                    table(by_table)
                )
            }
            Form::InputGradient { by_table } => write!(
                f,
                "gradient of the input of {inputs} x {outputs}, rows{}",
                table(by_table)
            ),
            Form::WeightGradient {
                dtype,
                accumulates,
                by_table: [dy, x],
            } => write!(
                f,
                "{} gradient of weights of {inputs} x {outputs}{}, dy{}, x{}",
                dtype.as_str(),
                if accumulates { ", added" } else { "" },
                table(dy),
                table(x)
            ),
        }
    }
}

/// All cases of a run: each size has every form, and all combinations are there over two sizes.
fn cases(widths: &ExpertWidths) -> Vec<Case> {
    let of = |(number, [inputs, outputs]): (usize, [usize; 2])| {
        let other = number % 2 == 1;
        let gradient = |dtype, accumulates, by_table| Form::WeightGradient {
            dtype,
            accumulates,
            by_table,
        };
        let forms = [
            Form::Product { by_table: !other },
            Form::InputGradient { by_table: other },
            gradient(F32, other, [other, !other]),
            gradient(BF16, !other, [other, other]),
        ];
        forms.map(|form| Case {
            inputs,
            outputs,
            form,
        })
    };
    widths
        .products()
        .into_iter()
        .enumerate()
        .flat_map(of)
        .collect()
}

/// Rows of each expert.
fn rows_of_experts(widths: &ExpertWidths) -> Vec<usize> {
    let few = |expert: usize| ((29 * expert + 7) % FEW).min(widths.rows);
    let rows = [widths.rows, 0, 1].into_iter().chain((3..).map(few));
    rows.take(widths.experts).collect()
}

/// A result: bytes of some of its rows, and how many terms their sums have.
#[derive(PartialEq)]
struct Looked {
    dtype: DType,
    parts: Vec<(Vec<u8>, usize)>,
}

impl Looked {
    fn values(&self) -> impl Iterator<Item = (f32, usize)> {
        let is_bf16 = self.dtype == BF16;
        self.parts.iter().flat_map(move |(bytes, terms)| {
            let values = bytes.chunks_exact(if is_bf16 { 2 } else { 4 });
            values.map(move |bytes| {
                let mut whole = [0; 4];
                // A bf16 is the upper half of an f32.
                whole[4 - bytes.len()..].copy_from_slice(bytes);
                (f32::from_le_bytes(whole), *terms)
            })
        })
    }

    /// The first element that is too far from that of the kernels for 8.0.
    fn mistake(&self, right: &Looked) -> Option<String> {
        let of_bf16 = if self.dtype == BF16 { OF_BF16 } else { 0.0 };
        let mut both = self.values().zip(right.values());
        both.find_map(|((is, terms), (right, _))| {
            let bound = OF_TERMS * terms as f32 / 4.0 + of_bf16 * is.abs().max(right.abs());
            let is_near = is == right || (is - right).abs() <= bound;
            (!is_near).then(|| {
                format!("an element is {is}, by the kernels for 8.0 {right}, and may differ by {bound:.1e}")
            })
        })
    }
}

/// A trial on an open GPU.
struct Trial<'a> {
    memory: Memory,
    widths: &'a ExpertWidths,
    /// Rows of each expert.
    rows: Vec<usize>,
}

impl Trial<'_> {
    fn ranges(&self) -> impl Iterator<Item = Range<usize>> {
        self.rows.iter().scan(0, |start, rows| {
            let range = *start..*start + rows;
            *start = range.end;
            Some(range)
        })
    }

    fn count(&self) -> usize {
        self.rows.iter().sum()
    }

    fn room(&self, dtype: DType, dims: impl Into<Dims>) -> Result<Buffer> {
        let memory = &self.memory;
        Ok(memory.lease_persistent(Category::Temporary, "trial", dims, dtype)?)
    }

    /// Random numbers from -1 to 1.
    fn random(
        &self,
        kernels: &CudaKernels,
        dtype: DType,
        dims: impl Into<Dims>,
        key: u64,
    ) -> Result<Buffer> {
        let mut buffer = self.room(dtype, dims)?;
        let unit = |at| random_u32(key, at) as i32 as f32 / (1u64 << 31) as f32;
        let numbers = (0..PERIOD as u64).map(|at| unit(at).to_le_bytes());
        let pattern: Vec<u8> = match dtype {
            BF16 => numbers.flat_map(|bytes| [bytes[2], bytes[3]]).collect(),
            _ => numbers.flatten().collect(),
        };
        kernels.fill_with(buffer.view_mut(), &pattern)?;
        Ok(buffer)
    }

    fn table(&self, kernels: &CudaKernels, numbers: &[i32]) -> Result<Buffer> {
        let mut buffer = self.room(I32, [numbers.len()])?;
        let bytes: Vec<u8> = numbers
            .iter()
            .flat_map(|number| number.to_le_bytes())
            .collect();
        kernels.upload(buffer.view_mut(), &bytes)?;
        Ok(buffer)
    }

    /// Rows of a width; by a table those of as many tokens as an expert has at most, in no order.
    fn expert_rows(
        &self,
        kernels: &CudaKernels,
        width: usize,
        by_table: bool,
        key: u64,
    ) -> Result<(Buffer, Option<Buffer>)> {
        if !by_table {
            return Ok((
                self.random(kernels, BF16, [self.count(), width], key)?,
                None,
            ));
        }
        let tokens = self.widths.rows;
        let token = |row: usize| (random_u32(key, row as u64) as usize % tokens) as i32;
        let table: Vec<i32> = (0..self.count()).map(token).collect();
        let x = self.random(kernels, BF16, [tokens, width], key)?;
        Ok((x, Some(self.table(kernels, &table)?)))
    }

    /// Computes a case, and looks at the result.
    fn result(&self, kernels: &CudaKernels, case: &Case) -> Result<Looked> {
        let Case {
            inputs,
            outputs,
            form,
        } = *case;
        let (experts, count) = (self.rows.len(), self.count());
        let ends = self.ranges().map(|range| range.end as i32);
        let offsets: Vec<i32> = [0].into_iter().chain(ends).collect();
        let offsets = self.table(kernels, &offsets)?;
        let (width, by_table) = match form {
            Form::Product { by_table } => (inputs, by_table),
            Form::InputGradient { by_table } => (outputs, by_table),
            Form::WeightGradient {
                dtype,
                accumulates,
                by_table,
            } => {
                let mut out = self.random(kernels, dtype, [experts, outputs, inputs], 3)?;
                let dy = self.expert_rows(kernels, outputs, by_table[0], 1)?;
                let x = self.expert_rows(kernels, inputs, by_table[1], 2)?;
                let (dy, x) = (found(&dy), found(&x));
                let mut scratch = self.scratch(kernels, &[dy, x])?;
                kernels.run(GroupedGradient {
                    out: out.view_mut(),
                    scratch: scratch.view_mut(),
                    dy,
                    rows: x,
                    offsets: offsets.view(),
                    init: match accumulates {
                        true => Init::Accumulate,
                        false => Init::Overwrite,
                    },
                })?;
                let of_all = out.view().reshape([experts * outputs, inputs]);
                return look(kernels, of_all, self.rows_of_gradients(inputs, outputs));
            }
        };
        let weights = self.random(kernels, BF16, [experts, outputs, inputs], 2)?;
        let x = self.expert_rows(kernels, width, by_table, 1)?;
        let x = found(&x);
        let mut out = self.random(kernels, BF16, [count, inputs + outputs - width], 3)?;
        let mut scratch = self.scratch(kernels, &[x])?;
        kernels.run(GroupedMatmul {
            out: out.view_mut(),
            scratch: scratch.view_mut(),
            rows: x,
            weights: weights.view(),
            by_columns: matches!(form, Form::InputGradient { .. }),
            offsets: offsets.view(),
        })?;
        look(kernels, out.view(), vec![(0..count, width)])
    }

    fn scratch(&self, kernels: &CudaKernels, operands: &[ExpertRows]) -> Result<Buffer> {
        let target = kernels.target();
        let elements = operands.iter().map(|rows| rows.scratch_elements(target));
        self.room(F32, [elements.sum::<usize>()])
    }

    /// Which rows of all experts' gradients are looked at: all, or where these are too many as many of each expert, in other places of
    /// each. With them goes how many terms their sums have.
    fn rows_of_gradients(&self, inputs: usize, outputs: usize) -> Vec<(Range<usize>, usize)> {
        let most = ELEMENTS_MAX / (inputs * self.rows.len()).max(1);
        let some = most.clamp(1, outputs);
        let of = |(expert, rows): (usize, &usize)| {
            let first = expert * 197 % (outputs - some + 1);
            let start = expert * outputs + first;
            (start..start + some, *rows)
        };
        self.rows.iter().enumerate().map(of).collect()
    }
}

fn found((x, table): &(Buffer, Option<Buffer>)) -> ExpertRows<'_> {
    ExpertRows {
        x: x.view(),
        row_token: table.as_ref().map(Buffer::view),
    }
}

/// Downloads some rows of a matrix.
fn look(kernels: &CudaKernels, of: In, rows: Vec<(Range<usize>, usize)>) -> Result<Looked> {
    let read = |(rows, terms): (Range<usize>, usize)| {
        let some = of.rows(rows);
        let mut bytes = vec![0; some.bytes()];
        kernels.download(&mut bytes, some)?;
        Ok((bytes, terms))
    };
    Ok(Looked {
        dtype: of.dtype(),
        parts: rows.into_iter().map(read).collect::<Result<_>>()?,
    })
}

/// Why a result was not computed.
enum Stopped {
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
    fn verdict(self, kind: KernelKind, case: &Case) -> Verdict {
        match (self, kind) {
            (Stopped::Failed(reason), KernelKind::Sm90) => {
                Verdict::Faulted(format!("{reason} ({case})"))
            }
            (Stopped::Failed(reason) | Stopped::NoRoom(reason), _) => Verdict::Untried(reason),
        }
    }
}

/// What comes of a trial.
pub(super) fn verdict(index: usize, widths: &ExpertWidths) -> Verdict {
    let opened = || -> Result<(Memory, CudaKernels)> {
        let device = CudaDevice::open(index)?;
        let memory = Memory::device(device.clone());
        let driver = CudaDriver::new(&device)?;
        let kernels = Cuda::new(driver, &memory, BF16)?;
        Ok((memory, kernels))
    };
    let (memory, kernels) = match opened() {
        Ok(opened) => opened,
        Err(Stopped::NoRoom(why) | Stopped::Failed(why)) => return Verdict::Untried(why),
    };
    let trial = Trial {
        memory,
        widths,
        rows: rows_of_experts(widths),
    };
    tried(&trial, kernels).unwrap_or_else(|verdict| verdict)
}

/// Makes all cases, up to the first that speaks against the kernels.
fn tried(trial: &Trial, mut kernels: CudaKernels) -> Result<Verdict, Verdict> {
    use KernelKind::{Sm80, Sm90};
    for case in cases(trial.widths) {
        let mut results = Vec::new();
        // The second time a block computes as many tiles as it does of a large run: that changes no bit either.
        for (kind, blocks_enough) in [(Sm80, BLOCKS_ENOUGH), (Sm90, BLOCKS_ENOUGH), (Sm90, 1)] {
            kernels = kernels
                .with_experts_by(kind)
                .with_blocks_enough(blocks_enough);
            if kind == Sm90 {
                // Whoever started this process reads it. If it cannot be written, nobody waits for it.
                let _ = writeln!(std::io::stderr(), "{BEGUN}");
            }
            let result = trial.result(&kernels, &case);
            results.push(result.map_err(|stopped| stopped.verdict(kind, &case))?);
        }
        let [right, first, second] = &results[..] else {
            unreachable!("three were computed");
        };
        if let Some(mistake) = first.mistake(right) {
            return Err(Verdict::Wrong(format!("{mistake} ({case})")));
        }
        if first != second {
            return Err(Verdict::TwoResults(case.to_string()));
        }
    }
    Ok(Verdict::Passed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_and_every_kind_of_expert_is_tried() {
        let widths = ExpertWidths::STANDARD;
        let rows = rows_of_experts(&widths);
        assert_eq!(rows[..3], [widths.rows, 0, 1]);
        assert_eq!(rows.len(), widths.experts);
        let (mut products, mut gradients) = (Vec::new(), Vec::new());
        for case in cases(&widths) {
            match case.form {
                Form::Product { by_table } => products.push((false, by_table)),
                Form::InputGradient { by_table } => products.push((true, by_table)),
                Form::WeightGradient {
                    dtype,
                    accumulates,
                    by_table,
                } => gradients.push((dtype == F32, accumulates, by_table)),
            }
        }
        for (one, other) in [(false, false), (false, true), (true, false), (true, true)] {
            assert!(products.contains(&(one, other)), "{products:?}");
            let mut forms = gradients.iter();
            assert!(forms.any(|form| (form.0, form.1) == (one, other)));
            let mut tables = gradients.iter();
            assert!(tables.any(|form| form.2 == [one, other]));
        }
    }

    fn looked(dtype: DType, value: f32, terms: usize) -> Looked {
        let bytes = value.to_le_bytes();
        let kept = 4 - dtype.size_in_bytes();
        let parts = vec![(bytes[kept..].to_vec(), terms)];
        Looked { dtype, parts }
    }

    /// Two roundings to bf16 may be one unit of the last place apart; sums in f32 as far as their terms allow, and without terms not at
    /// all.
    #[test]
    fn roundings_are_no_mistake_and_a_lost_term_is_one() {
        let is_mistake = |dtype, value, other, terms| {
            let [is, right] = [value, other].map(|value| looked(dtype, value, terms));
            is.mistake(&right).is_some()
        };
        for (dtype, value, other, terms, wrong) in [
            (BF16, 1.0, 1.0 + 1.0 / 128.0, 64, false),
            (BF16, 1.0, 1.0 + 2.0 / 128.0, 64, true),
            (F32, 30.0, 30.01, 4096, false),
            (F32, 30.0, 30.1, 4096, true),
            (F32, 0.0, 1e-9, 0, true),
            (F32, 0.25, 0.25, 0, false),
            (F32, f32::NAN, 1.0, 4096, true),
            (F32, 1.0, f32::NAN, 4096, true),
        ] {
            assert_eq!(
                is_mistake(dtype, value, other, terms),
                wrong,
                "{value} {other} {terms}"
            );
        }
    }
}
