//! Products: every operand layout, every initial value, every mix of types, sizes above every block.

use crate::case::Case;
use crate::compare::{Expected, Rule};
use crate::device::{Device, Start};
use crate::host::Host;
use crate::layout::{COLUMNS, Layout, PLAIN, TRANSPOSED, TRANSPOSED_COLUMNS};
use crate::linear::Linear;
use crate::oracle::{add, constant, values};
use candle_core::Result;
use kernels::{KernelError, Matmul, Target};
use memory::DType;

/// A bias, and how it lies: cuBLASLt adds one that is aligned, an operation of ours another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bias {
    None,
    Aligned,
    Misaligned,
}

#[derive(Debug)]
pub struct Product {
    /// m, k, n.
    pub sizes: [usize; 3],
    /// Types of `out`, `a`, `b`.
    pub dtypes: [DType; 3],
    pub layouts: [Layout; 2],
    /// How the output lies: not transposed.
    pub out: Layout,
    pub bias: Bias,
    pub start: Start,
    pub seed: u64,
}

impl Product {
    fn operands(&self) -> [Host; 2] {
        let [m, k, n] = self.sizes;
        let a = self.layouts[0].stored(self.dtypes[1], [m, k], self.seed);
        let b = self.layouts[1].stored(self.dtypes[2], [k, n], self.seed + 1);
        [a, b]
    }

    /// A bias is made with an element before it, to be misaligned by.
    fn bias(&self) -> Host {
        Host::random(self.dtypes[0], [1 + self.sizes[2]], 3.0, self.seed + 3)
    }

    fn initial(&self) -> Host {
        let [m, _, n] = self.sizes;
        Host::random(self.dtypes[0], [m, n], 2.0, self.seed + 2)
    }

    /// Whether a row of the output or of an operand begins at no multiple of eight elements.
    fn has_odd_rows(&self) -> bool {
        let [m, k, n] = self.sizes;
        let columns = |layout: Layout, [rows, columns]: [usize; 2]| match layout.transposed {
            true => (rows, layout.margin),
            false => (columns, layout.margin),
        };
        let [a, b] = self.layouts;
        let all = [
            columns(a, [m, k]),
            columns(b, [k, n]),
            columns(self.out, [m, n]),
        ];
        all.iter()
            .any(|(columns, margin)| columns % 8 != 0 || margin % 8 != 0)
    }

    /// The product, and the same of absolute values.
    fn oracle(&self) -> Result<[Vec<f64>; 2]> {
        let [a, b] = self.operands();
        let a = self.layouts[0].view_of_oracle(&constant(&a)?)?;
        let b = self.layouts[1].view_of_oracle(&constant(&b)?)?;
        Ok([
            values(&a.matmul(&b)?)?,
            values(&a.abs()?.matmul(&b.abs()?)?)?,
        ])
    }
}

impl Case for Product {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let (operands, initial) = (self.operands(), self.initial());
        let [a, b] = [device.put(&operands[0]), device.put(&operands[1])];
        let mut out = device.put(&self.out.around(&initial));
        let residual = device.put(&initial);
        let bias = device.put(&self.bias());
        let aligned = Host::new(
            self.dtypes[0],
            [self.sizes[2]],
            self.bias().values().split_off(1),
        );
        let aligned = device.put(&aligned);
        let (a, b) = (
            self.layouts[0].view(a.view()),
            self.layouts[1].view(b.view()),
        );
        device.run(Matmul {
            out: self.out.view_mut(out.view_mut()),
            a,
            b,
            bias: match self.bias {
                Bias::None => None,
                Bias::Aligned => Some(aligned.view()),
                Bias::Misaligned => Some(bias.view().rows(1..1 + self.sizes[2])),
            },
            init: self.start.init(&residual),
        })?;
        Ok(vec![self.out.take(device, &out)])
    }

    fn expected(&self) -> Vec<Expected> {
        let [product, sizes] = self.oracle().unwrap();
        let mut out = add(product, &self.start.values(&self.initial()));
        if self.bias != Bias::None {
            let bias = self.bias().values().split_off(1);
            let places = out.iter_mut().zip(bias.iter().cycle());
            places.for_each(|(out, bias)| *out += bias);
        }
        let mut expected = Expected::new("matmul", out, Rule::Standard);
        // Few enough entries may all cancel.
        if self.sizes[0] * self.sizes[2] < 64 {
            // With what is added, of at most 2 and 3.
            let added = if self.bias == Bias::None { 0.0 } else { 5.0 };
            let largest = sizes.into_iter().fold(0.0, f64::max);
            expected = expected.with_terms(largest + added);
        }
        let [out_dtype, a, b] = self.dtypes;
        let is_mixed = a != b || self.dtypes == [DType::BF16, DType::F32, DType::F32];
        // Seen with cuBLASLt 13.1 on an H200: it rounds to bf16 before it adds the bias where a row is no multiple of 16 bytes.
        let is_odd = out_dtype == DType::BF16 && self.has_odd_rows();
        let is_rounded_before =
            self.bias == Bias::Misaligned || self.bias != Bias::None && (is_mixed || is_odd);
        vec![match is_rounded_before {
            true => expected.with_exception(Target::Cuda, Rule::Chained),
            false => expected,
        }]
    }
}

/// Above the row block of f32, and above tiles in every direction at once; a token alone; odd sizes.
pub const SIZES: [[usize; 3]; 10] = [
    [1, 1, 1],
    [1, 48, 131],
    [131, 37, 1],
    [1, 700, 1],
    [37, 48, 131],
    [37, 288, 48],
    [2049, 20, 48],
    [4100, 7, 3],
    [300, 1100, 600],
    [257, 513, 513],
];

pub fn cases(dtype: DType) -> Vec<Box<dyn Case>> {
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    let starts = [Start::Overwrite, Start::Accumulate, Start::Add];
    for (seed, sizes) in SIZES.into_iter().enumerate() {
        let (start, seed) = (starts[seed % 3], 10 * seed as u64);
        cases.push(Box::new(Product {
            sizes,
            dtypes: [dtype; 3],
            layouts: [PLAIN; 2],
            out: PLAIN,
            bias: Bias::None,
            start,
            seed,
        }));
    }
    let layouts = [PLAIN, TRANSPOSED, COLUMNS, TRANSPOSED_COLUMNS];
    for (index, layouts) in layouts
        .into_iter()
        .flat_map(|a| layouts.map(|b| [a, b]))
        .enumerate()
    {
        let (start, seed) = (starts[index % 3], 1000 + index as u64);
        for sizes in [[37, 48, 131], [260, 520, 530]] {
            cases.push(Box::new(Product {
                sizes,
                dtypes: [dtype; 3],
                layouts,
                out: PLAIN,
                bias: Bias::None,
                start,
                seed,
            }));
        }
    }
    for start in starts {
        cases.push(Box::new(Product {
            sizes: [300, 530, 520],
            dtypes: [dtype; 3],
            layouts: [PLAIN, TRANSPOSED],
            out: PLAIN,
            bias: Bias::None,
            start,
            seed: 2000,
        }));
        for (bias, out) in [Bias::None, Bias::Aligned, Bias::Misaligned]
            .into_iter()
            .flat_map(|bias| [PLAIN, COLUMNS].map(|out| (bias, out)))
        {
            for sizes in [[1, 48, 131], [37, 48, 1], [70, 20, 520]] {
                cases.push(Box::new(Product {
                    sizes,
                    dtypes: [dtype; 3],
                    layouts: [PLAIN, TRANSPOSED],
                    out,
                    bias,
                    start,
                    seed: 2500,
                }));
            }
        }
    }
    if dtype == DType::BF16 {
        let both = [DType::F32, DType::BF16];
        let mixes = both
            .map(|out| both.map(|a| both.map(|b| [out, a, b])))
            .into_iter()
            .flatten()
            .flatten();
        for (dtypes, start) in mixes.flat_map(|dtypes| starts.map(|start| (dtypes, start))) {
            let (sizes, layouts) = ([65, 530, 48], [TRANSPOSED, PLAIN]);
            let biased = (COLUMNS, Bias::Aligned);
            let biased = Some(biased).filter(|_| start == Start::Add);
            for (out, bias) in [(PLAIN, Bias::None)].into_iter().chain(biased) {
                cases.push(Box::new(Product {
                    sizes,
                    dtypes,
                    layouts,
                    out,
                    bias,
                    start,
                    seed: 3000,
                }));
            }
        }
    }
    for (tokens, inputs, outputs) in [(1, 48, 131), (37, 288, 131), (600, 48, 288)] {
        cases.push(Box::new(Linear {
            dtype,
            tokens,
            inputs,
            outputs,
        }));
    }
    cases
}
