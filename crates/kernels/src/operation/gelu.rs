//! The Gaussian error linear unit (Hendrycks and Gimpel 2016), in its form with a tanh: GPT-2's activation.

use super::contract::Contract;
use super::declaration::operation;
use super::output_form::OutputForm;
use memory::{In, Out};

operation! {
    /// `act = x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`, both `[t, f]`. `form`: that of `act`.
    Gelu "gelu": act {
        act: Out<'a> [..x] codes_if(form.is_codes()),
        x: In<'a> [..x],
        form: OutputForm<'a> [1] f32,
    }

    /// The gradient of [`Gelu`] in place: `x` becomes its own gradient. `largest [1]` (f32): if it is given, the
    /// largest magnitude of this gradient, as [`super::AbsMax`] finds it.
    GeluBackward "gelu_backward": x {
        x: Out<'a> [..x] changes,
        dact: In<'a> [..x],
        largest: Option<Out<'a>> [1] f32,
    }
}

impl Contract for Gelu<'_> {}

impl Contract for GeluBackward<'_> {}
