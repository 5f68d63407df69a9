//! Layer normalisation (Ba, Kiros and Hinton 2016).

use super::Init;
use super::check::{Check, Checked};
use super::contract::Contract;
use super::declaration::operation;
use super::output_form::OutputForm;
use memory::{In, Out};

operation! {
    /// `y [t, h] = (x - mean) rstd weight + bias`, with the row's `mean [t]` and `rstd [t] = 1 / sqrt(variance + eps)`,
    /// both f32. The variance is the mean of `(x - mean)^2`. Any output may be left out.
    /// `form` as in [`super::RmsNorm`].
    LayerNorm "layer_norm": x [t, h] {
        y: Option<Out<'a>> [t, h] codes_if(form.is_codes()),
        mean: Option<Out<'a>> [t] f32,
        rstd: Option<Out<'a>> [t] f32,
        form: OutputForm<'a> [1] f32,
        x: In<'a> [t, h],
        weight: In<'a> [h],
        bias: In<'a> [h],
        eps: f32,
    }

    /// `dx [t, h] = dx_init + ...`, `dweight [h] = dweight_init + ...`, `dbias [h] = dbias_init + ...` from `dy [t, h]` and
    /// the forward pass's inputs and statistics. `dweight` and `dbias` are gradients: f32 or bf16, summed in f32 and
    /// rounded once.
    LayerNormBackward "layer_norm_backward": x [t, h] {
        dx: Out<'a> [t, h] plus(dx_init),
        dx_init: Init<'a> [] in_place,
        dweight: Out<'a> [h] real plus(dweight_init),
        dweight_init: Init<'a> [] in_place,
        dbias: Out<'a> [h] real plus(dbias_init),
        dbias_init: Init<'a> [] in_place,
        dy: In<'a> [t, h],
        x: In<'a> [t, h],
        weight: In<'a> [h],
        mean: In<'a> [t] f32,
        rstd: In<'a> [t] f32,
    }
}

impl Contract for LayerNorm<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        check.has_output(&self.y, &self.form)
    }
}

impl Contract for LayerNormBackward<'_> {}
