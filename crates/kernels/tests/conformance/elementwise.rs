//! Fill, copy, bias.

use crate::DTYPES;
use crate::case::Case;
use crate::compare::{Expected, Rule};
use crate::device::{Device, Start, Tensor, gradient_starts};
use crate::host::Host;
use crate::layout::{COLUMNS, Layout, PLAIN, WIDE_COLUMNS};
use crate::oracle::{add, constant, gradients, values, variable};
use candle_core::Result;
use half::bf16;
use kernels::{AddBias, BiasBackward, ByColumns, KernelError};
use memory::DType;

#[derive(Debug)]
struct Fill {
    dtype: DType,
    elements: usize,
    value: f32,
}

impl Case for Fill {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let mut out = device.room(self.dtype, [self.elements]);
        device.run(kernels::Fill {
            out: out.view_mut(),
            value: self.value,
        })?;
        Ok(vec![device.take(&out)])
    }

    fn expected(&self) -> Vec<Expected> {
        vec![Expected::new(
            "fill",
            vec![f64::from(self.value); self.elements],
            Rule::Exact,
        )]
    }
}

#[derive(Debug)]
struct Copy {
    from: DType,
    to: DType,
    rows: usize,
    columns: usize,
    /// How the rows that are written lie, and those that are read.
    layouts: [Layout; 2],
}

/// What a conversion may get wrong: signs of zero, ties, the edges of the range, and no number at all.
const SPECIAL: [f32; 12] = [
    0.0,
    -0.0,
    1.0 + 1.0 / 256.0,
    1.0 + 3.0 / 256.0,
    1.0 + 1.0 / 256.0 + 1e-6,
    -1.0 - 1.0 / 256.0,
    f32::MAX,
    f32::MIN_POSITIVE,
    1e-40,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
];

impl Copy {
    fn x(&self) -> Host {
        let random = Host::random(DType::F32, [self.rows * self.columns], 3.0, 1).values();
        let special = SPECIAL.iter().map(|value| f64::from(*value));
        let values = special.chain(random).take(self.rows * self.columns);
        Host::new(self.from, [self.rows, self.columns], values)
    }
}

impl Case for Copy {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let [to, from] = self.layouts;
        let before = Host::new(
            self.to,
            [self.rows, self.columns],
            vec![0.5; self.rows * self.columns],
        );
        let x = device.put(&from.around(&self.x()));
        let mut out = device.put(&to.around(&before));
        device.run(kernels::Copy {
            out: to.view_mut(out.view_mut()),
            x: from.view(x.view()),
        })?;
        Ok(vec![to.take(device, &out)])
    }

    fn expected(&self) -> Vec<Expected> {
        let round = |x: f64| {
            if self.to == DType::BF16 {
                bf16::from_f32(x as f32).to_f64()
            } else {
                x
            }
        };
        let out = self.x().values().into_iter().map(round).collect();
        vec![Expected::new("copy", out, Rule::Exact)]
    }
}

/// A bias of one or several vectors forward, and backward into its gradient.
#[derive(Debug)]
struct Bias {
    dtype: DType,
    gradient: DType,
    tokens: usize,
    widths: &'static [usize],
    /// How the rows that are added to lie, and those that are summed.
    layout: Layout,
    start: Start,
}

impl Bias {
    fn tensors(&self) -> [Host; 4] {
        let Bias {
            dtype,
            gradient,
            tokens,
            widths,
            ..
        } = *self;
        let width = widths.iter().sum();
        [
            Host::random(dtype, [tokens, width], 1.0, 1),
            Host::random(dtype, [width], 1.0, 2),
            Host::random(dtype, [tokens, width], 1.0, 3),
            Host::random(gradient, [width], 1.0, 4),
        ]
    }

    /// The vectors of a bias or its gradient.
    fn parts(&self, vector: &Host) -> Vec<Host> {
        let (mut values, dtype) = (vector.values().into_iter(), vector.dtype);
        let part = |width| Host::new(dtype, [width], values.by_ref().take(width));
        self.widths.iter().copied().map(part).collect()
    }

    fn oracle(&self) -> Result<[Vec<f64>; 2]> {
        let [x, bias, dy, earlier] = self.tensors();
        let bias = variable(&bias)?;
        let y = constant(&x)?.broadcast_add(&bias)?;
        let mut found = gradients(&y, &constant(&dy)?, &[&bias])?;
        Ok([
            values(&y)?,
            add(found.remove(0), &self.start.values(&earlier)),
        ])
    }
}

impl Case for Bias {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let [x, bias, dy, earlier] = self.tensors();
        let [bias, earlier_parts] = [&bias, &earlier].map(|vector| self.parts(vector));
        let bias: Vec<Tensor> = bias.iter().map(|part| device.put(part)).collect();
        let dbias = earlier_parts.iter();
        let mut dbias: Vec<Tensor> = dbias.map(|part| device.start(self.start, part)).collect();
        let [x, dy] = [x, dy].map(|rows| self.layout.around(&rows));
        let [mut out, dy, earlier] = [x, dy, earlier].map(|host| device.put(&host));
        device.run(AddBias {
            out: self.layout.view_mut(out.view_mut()),
            bias: ByColumns::of(bias.iter().map(Tensor::view)).unwrap(),
        })?;
        device.run(BiasBackward {
            out: ByColumns::of(dbias.iter_mut().map(Tensor::view_mut)).unwrap(),
            dy: self.layout.view(dy.view()),
            init: self.start.init(&earlier),
        })?;
        let out = self.layout.take(device, &out);
        let dbias = dbias.iter().flat_map(|part| device.take(part).bytes);
        let dbias = Host {
            bytes: dbias.collect(),
            ..self.tensors()[3].clone()
        };
        Ok(vec![out, dbias])
    }

    fn expected(&self) -> Vec<Expected> {
        let [y, dbias] = self.oracle().unwrap();
        vec![
            Expected::new("add_bias", y, Rule::Standard),
            Expected::new("bias_backward", dbias, Rule::Standard),
        ]
    }
}

pub fn cases(dtype: DType) -> Vec<Box<dyn Case>> {
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    for elements in [1, 131, 40_000] {
        for value in [0.0, -0.1] {
            cases.push(Box::new(Fill {
                dtype,
                elements,
                value,
            }));
        }
    }
    for (rows, columns) in [(1, 1), (37, 131), (131, 288)] {
        let gaps = [[PLAIN, COLUMNS], [COLUMNS, PLAIN], [WIDE_COLUMNS; 2]];
        for (to, layouts) in DTYPES
            .into_iter()
            .flat_map(|to| [[PLAIN; 2]].into_iter().chain(gaps).map(move |of| (to, of)))
        {
            cases.push(Box::new(Copy {
                from: dtype,
                to,
                rows,
                columns,
                layouts,
            }));
        }
    }
    let biases: [(usize, &[usize]); 11] = [
        (1, &[48]),
        (37, &[1]),
        (37, &[131]),
        (37, &[5, 67, 1]),
        (65, &[48]),
        (65, &[32, 16]),
        (300, &[288]),
        (300, &[40, 24, 72]),
        (3000, &[20]),
        (70_000, &[3]),
        (2, &[20_000]),
    ];
    for (tokens, widths) in biases {
        let layouts = [PLAIN, COLUMNS, WIDE_COLUMNS];
        for (layout, (gradient, start)) in layouts
            .into_iter()
            .flat_map(|layout| gradient_starts().map(move |start| (layout, start)))
            .filter(|(layout, _)| *layout == PLAIN || tokens * widths[0] < 5000)
        {
            cases.push(Box::new(Bias {
                dtype,
                gradient,
                tokens,
                widths,
                layout,
                start,
            }));
        }
    }
    cases
}
