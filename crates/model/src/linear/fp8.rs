//! The three products of a linear layer in FP8.

use super::Linear;
use crate::fp8::{Fp8Layer, Fp8Operand, Fp8Reader, TOGETHER};
use crate::parameters::{ParameterId, PartParameters};
use crate::pass::Work;
use crate::{Activation, Pass, Purpose, Result};
use kernels::Init;
use kernels::fp8::Fp8;
use kernels::operation::ScaledMatmul;
use memory::{Buffer, In, Out};

impl Linear {
    /// The same layer with its products in FP8, if the model has such and none of its matrices is an exception, frozen or
    /// under an adapter.
    pub(crate) fn in_fp8(self, own: &mut PartParameters, layer: Fp8Layer) -> Linear {
        let fp8 = own.fp8().filter(|_| self.is_all_trained());
        if fp8.is_some() {
            own.may_be_fp8(&self.weights);
        }
        let fp8 = fp8.filter(|fp8| {
            let mut weights = self.weights.iter();
            !weights.any(|id| fp8.except.fit(own.name(*id)))
        });
        if fp8.is_some() {
            own.add_fp8(layer, &self.weights, [self.outputs(), self.inputs]);
        }
        Linear {
            fp8: fp8.map(|fp8| (layer, fp8)),
            ..self
        }
    }

    /// This layer as the only reader of its input, if its products are in FP8 in training.
    pub(crate) fn fp8_reader(&self) -> Option<Fp8Reader> {
        let fp8 = self.fp8.as_ref();
        fp8.map(|(layer, fp8)| Fp8Reader {
            layer: *layer,
            as_codes: fp8.saves_codes,
        })
    }

    /// Which layer this is, if its products are in FP8 in training.
    pub(crate) fn fp8_layer(&self) -> Option<Fp8Layer> {
        self.fp8.as_ref().map(|(layer, _)| *layer)
    }

    /// Whether forward products may keep sums in fewer bits.
    fn fast_accumulation(&self) -> bool {
        let fp8 = self.fp8.as_ref();
        fp8.is_some_and(|(_, fp8)| fp8.fast_accumulation)
    }

    /// Which layer this is, and the format of its gradients, if its products are in FP8 in this pass: in training alone.
    pub(super) fn fp8_of(&self, pass: &Pass) -> Option<(Fp8Layer, Fp8)> {
        let fp8 = self.fp8.as_ref();
        let fp8 = fp8.filter(|_| matches!(pass.work.purpose, Purpose::Training(_)));
        fp8.map(|(layer, fp8)| (*layer, fp8.gradients))
    }

    /// Codes of the output's gradient, if products are in FP8 in this pass; adds to the gradients of biases then.
    pub(super) fn gradient_codes(
        &self,
        pass: &mut Pass,
        dy: In,
    ) -> Result<Option<(Fp8Layer, Buffer)>> {
        let Some((layer, format)) = self.fp8_of(pass) else {
            return Ok(None);
        };
        self.add_bias_gradients(pass, dy)?;
        let codes = pass.quantised((layer, Fp8Operand::Gradient), format, dy)?;
        Ok(Some((layer, codes)))
    }

    fn matrix_shape(&self) -> (&[ParameterId], [usize; 2]) {
        (&self.weights, [self.outputs(), self.inputs])
    }

    /// `y = init + x W^T`, with biases that lie together, of an input as it is or as codes.
    pub(super) fn forward_fp8(
        &self,
        pass: &mut Pass,
        layer: Fp8Layer,
        y: Out,
        (x, biases, init): (In, &[ParameterId], Init),
    ) -> Result {
        let is_coded = x.dtype().is_fp8();
        let of = (layer, Fp8Operand::Input);
        let made = (!is_coded).then(|| pass.quantised(of, Fp8::E4m3, x));
        let made = made.transpose()?;
        let weight = pass.weight_codes(layer, self.matrix_shape())?;
        let scales = [Fp8Operand::Input, Fp8Operand::Weight];
        let bias = pass.parameters(biases);
        pass.kernels().run(ScaledMatmul {
            out: y,
            a: made.as_ref().map_or(x, Buffer::view),
            b: weight.view(&*pass.work.weights),
            scales: scales.map(|operand| pass.scale(layer, operand)),
            bias,
            init,
            fast_accumulation: self.fast_accumulation(),
        })?;
        pass.release_weight_codes(weight)
    }

    /// The gradients of the weight and of the input, given codes of the output's gradient; files the latter.
    pub(super) fn backward_fp8(
        &self,
        pass: &mut Pass,
        (layer, input): (Fp8Layer, Activation),
        dy: Buffer,
    ) -> Result {
        let x = pass.pull(input)?;
        let transposed = pass.transposed_input(layer, x.view())?;
        pass.release(input, x);
        self.weight_gradient_fp8(pass, layer, (dy.view(), transposed.view()))?;
        drop(transposed);
        let transposed = pass.transposed_weight(layer, self.matrix_shape())?;
        let (mut dx, init) = pass.gradient_to_add(input)?;
        let scales = [Fp8Operand::Gradient, Fp8Operand::Weight];
        pass.kernels().run(ScaledMatmul {
            out: dx.view_mut(),
            a: dy.view(),
            b: transposed.view(),
            scales: scales.map(|operand| pass.scale(layer, operand)),
            bias: None,
            init,
            fast_accumulation: false,
        })?;
        pass.file_gradient(input, dx);
        Ok(())
    }

    /// `dW += dy^T x`, given codes of dy and those of x, transposed.
    fn weight_gradient_fp8(&self, pass: &mut Pass, layer: Fp8Layer, (dy, x): (In, In)) -> Result {
        let dy = pass.transposed("gradient_transposed", dy)?;
        let sites = [Fp8Operand::Gradient, Fp8Operand::Input];
        let sites = sites.map(|operand| pass.site(layer, operand));
        let all = (&self.weights[..], 0..self.outputs());
        let parts: Vec<_> = match pass.lie_together(&self.weights) {
            true => vec![all],
            false => self.weights.chunks(1).zip(self.columns()).collect(),
        };
        for (weights, outputs) in parts {
            let indices = pass.indices(weights);
            let Work {
                purpose,
                saved,
                kernels,
                ..
            } = &mut pass.work;
            let gradients = &mut *purpose.training().gradients;
            let (out, init) = gradients.accumulate_joined(&indices).expect(TOGETHER);
            kernels.run(ScaledMatmul {
                out,
                a: dy.view().rows(outputs),
                b: x,
                scales: sites.map(|site| saved.fp8_scale(site)),
                bias: None,
                init,
                fast_accumulation: false,
            })?;
        }
        Ok(())
    }
}
