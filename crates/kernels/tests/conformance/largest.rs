//! Operations that find the largest magnitude of what they make.

use crate::DTYPES;
use crate::device::{Device, computing};
use crate::gelu::act_and_gradient;
use crate::host::Host;
use kernels::KernelError;
use kernels::operation::{LayerNorm, OutputForm, Quantise, RmsNorm};
use memory::{DType, Dims, Out};

/// Makes a call twice: without a place for the largest magnitude of the result, and with one. Both results must have the same bits, and
/// the magnitude must be theirs. Returns the result.
pub fn with_largest(
    device: &Device,
    mut call: impl FnMut(Option<Out>) -> Result<Host, KernelError>,
) -> Result<Host, KernelError> {
    let made = call(None)?;
    let mut largest = device.put(&Host::new(DType::F32, [1], [7.0]));
    let same = call(Some(largest.view_mut()))?;
    assert!(made == same, "{}: other bits", device.name);
    let values = made.values().into_iter().map(f64::abs);
    let (expected, found) = (values.fold(0.0, larger), device.take(&largest).values()[0]);
    assert!(
        found == expected || found.is_nan() && expected.is_nan(),
        "{}: found {found}, and the largest is {expected}",
        device.name
    );
    Ok(made)
}

/// As [`with_largest`], of an operation that writes into the given output; then with its largest magnitude, and twice that, as known
/// ones: the operation's codes must be those of the result.
pub fn with_codes(
    device: &Device,
    (dtype, dims): (DType, impl Into<Dims>),
    mut call: impl FnMut(Out, OutputForm) -> Result<(), KernelError>,
) -> Result<Host, KernelError> {
    let dims = dims.into();
    let made = with_largest(device, |largest| {
        let mut y = device.room(dtype, dims);
        call(y.view_mut(), largest.into())?;
        Ok(device.take(&y))
    })?;
    let values = made.values().into_iter().map(f64::abs);
    let largest = values.fold(0.0, larger);
    let values = device.put(&made);
    for known in [largest, 2.0 * largest].map(|known| Host::new(DType::F32, [1], [known])) {
        let known = device.put(&known);
        let [mut expected, mut codes] = [(); 2].map(|()| device.room(DType::F8E4M3, dims));
        let mut scale = device.room(DType::F32, [1]);
        device.run(Quantise {
            codes: expected.view_mut(),
            scale: scale.view_mut(),
            underflows: None,
            x: values.view(),
            largest: known.view(),
        })?;
        call(codes.view_mut(), OutputForm::Codes(known.view()))?;
        // As bytes: the code of NaN is no number.
        let [expected, codes] = [&expected, &codes].map(|codes| device.take(codes));
        assert!(
            codes.bytes == expected.bytes,
            "{}: other codes",
            device.name
        );
    }
    Ok(made)
}

/// The larger of two magnitudes, above which is NaN.
fn larger(a: f64, b: f64) -> f64 {
    match a.is_nan() || a > b {
        true => a,
        false => b,
    }
}

/// Narrow rows, of which a block has several, and rows that take a block of threads several rounds. The last element is the largest, or
/// NaN, or infinite. In the last input all values are 1.2e36: past the end of a row LayerNorm would compute (0 - 1.2e36) / sqrt(eps), which
/// is not finite, and must not count.
fn inputs(dtype: DType) -> impl Iterator<Item = Host> {
    let sizes = [[3, 4], [37, 130], [2, 8200], [2, 8201]];
    let last = [1e4, f64::NAN, f64::INFINITY].map(Some);
    let all = sizes.map(|dims| last.map(|last| (dims, last)));
    let all = all.into_iter().flatten().chain([([3, 4], None)]);
    all.map(move |(dims, last)| {
        let Some(last) = last else {
            return Host::new(dtype, dims, vec![1.2e36; dims[0] * dims[1]]);
        };
        let mut values = Host::random(dtype, dims, 1.0, 1).values();
        *values.last_mut().unwrap() = last;
        Host::new(dtype, dims, values)
    })
}

#[test]
fn of_any_place_and_of_what_is_not_finite() {
    for dtype in DTYPES {
        for device in computing(dtype) {
            device.memory.set_poison(true);
            find_and_know(&device, dtype);
        }
    }
}

/// Norms and GELU find the largest magnitude of what they make, and make codes of it where they know that.
pub fn find_and_know(device: &Device, dtype: DType) {
    for host in inputs(dtype) {
        norms_and_gelu(device, &host).unwrap();
    }
}

fn norms_and_gelu(device: &Device, host: &Host) -> Result<(), KernelError> {
    let (kernels, eps) = (&device.kernels, 1e-5);
    let width = host.dims[1];
    let ones = Host::new(host.dtype, [width], vec![1.0; width]);
    let [x, weight, bias] = [host, &ones, &ones].map(|host| device.put(host));
    let of = (host.dtype, host.dims);
    with_codes(device, of, |y, form| {
        kernels.run(RmsNorm {
            y: Some(y),
            rstd: None,
            form,
            x: x.view(),
            weight: weight.view(),
            plus_one: false,
            eps,
        })
    })?;
    with_codes(device, of, |y, form| {
        kernels.run(LayerNorm {
            y: Some(y),
            mean: None,
            rstd: None,
            form,
            x: x.view(),
            weight: weight.view(),
            bias: bias.view(),
            eps,
        })
    })?;
    act_and_gradient(device, host, host)?;
    Ok(())
}
