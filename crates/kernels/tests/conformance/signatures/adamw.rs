//! The optimizer, in every form of its states.

use super::{Argument, Call, Signature, argument};
use kernels::{AdamW, KernelError, Kernels, MasterOperand, MomentOperand};
use memory::{DType, In, Out};

/// More than a block, and no whole number of them.
const ELEMENTS: usize = 300;
const BLOCKS: usize = 2;

/// What stands beside the weights.
#[derive(Clone, Copy)]
enum Beside {
    Nothing,
    Master,
    Remainder,
}

/// Outputs in the order of `outs`: weights, what stands beside them, first moment, second moment.
fn call(
    (beside, quantised): (Beside, bool),
    kernels: &Kernels,
    outs: &mut [Out],
    ins: &[In],
) -> Result<(), KernelError> {
    let mut outs = outs.iter_mut().map(|out| out.reborrow());
    let mut next = || outs.next().unwrap();
    let parameters = next();
    let master = match beside {
        Beside::Nothing => MasterOperand::Parameters,
        Beside::Master => MasterOperand::F32(next()),
        Beside::Remainder => MasterOperand::Remainder(next()),
    };
    let mut moment = || match quantised {
        false => MomentOperand::Plain(next()),
        true => MomentOperand::Quantised {
            codes: next(),
            absmax: next(),
        },
    };
    kernels.run(AdamW {
        parameters,
        master,
        first_moment: moment(),
        second_moment: moment(),
        gradients: ins[0],
        rates: ins[1],
        clip: ins[2],
        key: ins[3],
        first_index: 512,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
    })
}

fn call_of(beside: Beside, quantised: bool) -> Call {
    match (beside, quantised) {
        (Beside::Nothing, false) => |k, outs, ins| call((Beside::Nothing, false), k, outs, ins),
        (Beside::Nothing, true) => |k, outs, ins| call((Beside::Nothing, true), k, outs, ins),
        (Beside::Master, false) => |k, outs, ins| call((Beside::Master, false), k, outs, ins),
        (Beside::Master, true) => |k, outs, ins| call((Beside::Master, true), k, outs, ins),
        (Beside::Remainder, false) => |k, outs, ins| call((Beside::Remainder, false), k, outs, ins),
        (Beside::Remainder, true) => |k, outs, ins| call((Beside::Remainder, true), k, outs, ins),
    }
}

fn moment(names: [&'static str; 3], quantised: bool) -> Vec<Argument> {
    let [plain, codes, absmax] = names;
    match quantised {
        false => vec![argument(plain, DType::F32, &[ELEMENTS])],
        true => vec![
            argument(codes, DType::U8, &[ELEMENTS]),
            argument(absmax, DType::F32, &[BLOCKS]),
        ],
    }
}

fn signature(dtype: DType, beside: Beside, quantised: bool) -> Signature {
    let mut outs = vec![argument("parameters", dtype, &[ELEMENTS])];
    match beside {
        // f32 and bf16 weights alone are both fine.
        Beside::Nothing => outs[0].free_type = true,
        Beside::Master => outs.push(argument("master", DType::F32, &[ELEMENTS])),
        Beside::Remainder => outs.push(argument("remainder", DType::I16, &[ELEMENTS])),
    }
    let first = ["first_moment", "first_moment.codes", "first_moment.absmax"];
    let second = [
        "second_moment",
        "second_moment.codes",
        "second_moment.absmax",
    ];
    outs.extend(moment(first, quantised));
    outs.extend(moment(second, quantised));
    Signature {
        operation: "adamw",
        outs,
        ins: vec![
            argument("gradients", DType::F32, &[ELEMENTS]).free_type(),
            argument("rates", DType::F32, &[3]),
            argument("clip", DType::F32, &[2]),
            argument("key", DType::U32, &[2]),
        ],
        call: call_of(beside, quantised),
    }
}

pub fn signatures(dtype: DType) -> Vec<Signature> {
    let beside: &[Beside] = match dtype {
        DType::F32 => &[Beside::Nothing],
        _ => &[Beside::Nothing, Beside::Master, Beside::Remainder],
    };
    let forms = beside
        .iter()
        .flat_map(|beside| [(*beside, false), (*beside, true)]);
    forms
        .map(|(beside, quantised)| signature(dtype, beside, quantised))
        .collect()
}
