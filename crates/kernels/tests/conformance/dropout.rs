//! Dropout, alone and between a bias and a residual.

use crate::DTYPES;
use crate::case::{Case, run};
use crate::compare::{Expected, Rule};
use crate::device::{Device, Tensor, computing};
use crate::host::Host;
use kernels::operation::{self, AddBias, DropoutScale};
use kernels::random::random_u32;
use kernels::{Dropout, KernelError};
use memory::DType;
use std::ops::Range;

/// The dropout of a case.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropped {
    pub probability: f32,
    pub key: u64,
}

/// What a device is told of it: the key lies there.
pub struct Placed(Option<(f32, Tensor)>);

impl Dropped {
    pub fn put(dropped: Option<Dropped>, device: &Device) -> Placed {
        Placed(dropped.map(|Dropped { probability, key }| {
            let halves = [key as u32, (key >> 32) as u32].map(f64::from);
            let key = device.put(&Host::new(DType::U32, [2], halves));
            (probability, key)
        }))
    }
}

impl Placed {
    pub fn view(&self) -> Option<Dropout<'_>> {
        let placed = self.0.as_ref();
        placed.map(|(probability, key)| Dropout {
            probability: *probability,
            key: key.view(),
        })
    }
}

/// The factor on the element of an index.
pub fn kept(dropped: Option<Dropped>, index: u64) -> f64 {
    let Some(Dropped { probability, key }) = dropped else {
        return 1.0;
    };
    let (probability, number) = (f64::from(probability), f64::from(random_u32(key, index)));
    if number / 2f64.powi(32) < probability {
        0.0
    } else {
        1.0 / (1.0 - probability)
    }
}

/// Both operations on elements of the same indices.
#[derive(Debug)]
struct BiasDropoutAdd {
    dtype: DType,
    tokens: usize,
    width: usize,
    bias: bool,
    dropout: Option<Dropped>,
    scale: f32,
    residual: bool,
}

impl BiasDropoutAdd {
    /// `out` as it is found, the bias, the residual, and a gradient.
    fn tensors(&self) -> [Host; 4] {
        let dims = [self.tokens, self.width];
        [
            Host::random(self.dtype, dims, 1.0, 1),
            Host::random(self.dtype, [self.width], 1.0, 2),
            Host::random(self.dtype, dims, 1.0, 3),
            Host::random(self.dtype, dims, 1.0, 4),
        ]
    }
}

impl Case for BiasDropoutAdd {
    fn run(&self, device: &Device) -> Result<Vec<Host>, KernelError> {
        let [mut out, bias, residual, dy] = self.tensors().map(|host| device.put(&host));
        let placed = Dropped::put(self.dropout, device);
        device.run(operation::BiasDropoutAdd {
            out: out.view_mut(),
            bias: self.bias.then(|| bias.view()),
            dropout: placed.view(),
            first: 0,
            scale: self.scale,
            residual: self.residual.then(|| residual.view()),
        })?;
        let mut dx = device.room(self.dtype, [self.tokens, self.width]);
        device.run(DropoutScale {
            out: dx.view_mut(),
            x: dy.view(),
            dropout: placed.view(),
            first: 0,
            scale: self.scale,
        })?;
        Ok([out, dx].iter().map(|tensor| device.take(tensor)).collect())
    }

    fn expected(&self) -> Vec<Expected> {
        let [out, bias, residual, dy] = self.tensors().map(|host| host.values());
        let factors =
            (0..out.len() as u64).map(|index| f64::from(self.scale) * kept(self.dropout, index));
        let factors: Vec<f64> = factors.collect();
        let element = |index: usize| {
            let bias = if self.bias {
                bias[index % self.width]
            } else {
                0.0
            };
            let residual = if self.residual { residual[index] } else { 0.0 };
            residual + factors[index] * (out[index] + bias)
        };
        let sums = (0..out.len()).map(element).collect();
        let dx = dy.iter().zip(&factors).map(|(dy, factor)| dy * factor);
        vec![
            Expected::new("bias_dropout_add", sums, Rule::Standard),
            Expected::new("dropout_scale", dx.collect(), Rule::Standard),
        ]
    }
}

/// Nothing, all and each of what may be added.
const ADDENDS: [[bool; 2]; 4] = [[true, true], [true, false], [false, true], [false, false]];

const KEY: u64 = 0x1234_5678_9abc_def0;

pub fn cases(dtype: DType) -> Vec<Box<dyn Case>> {
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    let sizes = [
        (1, 1),
        (1, 131),
        (37, 131),
        (37, 1000),
        (400, 48),
        (3, 20_000),
    ];
    for (tokens, width) in sizes {
        for probability in [None, Some(0.1), Some(0.5)] {
            for [bias, residual] in ADDENDS {
                for scale in [1.0, 0.22] {
                    cases.push(Box::new(BiasDropoutAdd {
                        dtype,
                        tokens,
                        width,
                        bias,
                        dropout: probability.map(|probability| Dropped {
                            probability,
                            key: KEY,
                        }),
                        scale,
                        residual,
                    }));
                }
            }
        }
    }
    cases
}

/// A case of some thousand elements.
fn example(dtype: DType, dropout: Option<Dropped>, [bias, residual]: [bool; 2]) -> BiasDropoutAdd {
    BiasDropoutAdd {
        dtype,
        tokens: 37,
        width: 131,
        bias,
        dropout,
        scale: 1.0,
        residual,
    }
}

#[test]
fn a_dropout_of_nothing_changes_no_bit() {
    let dropout = |probability| {
        Some(Dropped {
            probability,
            key: 7,
        })
    };
    for dtype in DTYPES {
        for device in computing(dtype) {
            for addends in ADDENDS {
                let [none, nothing, some] = [None, dropout(0.0), dropout(0.01)]
                    .map(|dropout| run(&example(dtype, dropout, addends), &device));
                assert!(nothing[0] == none[0], "{}: {addends:?}", device.name);
                assert!(some[0] != none[0], "{}: {addends:?}", device.name);
            }
        }
    }
}

/// One operation for what were two, and the same bits.
#[test]
fn a_bias_alone_is_add_bias() {
    for dtype in DTYPES {
        for device in computing(dtype) {
            let case = example(dtype, None, [true, false]);
            let [mut out, bias, _, _] = case.tensors().map(|host| device.put(&host));
            let add_bias = AddBias {
                out: out.view_mut(),
                bias: bias.view().into(),
            };
            device.run(add_bias).unwrap();
            assert!(
                device.take(&out) == run(&case, &device)[0],
                "{}",
                device.name
            );
        }
    }
}

/// Rows of many ones, and how many there are in each.
const ONES: [usize; 2] = [100, 403];

/// Which of some rows of many ones are kept, forward and backward.
fn mask(device: &Device, dropped: Dropped, rows: Range<usize>) -> Vec<bool> {
    let placed = Dropped::put(Some(dropped), device);
    let dropout = placed.view().expect("something is dropped");
    let (first, dims) = (rows.start * ONES[1], [rows.len(), ONES[1]]);
    let ones = Host::new(DType::F32, dims, vec![1.0; dims[0] * dims[1]]);
    let (mut out, dy) = (device.put(&ones), device.put(&ones));
    let mut dx = device.room(DType::F32, dims);
    let forward = operation::BiasDropoutAdd {
        out: out.view_mut(),
        bias: None,
        dropout: Some(dropout),
        first,
        scale: 1.0,
        residual: None,
    };
    device.run(forward).unwrap();
    let backward = DropoutScale {
        out: dx.view_mut(),
        x: dy.view(),
        dropout: Some(dropout),
        first,
        scale: 1.0,
    };
    device.run(backward).unwrap();
    let [forward, backward] = [out, dx].map(|tensor| device.take(&tensor));
    assert!(forward == backward, "{}: one mask both ways", device.name);
    let kept = forward.values().into_iter().map(|value| value != 0.0);
    kept.collect()
}

/// The share of what is dropped is the probability, within four standard deviations, and so is that of what two keys
/// drop together its square.
#[test]
fn keys_name_masks_of_the_right_rate() {
    for device in computing(DType::F32) {
        for probability in [0.1f32, 0.5, 0.9] {
            let dropout = |key| Dropped { probability, key };
            let masks = [KEY, KEY, KEY + 1].map(|key| mask(&device, dropout(key), 0..ONES[0]));
            let [first, again, other] = &masks;
            assert!(first == again && first != other, "{}", device.name);
            let near = |dropped: usize, share: f64| {
                let draws = first.len() as f64;
                let deviation = (draws * share * (1.0 - share)).sqrt();
                let off = (dropped as f64 - draws * share).abs() / deviation;
                assert!(
                    off < 4.0,
                    "{}: {share} is {off} deviations off",
                    device.name
                );
            };
            let share = f64::from(probability);
            for mask in [first, other] {
                near(mask.iter().filter(|kept| !**kept).count(), share);
            }
            let pairs = first.iter().zip(other);
            near(pairs.filter(|(a, b)| !**a && !**b).count(), share * share);
        }
    }
}

#[test]
fn rows_alone_lose_what_they_lose_in_the_whole() {
    let dropout = Dropped {
        probability: 0.5,
        key: KEY,
    };
    for device in computing(DType::F32) {
        let whole = mask(&device, dropout, 0..ONES[0]);
        for rows in [1..2, 37..ONES[0]] {
            let elements = rows.start * ONES[1]..rows.end * ONES[1];
            let alone = mask(&device, dropout, rows);
            assert!(alone == whole[elements], "{}", device.name);
            assert!(alone != whole[..alone.len()], "{}", device.name);
        }
    }
}
