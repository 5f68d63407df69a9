//! The matrices of experts in MXFP4, as gpt-oss is published: `X_blocks [experts, outputs, blocks, 16]`, two codes of 4 bits in a
//! byte, and `X_scales [experts, outputs, blocks]`, the exponents of the blocks' powers of two. Rows are those of memory, where plain files have
//! the transpose; gate and up alternate as there.

use super::error::WeightsError;
use super::wrapper::stored_name;
use crate::parameters::Parameter;
use crate::stored::{Stored, TurnedAxis};
use files::{CHUNK_BYTES, Dtype, TensorParts, Tensors};
use kernels::quantise::{BlockScale, MXFP4_EXPONENT_MAX, dequantise_block};
use memory::{CodePlaces, Codes};
use std::borrow::Cow;
use std::ops::Range;

/// A matrix of the files in MXFP4.
#[derive(Debug)]
pub(super) struct Mxfp4Tensor {
    /// `X_blocks`.
    pub(super) blocks: String,
    /// `X_scales`.
    scales: String,
    experts: usize,
    /// Outputs of an expert in memory.
    outputs: TurnedAxis,
    inputs: usize,
}

impl Mxfp4Tensor {
    /// Finds the matrix that is a parameter; none if it is not in MXFP4.
    ///
    /// # Errors
    /// The name of a tensor, and what is wrong with it.
    pub(super) fn find(
        tensors: &Tensors,
        parameter: &Parameter,
    ) -> Result<Option<Mxfp4Tensor>, (String, String)> {
        let is_of_experts = matches!(parameter.stored, Stored::ExpertsTransposed { .. });
        let blocks = format!("{}_blocks", parameter.name);
        let blocks = stored_name(tensors, &blocks).filter(|_| is_of_experts);
        let (Some(blocks), Some(order)) = (blocks, parameter.turned()) else {
            return Ok(None);
        };
        let scales = format!("{}_scales", blocks.trim_end_matches("_blocks"));
        let found = Mxfp4Tensor {
            experts: order.matrices,
            outputs: order.rows,
            inputs: order.columns.iter().product(),
            blocks,
            scales,
        };
        if !found.inputs.is_multiple_of(Codes::MXFP4_BLOCK) {
            let inputs = found.inputs;
            let problem = format!("has blocks of 32 inputs, and the model's experts have {inputs}");
            return Err((found.blocks.clone(), problem));
        }
        let of_row = found.inputs / Codes::MXFP4_BLOCK;
        let rows = [found.experts, found.outputs.iter().product()];
        let [codes, exponents] = [&[of_row, Codes::MXFP4_BLOCK / 2][..], &[of_row]];
        for (name, of_row) in [(&found.blocks, codes), (&found.scales, exponents)] {
            let shape = [&rows, of_row].concat();
            let Some(TensorParts {
                dtype, shape: has, ..
            }) = tensors.get(name)
            else {
                let problem = format!(
                    "has codes in MXFP4, and their exponents, `{name}`, are missing; fetch the folder again"
                );
                return Err((found.blocks.clone(), problem));
            };
            if (dtype, has) != (Dtype::U8, &shape[..]) {
                let problem = format!("is {dtype:?} of {has:?}; the model needs U8 of {shape:?}");
                return Err((name.clone(), problem));
            }
        }
        Ok(Some(found))
    }

    /// The names of its tensors.
    pub(super) fn names(&self) -> [String; 2] {
        [self.blocks.clone(), self.scales.clone()]
    }

    fn rows(&self) -> usize {
        self.experts * self.outputs.iter().product::<usize>()
    }

    pub(super) fn elements(&self) -> usize {
        self.rows() * self.inputs
    }

    /// The parts of the matrix in chunks, as [`Codes::places`] has them: the first byte, and bytes.
    pub(super) fn parts<'t>(
        &'t self,
        tensors: &'t Tensors,
    ) -> impl Iterator<Item = Result<(usize, Cow<'t, [u8]>), WeightsError>> {
        let CodePlaces {
            codes,
            absmax_codes,
            ..
        } = Codes::Mxfp4.places(self.elements());
        let [parts, ..] = self.outputs;
        let stored = [
            (&self.blocks, codes.start, self.inputs / 2),
            (
                &self.scales,
                absmax_codes.start,
                self.inputs / Codes::MXFP4_BLOCK,
            ),
        ];
        stored.into_iter().flat_map(move |(name, start, bytes)| {
            // A part and the rows of files that it is picked from are a chunk at most.
            let at_once = (CHUNK_BYTES / (bytes * parts).max(1)).max(1);
            let firsts = (0..self.rows()).step_by(at_once);
            firsts.map(move |first| {
                let rows = first..self.rows().min(first + at_once);
                let found = match name == &self.scales {
                    true => self.exponents(tensors, rows),
                    false => self.of_files(tensors, name, rows),
                };
                Ok((start + first * bytes, Cow::Owned(found?)))
            })
        })
    }

    /// Values of the matrix in memory's order, behind those in `values`.
    pub(super) fn values(
        &self,
        tensors: &Tensors,
        elements: Range<usize>,
        values: &mut Vec<f32>,
    ) -> Result<(), WeightsError> {
        let rows = elements.start / self.inputs..elements.end.div_ceil(self.inputs);
        let first = rows.start * self.inputs;
        let codes = self.of_files(tensors, &self.blocks, rows.clone())?;
        let exponents = self.exponents(tensors, rows.clone())?;
        let mut of_rows = vec![0.0; rows.len() * self.inputs];
        let (block, bytes) = Codes::Mxfp4.block();
        let blocks = of_rows.chunks_mut(block).zip(codes.chunks(bytes));
        for ((own, bytes), exponent) in blocks.zip(exponents) {
            dequantise_block(bytes, BlockScale::Exponent(exponent), own);
        }
        values.extend_from_slice(&of_rows[elements.start - first..elements.end - first]);
        Ok(())
    }

    /// The exponents of some rows of memory.
    fn exponents(&self, tensors: &Tensors, rows: Range<usize>) -> Result<Vec<u8>, WeightsError> {
        let found = self.of_files(tensors, &self.scales, rows)?;
        match found.iter().find(|one| **one > MXFP4_EXPONENT_MAX) {
            None => Ok(found),
            Some(exponent) => Err(WeightsError::Beyond {
                name: self.scales.clone(),
                exponent: *exponent,
            }),
        }
    }

    /// What a tensor of the files has of some rows of memory.
    fn of_files(
        &self,
        tensors: &Tensors,
        name: &str,
        rows: Range<usize>,
    ) -> Result<Vec<u8>, WeightsError> {
        let tensor = tensors.get(name).expect("it was found");
        let bytes_of_row = tensor.bytes.len() / self.rows();
        let [parts, of_part, _] = self.outputs;
        let mut found = Vec::with_capacity(rows.len() * bytes_of_row);
        let mut row = rows.start;
        while row < rows.end {
            // Rows of one part of one expert lie among those of the others, `parts` apart.
            let end = rows.end.min((row / of_part + 1) * of_part);
            let (expert, output) = (row / (parts * of_part), row % (parts * of_part));
            let first = expert * parts * of_part + output % of_part * parts + output / of_part;
            let last = first + (end - row - 1) * parts;
            let bytes = first * bytes_of_row..(last + 1) * bytes_of_row;
            let bytes = tensor.bytes.get(bytes)?;
            for own in bytes.chunks(bytes_of_row).step_by(parts) {
                found.extend_from_slice(own);
            }
            row = end;
        }
        Ok(found)
    }
}
