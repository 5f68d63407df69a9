//! The short causal convolution in front of the gated delta rule.

use crate::case::Case;
use crate::compare::{Expected, Rule};
use crate::device::{Device, Start, Tensor as OnDevice, gradient_starts};
use crate::gated_delta::{Documents, sigmoid};
use crate::host::Host;
use crate::layout::COLUMNS;
use crate::oracle::{add, constant, gradients, values, variable};
use candle_core::{DType as CandleDType, Device as CandleDevice, Result, Tensor};
use kernels::{KernelError, ShortConvolution, ShortConvolutionBackward};
use memory::DType;

#[derive(Debug)]
struct Convolution {
    dtype: DType,
    gradient: DType,
    start: Start,
    /// Sequences, and tokens of each.
    sizes: [usize; 2],
    columns: usize,
    taps: usize,
    documents: Documents,
}

impl Convolution {
    /// `x`, the weight, the gradient of the output, and what the weight's gradient is added to.
    fn tensors(&self) -> [Host; 4] {
        let rows = [self.sizes[0] * self.sizes[1], self.columns];
        [
            Host::random(self.dtype, rows, 1.0, 1),
            Host::random(self.dtype, [self.columns, self.taps], 1.0, 2),
            Host::random(self.dtype, rows, 1.0, 3),
            Host::random(self.gradient, [self.columns, self.taps], 1.0, 4),
        ]
    }

    /// `x` so many tokens before each, where that is a token of its document, and 0 elsewhere.
    fn before(&self, x: &Tensor, back: usize) -> Result<Tensor> {
        let (rows, cpu) = (self.sizes[0] * self.sizes[1], &CandleDevice::Cpu);
        let firsts = self.documents.firsts(self.sizes).into_iter().enumerate();
        let sees = firsts.map(|(token, first)| f64::from(token % self.sizes[1] >= first + back));
        let sees = Tensor::from_vec(sees.collect::<Vec<_>>(), (rows, 1), cpu)?;
        let none = Tensor::zeros((back.min(rows), self.columns), CandleDType::F64, cpu)?;
        let kept = x.narrow(0, 0, rows.saturating_sub(back))?;
        Tensor::cat(&[&none, &kept], 0)?.broadcast_mul(&sees)
    }

    fn oracle(&self) -> Result<[Vec<f64>; 3]> {
        let [x, weight, dout, earlier] = self.tensors();
        let (x, weight) = (variable(&x)?, variable(&weight)?);
        let taps = (0..self.taps).map(|back| {
            let tap = weight.narrow(1, self.taps - 1 - back, 1)?.t()?;
            self.before(&x, back)?.broadcast_mul(&tap)
        });
        let u = taps
            .reduce(|a, b| a? + b?)
            .expect("there is a tap at least")?;
        let out = (&u * sigmoid(&u)?)?;
        let found = gradients(&out, &constant(&dout)?, &[&x, &weight])?;
        let [dx, dweight] = found.try_into().unwrap();
        let dweight = add(dweight, &self.start.values(&earlier));
        Ok([values(&out)?, dx, dweight])
    }
}

impl Case for Convolution {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let [x, weight, dout, earlier] = self.tensors();
        let (rows, columns, seq) = (x.dims[0], self.columns, self.sizes[1]);
        let documents = self.documents.put(device, self.sizes);
        let documents = || documents.as_ref().map(OnDevice::view);
        let mut out = device.room(self.dtype, [rows, columns]);
        let with_gaps = device.put(&COLUMNS.around(&x));
        let x = || COLUMNS.view(with_gaps.view());
        let [weight, dout] = [&weight, &dout].map(|host| device.put(host));
        device.run(ShortConvolution {
            out: out.view_mut(),
            x: x(),
            weight: weight.view(),
            seq,
            documents: documents(),
        })?;
        let mut dx = device.put(&COLUMNS.stored(self.dtype, [rows, columns], 5));
        let mut dweight = device.start(self.start, &earlier);
        let earlier = device.put(&earlier);
        device.run(ShortConvolutionBackward {
            dx: COLUMNS.view_mut(dx.view_mut()),
            dweight: dweight.view_mut(),
            init: self.start.init(&earlier),
            dout: dout.view(),
            x: x(),
            weight: weight.view(),
            seq,
            documents: documents(),
        })?;
        Ok(vec![
            device.take(&out),
            COLUMNS.take(device, &dx),
            device.take(&dweight),
        ])
    }

    fn expected(&self) -> Vec<Expected> {
        let [out, dx, dweight] = self.oracle().unwrap();
        vec![
            Expected::new("short_convolution: out", out, Rule::Standard),
            Expected::new("short_convolution_backward: dx", dx, Rule::Standard),
            Expected::new(
                "short_convolution_backward: dweight",
                dweight,
                Rule::Standard,
            ),
        ]
    }
}

/// Sequences and tokens, columns and taps, and lengths of documents.
type Sizes = ([usize; 2], [usize; 2], &'static [usize]);

/// Sequences of one token, and with less tokens than taps; documents of fewer tokens than taps, and long ones; as many columns as a block has,
/// and others.
pub fn cases(dtype: DType) -> Vec<Box<dyn Case>> {
    let starts: Vec<_> = gradient_starts()
        .filter(|(gradient, _)| dtype == DType::BF16 || *gradient == dtype)
        .collect();
    let all: [Sizes; 7] = [
        ([1, 1], [1, 4], &[]),
        ([2, 63], [63, 1], &[3, 1, 60]),
        ([3, 5], [64, 8], &[]),
        ([2, 65], [130, 4], &[64, 70, 1]),
        ([2, 65], [256, 4], &[]),
        ([1, 200], [300, 3], &[3, 1, 60, 64, 7]),
        ([9, 40], [33, 8], &[1, 2, 5, 30]),
    ];
    let all = all.into_iter().enumerate();
    let case = |(number, (sizes, [columns, taps], lengths)): (usize, Sizes)| -> Box<dyn Case> {
        let (gradient, start) = starts[number % starts.len()];
        Box::new(Convolution {
            dtype,
            gradient,
            start,
            sizes,
            columns,
            taps,
            documents: Documents::of(lengths),
        })
    };
    all.map(case).collect()
}
