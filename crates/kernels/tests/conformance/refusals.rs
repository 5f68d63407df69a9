//! Tensors that do not fit are refused by name, before anything is written.

use crate::DTYPES;
use crate::device::{Device, Tensor, computing, planning};
use crate::host::Host;
use crate::signatures::{Argument, Signature, signatures};
use kernels::KernelError;
use memory::{DType, Dims, In};

/// An argument on the device.
struct Given {
    tensor: Tensor,
    contents: Host,
    strided: bool,
}

impl Given {
    /// A strided one is the inner columns of a wider tensor, or a square transposed.
    fn new(device: &Device, argument: &Argument, seed: u64, strided: bool) -> Given {
        let mut dims = argument.dims.clone();
        if strided && dims.len() == 2 {
            dims[1] += 2;
        }
        let dims = Dims::try_from(dims.as_slice()).unwrap();
        let contents = match argument.dtype {
            DType::I32 => {
                let count = dims.elements();
                let entries = match argument.name {
                    // A row for every expert, a choice for every row.
                    "offsets" | "row_slot" => (0..count).map(|entry| entry as f64).collect(),
                    _ => vec![1.0; count],
                };
                Host::new(DType::I32, dims, entries)
            }
            dtype => Host::random(dtype, dims, 1.0, seed),
        };
        Given {
            tensor: device.put(&contents),
            contents,
            strided,
        }
    }

    fn view(&self) -> In<'_> {
        let x = self.tensor.view();
        match (self.strided, x.dims()) {
            (true, &[_, columns]) => x.t().rows(1..columns - 1).t(),
            (true, _) => x.t(),
            (false, _) => x,
        }
    }
}

/// Calls with one argument strided, and tells whether an output changed.
fn call(
    device: &Device,
    signature: &Signature,
    strided: Option<usize>,
) -> (Result<(), KernelError>, bool) {
    let outs = (0..).zip(&signature.outs);
    let mut outs: Vec<Given> = outs
        .map(|(seed, argument)| Given::new(device, argument, seed, false))
        .collect();
    let ins = signature.ins.iter().enumerate();
    let given = |(index, argument)| {
        Given::new(device, argument, 100 + index as u64, strided == Some(index))
    };
    let ins: Vec<Given> = ins.map(given).collect();
    let views: Vec<In> = ins.iter().map(Given::view).collect();
    let mut out_views: Vec<_> = outs
        .iter_mut()
        .map(|given| given.tensor.view_mut())
        .collect();
    let called = (signature.call)(device.kernels.as_ref(), &mut out_views, &views);
    let changed = outs
        .iter()
        .any(|given| device.take(&given.tensor) != given.contents);
    (called, changed && !device.memory.is_shapes())
}

/// Refused, with the operation's name, and nothing written.
pub fn refused(device: &Device, signature: &Signature, strided: Option<usize>, mistake: &str) {
    let operation = signature.operation;
    let (called, changed) = call(device, signature, strided);
    let error = called.expect_err(&format!("{}: {operation} took {mistake}", device.name));
    assert_eq!(error.operation, operation, "{mistake}");
    assert!(
        error.to_string().starts_with(&format!("{operation}: ")),
        "{error}"
    );
    assert!(
        !changed,
        "{}: {operation} refused {mistake} after it had written",
        device.name
    );
}

/// Types that some argument of some operation has.
const EVERY_TYPE: [DType; 8] = [
    DType::F32,
    DType::BF16,
    DType::F64,
    DType::I32,
    DType::I16,
    DType::U32,
    DType::U8,
    DType::F8E4M3,
];

/// Every way in which one argument does not fit.
fn mistakes(argument: &Argument) -> Vec<(String, Argument)> {
    let name = argument.name;
    let mut mistakes = Vec::new();
    for dim in 0..argument.dims.len() {
        if argument.free_dim != Some(dim) && !argument.free_rank {
            let mut wrong = argument.clone();
            wrong.dims[dim] += 1;
            mistakes.push((format!("`{name}` larger in dimension {dim}"), wrong));
        }
    }
    for dtype in EVERY_TYPE {
        let welcome = argument.free_type && DTYPES.contains(&dtype);
        if dtype != argument.dtype && !welcome {
            mistakes.push((
                format!("`{name}` of {dtype:?}"),
                Argument {
                    dtype,
                    ..argument.clone()
                },
            ));
        }
    }
    if !argument.free_rank {
        let elements = argument.dims.iter().product();
        let dims = if argument.dims.len() == 1 {
            vec![elements, 1]
        } else {
            vec![elements]
        };
        mistakes.push((
            format!("`{name}` of another rank"),
            Argument {
                dims,
                ..argument.clone()
            },
        ));
    }
    mistakes
}

/// Everything that checks.
pub fn devices(dtype: DType) -> impl Iterator<Item = Device> {
    computing(dtype).into_iter().chain(planning(dtype))
}

#[test]
fn what_does_not_fit_is_refused() {
    let everywhere = DTYPES
        .into_iter()
        .flat_map(|dtype| devices(dtype).map(move |device| (dtype, device)));
    for (dtype, device) in everywhere {
        for index in 0..signatures(dtype, &device).len() {
            let signature = || signatures(dtype, &device).swap_remove(index);
            let Signature {
                operation,
                outs,
                ins,
                ..
            } = signature();
            let (called, changed) = call(&device, &signature(), None);
            assert_eq!(
                called,
                Ok(()),
                "{}: {operation} as it should be",
                device.name
            );
            assert!(changed || device.memory.is_shapes(), "{operation} writes");
            for (position, argument) in outs.iter().enumerate() {
                for (mistake, wrong) in mistakes(argument) {
                    let mut signature = signature();
                    signature.outs[position] = wrong;
                    refused(&device, &signature, None, &mistake);
                }
            }
            for (position, argument) in ins.iter().enumerate() {
                for (mistake, wrong) in mistakes(argument) {
                    let mut signature = signature();
                    signature.ins[position] = wrong;
                    refused(&device, &signature, None, &mistake);
                }
                if matches!(argument.dims[..], [_, _] | [_, _, 5, 5]) {
                    let mistake = format!("`{}` strided", argument.name);
                    match argument.free_layout {
                        true => assert_eq!(
                            call(&device, &signature(), Some(position)).0,
                            Ok(()),
                            "{mistake}"
                        ),
                        false => refused(&device, &signature(), Some(position), &mistake),
                    }
                }
            }
        }
    }
}
