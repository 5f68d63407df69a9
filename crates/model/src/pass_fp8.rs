//! Codes of FP8 in a pass: outputs that are kept as such, operands that are made into such, and their scales.

use crate::fp8::{CodedOutput, Fp8Cells, Fp8Layer, LEASED, Multiplied, TOGETHER, WeightCodes};
use crate::pass::{Pass, Work};
use crate::{Activation, ModelError, ParameterId};
use kernels::fp8::Fp8;
use kernels::operation::{Copy, TransposeCodes};
use memory::{Buffer, Category, In};

impl Pass<'_> {
    pub(crate) fn place(&self, layer: Fp8Layer, operand: Multiplied) -> usize {
        Fp8Cells::place(self.running.at.layer, layer, operand)
    }

    fn codes(
        &self,
        name: &'static str,
        shape: [usize; 2],
        format: Fp8,
    ) -> Result<Buffer, ModelError> {
        self.lease(Category::Temporary, name, shape, format.dtype())
    }

    /// The cells of the model's scales.
    pub(crate) fn scales(&self) -> &Fp8Cells {
        self.work.saved.fp8.as_ref().expect(LEASED)
    }

    fn cells(&mut self) -> &mut Fp8Cells {
        self.work.saved.fp8.as_mut().expect(LEASED)
    }

    pub(crate) fn scale(&self, layer: Fp8Layer, operand: Multiplied) -> In<'_> {
        self.scales().scale(self.place(layer, operand))
    }

    /// As [`Pass::output`], for an activation that may be kept as codes.
    pub(crate) fn coded_output(
        &mut self,
        activation: Activation,
    ) -> Result<Option<CodedOutput>, ModelError> {
        let Some(kept) = self.output(activation)? else {
            return Ok(None);
        };
        let is_coded = kept.dtype().is_fp8();
        let wide = is_coded.then(|| self.temporary("uncoded", kept.dims()));
        let wide = wide.transpose()?;
        Ok(Some(CodedOutput { kept, wide }))
    }

    /// As [`Pass::put`], for the input of this layer.
    pub(crate) fn put_coded(
        &mut self,
        activation: Activation,
        layer: Option<Fp8Layer>,
        output: Option<CodedOutput>,
    ) -> Result<(), ModelError> {
        let Some(CodedOutput { mut kept, wide }) = output else {
            return Ok(());
        };
        if let Some(wide) = wide {
            let layer = layer.expect("codes are of some layer's input");
            let (kernels, place) = (self.kernels(), self.place(layer, Multiplied::Input));
            let of = (kept.view_mut(), wide.view());
            self.cells().quantise(kernels, place, of)?;
        }
        self.put(activation, Some(kept));
        Ok(())
    }

    /// Codes of an operand that is in the compute type.
    pub(crate) fn quantised(
        &mut self,
        (layer, operand): (Fp8Layer, Multiplied),
        format: Fp8,
        x: In,
    ) -> Result<Buffer, ModelError> {
        let name = match operand {
            Multiplied::Gradient => "gradient_codes",
            _ => "input_codes",
        };
        let mut codes = self.codes(name, [x.dims()[0], x.dims()[1]], format)?;
        let (kernels, place) = (self.kernels(), self.place(layer, operand));
        self.cells()
            .quantise(kernels, place, (codes.view_mut(), x))?;
        Ok(codes)
    }

    /// A copy of a layer's matrices as one, where they do not lie together: small ones whose states are more precise than
    /// those of others lie apart from these.
    fn brought_together(
        &self,
        weights: &[ParameterId],
        shape: [usize; 2],
    ) -> Result<Option<Buffer>, ModelError> {
        if self.lie_together(weights) {
            return Ok(None);
        }
        let mut whole = self.temporary("weight_together", shape)?;
        let mut first = 0;
        for weight in weights {
            let x = self.parameter(*weight);
            let rows = first..first + x.dims()[0];
            first = rows.end;
            let out = whole.view_mut().rows(rows);
            self.kernels().run(Copy { out, x })?;
        }
        Ok(Some(whole))
    }

    /// Codes of a layer's matrices as one: made for this use, or those that are kept for the step.
    pub(crate) fn quantised_weight(
        &mut self,
        layer: Fp8Layer,
        (weights, shape): (&[ParameterId], [usize; 2]),
    ) -> Result<WeightCodes, ModelError> {
        let (kernels, place) = (self.kernels(), self.place(layer, Multiplied::Weight));
        let (block, indices) = (self.running.at.layer, self.indices(weights));
        if self.scales().is_fresh(block, layer) {
            return Ok(WeightCodes::Kept(block, layer));
        }
        let whole = self.brought_together(weights, shape)?;
        let whole = whole.as_ref().map(Buffer::view);
        let Work { weights, saved, .. } = &mut self.work;
        let weight = whole.or_else(|| weights.joined(&indices)).expect(TOGETHER);
        let cells = saved.fp8.as_mut().expect(LEASED);
        if cells.keep(kernels, (block, layer), weight)? {
            return Ok(WeightCodes::Kept(block, layer));
        }
        let mut codes = self.codes("weight_codes", shape, Fp8::E4m3)?;
        let Work { weights, saved, .. } = &mut self.work;
        let weight = whole.or_else(|| weights.joined(&indices)).expect(TOGETHER);
        let cells = saved.fp8.as_mut().expect(LEASED);
        cells.quantise(kernels, place, (codes.view_mut(), weight))?;
        Ok(WeightCodes::Made(codes))
    }

    /// Rows of the transpose of codes `[m, n]`, whose `m` is padded.
    pub(crate) fn transposed(&self, name: &'static str, x: In) -> Result<Buffer, ModelError> {
        let shape = [x.dims()[1], TransposeCodes::padded(x.dims()[0])];
        let format = Fp8::of(x.dtype()).expect("only codes are transposed so");
        let mut out = self.codes(name, shape, format)?;
        self.kernels().run(TransposeCodes {
            out: out.view_mut(),
            x,
        })?;
        Ok(out)
    }
}
