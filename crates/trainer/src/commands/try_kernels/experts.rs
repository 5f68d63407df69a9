//! Products of experts: one expert with as many rows as any can have, one without, one with a single row, and others with few; rows in
//! order, and found by a table; weights by rows and by columns; gradients in either type, new and added.
//!
//! Factors are bf16 between -1 and 1, and a sum of n products of them may be off by [`OF_TERMS`] of n / 4, the mean sum of the terms'
//! magnitudes. That is less than a usual term.

use super::trial::{Case, Looked, OF_TERMS, Result, Tolerance, TrialGpu};
use crate::kernel_trial::{ELEMENTS_MAX, ExpertWidths};
use kernels::Init;
use kernels::operation::{ExpertRows, GroupedGradient, GroupedMatmul};
use kernels::random::random_u32;
use memory::DType::{BF16, F32, I32};
use memory::{Buffer, DType};
use std::fmt;
use std::ops::Range;

/// Rows of the experts that follow the first three: up to this, less 1.
const FEW: usize = 61;

/// The experts of a trial.
#[derive(Debug)]
pub(super) struct Experts {
    widths: ExpertWidths,
    /// Rows of each.
    rows: Vec<usize>,
}

/// What kernels of both kinds compute: a product of the experts of a trial.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpertCase<'a> {
    experts: &'a Experts,
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

impl fmt::Display for ExpertCase<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let ExpertCase {
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

impl Experts {
    pub(super) fn new(widths: ExpertWidths) -> Experts {
        let few = |expert: usize| ((29 * expert + 7) % FEW).min(widths.rows);
        let rows = [widths.rows, 0, 1].into_iter().chain((3..).map(few));
        let rows = rows.take(widths.experts).collect();
        Experts { widths, rows }
    }

    /// All cases of a run: each size has every form, and all combinations are there over two sizes.
    pub(super) fn cases(&self) -> Vec<ExpertCase<'_>> {
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
            forms.map(|form| ExpertCase {
                experts: self,
                inputs,
                outputs,
                form,
            })
        };
        let sizes = self.widths.products().into_iter().enumerate();
        sizes.flat_map(of).collect()
    }

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

    /// Rows of a width; by a table those of as many tokens as an expert has at most, in no order.
    fn expert_rows(
        &self,
        gpu: &TrialGpu,
        width: usize,
        by_table: bool,
        key: u64,
    ) -> Result<(Buffer, Option<Buffer>)> {
        if !by_table {
            return Ok((gpu.random(BF16, [self.count(), width], key)?, None));
        }
        let tokens = self.widths.rows;
        let token = |row: usize| random_u32(key, row as u64) % tokens as u32;
        let table: Vec<u32> = (0..self.count()).map(token).collect();
        let x = gpu.random(BF16, [tokens, width], key)?;
        Ok((x, Some(gpu.numbers(I32, &table)?)))
    }

    /// Which rows of all experts' gradients are looked at: all, or where these are too many as many of each expert, in other places of
    /// each.
    fn rows_of_gradients(&self, inputs: usize, outputs: usize) -> Vec<(Range<usize>, Tolerance)> {
        let most = ELEMENTS_MAX / (inputs * self.rows.len()).max(1);
        let some = most.clamp(1, outputs);
        let of = |(expert, rows): (usize, &usize)| {
            let first = expert * 197 % (outputs - some + 1);
            let start = expert * outputs + first;
            (start..start + some, of_terms(*rows))
        };
        self.rows.iter().enumerate().map(of).collect()
    }
}

/// The bound of a sum of so many products.
fn of_terms(terms: usize) -> Tolerance {
    Tolerance::of_all(OF_TERMS * terms as f32 / 4.0)
}

impl Case for ExpertCase<'_> {
    fn results(&mut self, gpu: &TrialGpu) -> Result<Vec<Looked>> {
        let ExpertCase {
            experts: all,
            inputs,
            outputs,
            form,
        } = *self;
        let (experts, count) = (all.rows.len(), all.count());
        let ends = all.ranges().map(|range| range.end as u32);
        let offsets: Vec<u32> = [0].into_iter().chain(ends).collect();
        let offsets = gpu.numbers(I32, &offsets)?;
        let (width, by_table) = match form {
            Form::Product { by_table } => (inputs, by_table),
            Form::InputGradient { by_table } => (outputs, by_table),
            Form::WeightGradient {
                dtype,
                accumulates,
                by_table,
            } => {
                let mut out = gpu.random(dtype, [experts, outputs, inputs], 3)?;
                let dy = all.expert_rows(gpu, outputs, by_table[0], 1)?;
                let x = all.expert_rows(gpu, inputs, by_table[1], 2)?;
                let (dy, x) = (found(&dy), found(&x));
                let mut scratch = scratch(gpu, &[dy, x])?;
                gpu.kernels.run(GroupedGradient {
                    out: out.view_mut(),
                    scratch: scratch.view_mut(),
                    dy,
                    rows: x,
                    offsets: offsets.view(),
                    of_experts: experts,
                    init: match accumulates {
                        true => Init::Accumulate,
                        false => Init::Overwrite,
                    },
                })?;
                let of_all = out.view().reshape([experts * outputs, inputs]);
                let rows = all.rows_of_gradients(inputs, outputs);
                return Ok(vec![gpu.look("the gradient", of_all, rows)?]);
            }
        };
        let weights = gpu.random(BF16, [experts, outputs, inputs], 2)?;
        let x = all.expert_rows(gpu, width, by_table, 1)?;
        let x = found(&x);
        let mut out = gpu.random(BF16, [count, inputs + outputs - width], 3)?;
        let mut scratch = scratch(gpu, &[x])?;
        gpu.kernels.run(GroupedMatmul {
            out: out.view_mut(),
            scratch: scratch.view_mut(),
            rows: x,
            weights: weights.view(),
            by_columns: matches!(form, Form::InputGradient { .. }),
            offsets: offsets.view(),
            of_experts: experts,
        })?;
        let rows = vec![(0..count, of_terms(width))];
        Ok(vec![gpu.look("the result", out.view(), rows)?])
    }
}

fn scratch(gpu: &TrialGpu, operands: &[ExpertRows]) -> Result<Buffer> {
    let target = gpu.kernels.target();
    let elements = operands.iter().map(|rows| rows.scratch_elements(target));
    gpu.room(F32, [elements.sum::<usize>()])
}

fn found((x, table): &(Buffer, Option<Buffer>)) -> ExpertRows<'_> {
    ExpertRows {
        x: x.view(),
        row_token: table.as_ref().map(Buffer::view),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_and_every_kind_of_expert_is_tried() {
        let experts = Experts::new(ExpertWidths::STANDARD);
        let Experts { widths, rows } = &experts;
        assert_eq!(rows[..3], [widths.rows, 0, 1]);
        assert_eq!(rows.len(), widths.experts);
        let (mut products, mut gradients) = (Vec::new(), Vec::new());
        for case in experts.cases() {
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
}
