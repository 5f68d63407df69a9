//! Root-mean-square normalisation, forward and backward.

use crate::DTYPES;
use crate::case::Case;
use crate::compare::{Expected, Rule};
use crate::device::{Device, Start, computing};
use crate::host::Host;
use crate::largest::with_codes;
use crate::oracle::{add, constant, gradients, values, variable};
use candle_core::{Result, Tensor};
use kernels::{KernelError, OutputForm, RmsNormBackward};
use memory::DType;

#[derive(Debug)]
struct RmsNorm {
    dtype: DType,
    /// Type of the weight's gradient.
    gradient: DType,
    tokens: usize,
    hidden: usize,
    /// Largest of the input's entries: where it is small, `eps` counts.
    range: f64,
    plus_one: bool,
    dx_start: Start,
    dweight_start: Start,
}

const EPS: f32 = 1e-5;

struct Tensors {
    x: Host,
    weight: Host,
    dy: Host,
    earlier_dx: Host,
    earlier_dweight: Host,
}

struct Oracle {
    y: Vec<f64>,
    rstd: Vec<f64>,
    dx: Vec<f64>,
    dweight: Vec<f64>,
}

impl RmsNorm {
    fn tensors(&self) -> Tensors {
        let RmsNorm {
            dtype,
            gradient,
            tokens,
            hidden,
            range,
            ..
        } = *self;
        Tensors {
            x: Host::random(dtype, [tokens, hidden], range, 1),
            weight: Host::random(dtype, [hidden], 2.0, 2),
            dy: Host::random(dtype, [tokens, hidden], 1.0, 3),
            earlier_dx: Host::random(dtype, [tokens, hidden], 1.0, 4),
            earlier_dweight: Host::random(gradient, [hidden], 1.0, 5),
        }
    }

    fn oracle(&self) -> Result<Oracle> {
        let tensors = self.tensors();
        let (x, weight) = (variable(&tensors.x)?, variable(&tensors.weight)?);
        let mean_square: Tensor = (x.sqr()?.sum_keepdim(1)? / self.hidden as f64)?;
        let rstd = (mean_square + f64::from(EPS))?.sqrt()?.recip()?;
        let factor = (weight.as_tensor() + f64::from(u8::from(self.plus_one)))?;
        let y = x.broadcast_mul(&rstd)?.broadcast_mul(&factor)?;
        let mut found = gradients(&y, &constant(&tensors.dy)?, &[&x, &weight])?;
        let dweight = add(
            found.remove(1),
            &self.dweight_start.values(&tensors.earlier_dweight),
        );
        let dx = add(found.remove(0), &self.dx_start.values(&tensors.earlier_dx));
        Ok(Oracle {
            y: values(&y)?,
            rstd: values(&rstd)?,
            dx,
            dweight,
        })
    }
}

impl Case for RmsNorm {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let tensors = self.tensors();
        let [x, weight, dy] =
            [&tensors.x, &tensors.weight, &tensors.dy].map(|host| device.put(host));
        let mut rstd = device.room(DType::F32, [self.tokens]);
        let of = (self.dtype, [self.tokens, self.hidden]);
        let y = with_codes(device, of, |y, form| {
            // Each call writes its own.
            rstd = device.room(DType::F32, [self.tokens]);
            device.run(kernels::RmsNorm {
                y: Some(y),
                rstd: Some(rstd.view_mut()),
                form,
                x: x.view(),
                weight: weight.view(),
                plus_one: self.plus_one,
                eps: EPS,
            })
        })?;
        let mut dx = device.start(self.dx_start, &tensors.earlier_dx);
        let mut dweight = device.start(self.dweight_start, &tensors.earlier_dweight);
        let (earlier_dx, earlier_dweight) = (
            device.put(&tensors.earlier_dx),
            device.put(&tensors.earlier_dweight),
        );
        device.run(RmsNormBackward {
            dx: dx.view_mut(),
            dx_init: self.dx_start.init(&earlier_dx),
            dweight: dweight.view_mut(),
            dweight_init: self.dweight_start.init(&earlier_dweight),
            dy: dy.view(),
            x: x.view(),
            weight: weight.view(),
            plus_one: self.plus_one,
            rstd: rstd.view(),
        })?;
        let [rstd, dx, dweight] = [&rstd, &dx, &dweight].map(|tensor| device.take(tensor));
        Ok(vec![y, rstd, dx, dweight])
    }

    fn expected(&self) -> Vec<Expected> {
        let Oracle {
            y,
            rstd,
            dx,
            dweight,
        } = self.oracle().unwrap();
        vec![
            Expected::new("rms_norm: y", y, Rule::Standard),
            Expected::new("rms_norm: rstd", rstd, Rule::Standard),
            Expected::new("rms_norm_backward: dx", dx, Rule::Standard),
            Expected::new("rms_norm_backward: dweight", dweight, Rule::Standard),
        ]
    }
}

pub fn cases(dtype: DType) -> Vec<Box<dyn Case>> {
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    let (replace, accumulate) = (Start::Overwrite, Start::Accumulate);
    let starts = [
        [replace, replace],
        [accumulate, accumulate],
        [replace, accumulate],
        [accumulate, replace],
    ];
    let sizes = [
        (1, 48),
        (37, 48),
        (37, 288),
        (150, 288),
        (400, 131),
        (1700, 128),
        (37, 1001),
        (18, 5120),
        (3, 5001),
        (18, 8200),
        (2, 8201),
        (3, 20_000),
    ];
    for (index, (tokens, hidden)) in sizes.into_iter().enumerate() {
        for (turn, [dx_start, dweight_start]) in [starts[index % 4], starts[(index + 1) % 4]]
            .into_iter()
            .enumerate()
        {
            // Of much, one distribution for each way to start: it is there for its size.
            let all = [(2.0, false), (1e-3, false), (2.0, true)];
            let some = match tokens * hidden > 30_000 {
                true => &[all[turn], all[2]][..],
                false => &all[..],
            };
            for ((range, plus_one), gradient) in some
                .iter()
                .flat_map(|of| DTYPES.map(|gradient| (*of, gradient)))
            {
                cases.push(Box::new(RmsNorm {
                    dtype,
                    gradient,
                    tokens,
                    hidden,
                    range,
                    plus_one,
                    dx_start,
                    dweight_start,
                }));
            }
        }
    }
    cases
}

/// y, where 1 + weight is the factor.
fn plus_one(device: &Device, x: &Host, weight: &Host) -> Host {
    let mut y = device.room(x.dtype, x.dims);
    let called = device.run(kernels::RmsNorm {
        y: Some(y.view_mut()),
        rstd: None,
        form: OutputForm::Values,
        x: device.put(x).view(),
        weight: device.put(weight).view(),
        plus_one: true,
        eps: EPS,
    });
    called.unwrap();
    device.take(&y)
}

/// In bf16, 1 + weight would lose most of a small weight.
#[test]
fn one_is_added_in_f32_and_y_is_rounded_once() {
    let x = Host::random(DType::BF16, [37, 288], 2.0, 1);
    let weight = Host::random(DType::BF16, [288], 0.1, 2);
    let [wide_x, wide_weight] =
        [&x, &weight].map(|host| Host::new(DType::F32, host.dims, host.values()));
    for device in computing(DType::BF16) {
        let exact = plus_one(&device, &wide_x, &wide_weight);
        let expected = Host::new(DType::BF16, exact.dims, exact.values());
        let got = plus_one(&device, &x, &weight);
        assert!(got == expected, "{}", device.name);
    }
}
