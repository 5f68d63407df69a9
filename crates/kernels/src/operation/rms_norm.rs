//! Normalisation by the root of the mean square (Zhang and Sennrich 2019).

use super::Init;
use super::check::{Check, Checked};
use super::contract::Contract;
use super::declaration::operation;
use super::output_form::OutputForm;
use memory::{In, Out};

operation! {
    /// `y [t, h] = x rstd weight`, `rstd [t] (f32) = 1 / sqrt(mean(x^2) + eps)`. Either output may be left out.
    /// `plus_one`: 1 + weight, in f32, is the factor in place of the weight (Gemma). `y` is rounded once either way.
    /// `form`: that of `y`; with a largest magnitude `y` is not left out.
    RmsNorm "rms_norm": x [t, h] {
        y: Option<Out<'a>> [t, h] codes_if(form.is_codes()),
        rstd: Option<Out<'a>> [t] f32,
        form: OutputForm<'a> [1] f32,
        x: In<'a> [t, h],
        weight: In<'a> [h],
        plus_one: bool,
        eps: f32,
    }

    /// `dx [t, h] = dx_init + ...`, `dweight [h] = dweight_init + ...` from `dy [t, h]` and the forward pass's inputs,
    /// `plus_one` and statistics. `dweight` is a gradient: f32 or bf16, summed in f32 and rounded once.
    RmsNormBackward "rms_norm_backward": x [t, h] {
        dx: Out<'a> [t, h] plus(dx_init),
        dx_init: Init<'a> [] in_place,
        dweight: Out<'a> [h] real plus(dweight_init),
        dweight_init: Init<'a> [] in_place,
        dy: In<'a> [t, h],
        x: In<'a> [t, h],
        weight: In<'a> [h],
        plus_one: bool,
        rstd: In<'a> [t] f32,
    }
}

impl Contract for RmsNorm<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        check.has_output(&self.y, &self.form)
    }
}

impl Contract for RmsNormBackward<'_> {}
