//! The gated activation of the feed-forward layer (Shazeer 2020).

use super::contract::Contract;
use super::declaration::operation;
use super::output_form::OutputForm;
use memory::{In, Out};

operation! {
    /// `act [t, f] = silu(gate) up`. Each row of `gate_up [t, 2 f]` has the columns of gate, then those of up. `form`: that of `act`.
    Swiglu "swiglu": act [t, f] {
        act: Out<'a> [t, f] codes_if(form.is_codes()),
        gate_up: In<'a> [t, 2 * f],
        form: OutputForm<'a> [1] f32,
    }

    /// Gradients of [`Swiglu`] in place: `gate_up` becomes its own gradient, of `dact [t, f]`. `largest [1]` (f32): if it is given, the
    /// largest magnitude of this gradient, as [`super::AbsMax`] finds it.
    SwigluBackward "swiglu_backward": gate_up, dact [t, f] {
        gate_up: Out<'a> [t, 2 * f] changes,
        dact: In<'a> [t, f],
        largest: Option<Out<'a>> [1] f32,
    }
}

impl Contract for Swiglu<'_> {}

impl Contract for SwigluBackward<'_> {}
