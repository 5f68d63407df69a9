//! Codes of FP8 in a pass: outputs that are kept as such, operands that are made into such, and their scales.

use crate::fp8::{CodedOutput, Fp8Layer, Fp8Operand, Fp8Reader, Fp8Site, TOGETHER};
use crate::fp8_cells::CodesTo;
use crate::pass::{Pass, Work};
use crate::{Activation, ParameterId, Purpose, Result};
use kernels::fp8::Fp8;
use kernels::operation::{Copy, OutputForm, TransposeCodes};
use memory::{Buffer, Category, DType, In, Out};
use units::Weights;

/// Codes of a layer's matrices.
pub(crate) enum WeightCodes {
    Made(Buffer),
    /// Those of some matrices of the layout, which are kept for the step.
    Kept(Vec<usize>),
}

impl WeightCodes {
    pub(crate) fn view<'a>(&'a self, weights: &'a Weights) -> In<'a> {
        match self {
            WeightCodes::Made(codes) => codes.view(),
            WeightCodes::Kept(indices) => weights.step_codes(indices).expect("they were made"),
        }
    }
}

impl Pass<'_> {
    fn codes(&self, name: &'static str, shape: [usize; 2], format: Fp8) -> Result<Buffer> {
        self.lease(Category::Temporary, name, shape, format.dtype())
    }

    /// An operand of a layer of the block.
    pub(crate) fn site(&self, layer: Fp8Layer, operand: Fp8Operand) -> Fp8Site {
        Fp8Site {
            block: self.running.at.layer,
            layer,
            operand,
        }
    }

    /// Its scale, `[1]`.
    pub(crate) fn scale(&self, layer: Fp8Layer, operand: Fp8Operand) -> In<'_> {
        self.work.saved.fp8_scale(self.site(layer, operand))
    }

    fn quantise(&mut self, (layer, operand): (Fp8Layer, Fp8Operand), of: (CodesTo, In)) -> Result {
        let (kernels, site) = (self.kernels(), self.site(layer, operand));
        self.work.saved.quantise(kernels, site, of)
    }

    /// Where a stage writes the largest magnitude of the gradient that it makes, `[1]`, if that becomes codes for a layer, and it is not
    /// known.
    pub(crate) fn largest_gradient_to_find(&mut self, layer: Option<Fp8Layer>) -> Option<Out<'_>> {
        let site = self.site_in_training(layer, Fp8Operand::Gradient)?;
        self.work.saved.largest_to_find(site)
    }

    /// The form in which a stage writes the reader's input, by the type of the room for it.
    pub(crate) fn input_form(&mut self, read_by: Option<Fp8Reader>, made: DType) -> OutputForm<'_> {
        self.parameters_and_form(&[], (read_by, made)).1
    }

    /// An operand of a layer in FP8; none outside training, where nothing is.
    fn site_in_training(&self, layer: Option<Fp8Layer>, operand: Fp8Operand) -> Option<Fp8Site> {
        let layer = layer.filter(|_| matches!(self.work.purpose, Purpose::Training(_)))?;
        Some(self.site(layer, operand))
    }

    /// Some parameters, and the form that [`Pass::input_form`] gives.
    pub(crate) fn parameters_and_form(
        &mut self,
        ids: &[ParameterId],
        (read_by, made): (Option<Fp8Reader>, DType),
    ) -> (Vec<In<'_>>, OutputForm<'_>) {
        let layer = read_by.map(|reader| reader.layer);
        let site = self.site_in_training(layer, Fp8Operand::Input);
        let indices = self.indices(ids);
        let Work { weights, saved, .. } = &mut self.work;
        let parameters = indices.iter().map(|index| weights.view(*index)).collect();
        let form = site.map_or(OutputForm::Values, |site| saved.form(site, made.is_fp8()));
        (parameters, form)
    }

    /// As [`Pass::output`], for an activation that may be kept as codes for this reader. A replay knows their scale, and makes them at
    /// once.
    pub(crate) fn coded_output(
        &mut self,
        activation: Activation,
        read_by: Option<Fp8Reader>,
    ) -> Result<Option<CodedOutput>> {
        let Some(kept) = self.output(activation)? else {
            return Ok(None);
        };
        let reader = read_by.filter(|_| kept.dtype().is_fp8());
        let site = reader.map(|reader| self.site(reader.layer, Fp8Operand::Input));
        let is_first = site.is_some_and(|site| !self.work.saved.was_coded(site));
        let wide = is_first.then(|| self.temporary("uncoded", kept.dims()));
        let wide = wide.transpose()?;
        Ok(Some(CodedOutput { kept, wide }))
    }

    /// As [`Pass::put`], for the input of this reader.
    pub(crate) fn put_coded(
        &mut self,
        activation: Activation,
        read_by: Option<Fp8Reader>,
        output: Option<CodedOutput>,
    ) -> Result {
        let Some(CodedOutput { mut kept, wide }) = output else {
            return Ok(());
        };
        if let Some(wide) = wide {
            let reader = read_by.expect("codes are of some layer's input");
            let codes = CodesTo::AsTheyAre(kept.view_mut());
            self.quantise((reader.layer, Fp8Operand::Input), (codes, wide.view()))?;
        }
        self.put(activation, Some(kept));
        Ok(())
    }

    /// Codes of an operand that is in the compute type.
    pub(crate) fn quantised(
        &mut self,
        (layer, operand): (Fp8Layer, Fp8Operand),
        format: Fp8,
        x: In,
    ) -> Result<Buffer> {
        let name = match operand {
            Fp8Operand::Gradient => "gradient_codes",
            Fp8Operand::Input | Fp8Operand::Weight => "input_codes",
        };
        let mut codes = self.codes(name, [x.dims()[0], x.dims()[1]], format)?;
        let of = CodesTo::AsTheyAre(codes.view_mut());
        self.quantise((layer, operand), (of, x))?;
        Ok(codes)
    }

    /// A copy of a layer's matrices as one, where they do not lie together: small ones whose states are more precise than
    /// those of others lie apart from these.
    fn brought_together(
        &self,
        weights: &[ParameterId],
        shape: [usize; 2],
    ) -> Result<Option<Buffer>> {
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

    /// Makes codes of a layer's matrices as one.
    fn quantise_weight(
        &mut self,
        layer: Fp8Layer,
        (weights, shape): (&[ParameterId], [usize; 2]),
        codes: CodesTo,
    ) -> Result {
        let whole = self.brought_together(weights, shape)?;
        let whole = whole.as_ref().map(Buffer::view);
        let (kernels, site) = (self.kernels(), self.site(layer, Fp8Operand::Weight));
        let indices = self.indices(weights);
        let Work { weights, saved, .. } = &mut self.work;
        let weight = whole.or_else(|| weights.joined(&indices)).expect(TOGETHER);
        saved.quantise(kernels, site, (codes, weight))
    }

    /// Codes of a layer's matrices as one: made for this use, or those that are kept for the step.
    pub(crate) fn weight_codes(
        &mut self,
        layer: Fp8Layer,
        (weights, shape): (&[ParameterId], [usize; 2]),
    ) -> Result<WeightCodes> {
        let indices = self.indices(weights);
        if self.work.weights.step_codes(&indices).is_some() {
            return Ok(WeightCodes::Kept(indices));
        }
        let site = self.site(layer, Fp8Operand::Weight);
        let Work {
            weights: all,
            saved,
            kernels,
            ..
        } = &mut self.work;
        if let Some((weight, codes)) = all.step_codes_to_make(&indices) {
            saved.quantise(kernels, site, (CodesTo::AsTheyAre(codes), weight))?;
            return Ok(WeightCodes::Kept(indices));
        }
        let mut made = self.codes("weight_codes", shape, Fp8::E4m3)?;
        let of = CodesTo::AsTheyAre(made.view_mut());
        self.quantise_weight(layer, (weights, shape), of)?;
        let Work {
            weights, kernels, ..
        } = &mut self.work;
        weights.keep_step_codes(kernels, &indices, made.view())?;
        Ok(WeightCodes::Made(made))
    }

    /// Ends the lease of codes that were made for a use, once those to be kept have been copied.
    pub(crate) fn release_weight_codes(&mut self, codes: WeightCodes) -> Result {
        let Work {
            weights, kernels, ..
        } = &mut self.work;
        weights.wait_until_step_codes_are_kept(kernels)?;
        drop(codes);
        Ok(())
    }

    /// The transpose of a layer's matrices as codes.
    pub(crate) fn transposed_weight(
        &mut self,
        layer: Fp8Layer,
        (weights, shape): (&[ParameterId], [usize; 2]),
    ) -> Result<Buffer> {
        if let Some(codes) = self.work.weights.step_codes(&self.indices(weights)) {
            return self.transposed("weight_transposed", codes);
        }
        let mut out = self.room_for_transpose("weight_transposed", shape, Fp8::E4m3)?;
        let of = CodesTo::Transposed(out.view_mut());
        self.quantise_weight(layer, (weights, shape), of)?;
        Ok(out)
    }

    /// The transpose of the codes of a layer's input, which is codes or not.
    pub(crate) fn transposed_input(&mut self, layer: Fp8Layer, x: In) -> Result<Buffer> {
        if x.dtype().is_fp8() {
            return self.transposed("input_transposed", x);
        }
        let shape = [x.dims()[0], x.dims()[1]];
        let mut out = self.room_for_transpose("input_transposed", shape, Fp8::E4m3)?;
        let of = CodesTo::Transposed(out.view_mut());
        self.quantise((layer, Fp8Operand::Input), (of, x))?;
        Ok(out)
    }

    /// Room for the transpose of codes `[m, n]`, whose `m` is padded.
    fn room_for_transpose(
        &self,
        name: &'static str,
        [m, n]: [usize; 2],
        format: Fp8,
    ) -> Result<Buffer> {
        self.codes(name, [n, TransposeCodes::padded(m)], format)
    }

    /// The transpose of codes, padded.
    pub(crate) fn transposed(&self, name: &'static str, x: In) -> Result<Buffer> {
        let format = Fp8::of(x.dtype()).expect("only codes are transposed so");
        let mut out = self.room_for_transpose(name, [x.dims()[0], x.dims()[1]], format)?;
        self.kernels().run(TransposeCodes {
            out: out.view_mut(),
            x,
        })?;
        Ok(out)
    }
}
