//! Builds graphs of attention by hand, the same as NVIDIA's frontend 1.32 builds.

use crate::library::{Descriptor, Value, names::*};

/// The H100 of data sheets, as cuDNN describes devices.
pub const H100: &str = r#"{"maxGridSize": [2147483647, 65535, 65535], "maxBlockSize": [1024, 1024, 64], "regsPerBlock": 65536,
"multiProcessorCount": 132, "warpSize": 32, "maxSharedMemoryPerBlock": 49152, "maxSharedMemoryPerBlockOptin": 232448,
"reservedSharedMemoryPerBlock": 1024, "maxRegistersPerSM": 65536, "maxCtasPerSM": 32, "maxThreadsPerBlock": 1024,
"maxThreadsPerSM": 2048, "pciDeviceId": 0, "isTccDriver": 0, "supportCoopLaunch": 1, "totalGlobalMem": 85017624576,
"smClockRateKHz": 1980000, "memClockRateKHz": 2619000, "memoryBusWidth": 5120, "l2CacheSize": 52428800, "cudaDeviceId": 0,
"deviceVer": 900, "driverVer": 13000, "deviceName": "NVIDIA H100 80GB HBM3"}"#;

pub const ADD: i32 = 0;
pub const MUL: i32 = 1;
pub const DIV: i32 = 6;
pub const SUB: i32 = 9;
pub const EXP: i32 = 13;
pub const LOG: i32 = 15;
pub const IDENTITY: i32 = 21;
pub const GE: i32 = 303;
pub const INDEX: i32 = 501;
pub const SELECT: i32 = 601;

/// Numbers of the tensors in a variant pack.
pub mod uid {
    pub const Q: i64 = 1;
    pub const K: i64 = 2;
    pub const V: i64 = 3;
    pub const O: i64 = 4;
    pub const LSE: i64 = 5;
    pub const D_O: i64 = 6;
    pub const D_Q: i64 = 7;
    pub const D_K: i64 = 8;
    pub const D_V: i64 = 9;
    pub const SCALE: i64 = 10;
    pub const FILL: i64 = 11;
    pub const ONE: i64 = 12;
    pub const D_Q_SUMS: i64 = 13;
    pub const ROW_SUMS: i64 = 14;
    /// Lengths of sequences.
    pub const LENGTHS: i64 = 15;
    /// Where sequences begin in a tensor, behind its own number.
    pub const BEGINS: i64 = 20;
}

#[derive(Clone, Copy)]
pub struct Shape {
    pub batch: i64,
    pub heads: i64,
    pub kv_heads: i64,
    pub seq: i64,
    pub head_dim: i64,
}

impl Shape {
    /// Rows of heads side by side: `[b, s, heads, d]` in memory.
    fn rows(&self, uid: i64, heads: i64) -> Tensor {
        let (seq, width) = (self.seq, self.head_dim);
        Tensor {
            uid,
            kind: BF16,
            dims: vec![self.batch, heads, seq, width],
            strides: vec![seq * heads * width, width, heads * width, 1],
            ..Tensor::default()
        }
    }

    pub fn q(&self, uid: i64) -> Tensor {
        self.rows(uid, self.heads)
    }

    pub fn kv(&self, uid: i64) -> Tensor {
        self.rows(uid, self.kv_heads)
    }

    pub fn row_numbers(&self, uid: i64) -> Tensor {
        Tensor::packed(uid, &[self.batch, self.heads, self.seq, 1])
    }

    pub fn scores(&self, uid: i64) -> Tensor {
        Tensor::packed(uid, &[self.batch, self.heads, self.seq, self.seq]).hidden()
    }
}

#[derive(Clone, Default)]
pub struct Tensor {
    pub uid: i64,
    pub kind: i32,
    pub dims: Vec<i64>,
    pub strides: Vec<i64>,
    pub is_virtual: bool,
    pub is_by_value: bool,
    /// The number of a list that says where sequences begin, and how many it has.
    pub begins: Option<(i64, i64)>,
}

impl Tensor {
    /// In f32, without gaps.
    pub fn packed(uid: i64, dims: &[i64]) -> Tensor {
        let mut strides = vec![1; dims.len()];
        for axis in (1..dims.len()).rev() {
            strides[axis - 1] = strides[axis] * dims[axis];
        }
        Tensor {
            uid,
            kind: F32,
            dims: dims.to_vec(),
            strides,
            ..Tensor::default()
        }
    }

    pub fn number(uid: i64) -> Tensor {
        Tensor {
            is_by_value: true,
            ..Tensor::packed(uid, &[1; 4])
        }
    }

    /// Numbers of i32.
    pub fn list(uid: i64, count: i64) -> Tensor {
        Tensor::packed(uid, &[count, 1, 1, 1]).of_kind(I32)
    }

    /// Sequences that begin where a list of their own says.
    pub fn ragged(self) -> Tensor {
        let begins = Some((uid::BEGINS + self.uid, self.dims[0] + 1));
        Tensor { begins, ..self }
    }

    pub fn hidden(self) -> Tensor {
        Tensor {
            is_virtual: true,
            ..self
        }
    }

    pub fn of_kind(self, kind: i32) -> Tensor {
        Tensor { kind, ..self }
    }

    /// The last two dimensions exchanged: the same places.
    pub fn transposed(mut self, uid: i64) -> Tensor {
        self.uid = uid;
        self.dims.swap(2, 3);
        self.strides.swap(2, 3);
        self
    }

    pub fn made(&self) -> Result<Descriptor, String> {
        let made = Descriptor::new(TENSOR)?;
        made.set(901, Value::Choice(DATA_TYPE, self.kind))?;
        made.set(902, Value::Numbers(&self.dims))?;
        made.set(903, Value::Numbers(&self.strides))?;
        made.set(906, Value::Numbers(&[self.uid]))?;
        made.set(900, Value::Numbers(&[16]))?;
        if self.is_virtual {
            made.set(907, Value::Flag(true))?;
        }
        if self.is_by_value {
            made.set(908, Value::Flag(true))?;
        }
        if let Some((uid, count)) = self.begins {
            let begins = Tensor::list(uid, count).made()?;
            made.set(913, Value::Descriptors(&[&begins]))?;
        }
        made.finalize()?;
        Ok(made)
    }
}

/// Makes a descriptor of a kind with attributes, and finalizes it.
pub fn finalized(kind: i32, attributes: &[(i32, Value)]) -> Result<Descriptor, String> {
    let made = Descriptor::new(kind)?;
    for (name, value) in attributes {
        let value = match value {
            Value::Numbers(numbers) => Value::Numbers(numbers),
            Value::Real(number) => Value::Real(*number),
            Value::Flag(flag) => Value::Flag(*flag),
            Value::Choice(kind, choice) => Value::Choice(*kind, *choice),
            Value::Text(text) => Value::Text(text),
            Value::Pointers(pointers) => Value::Pointers(pointers),
            Value::Descriptors(descriptors) => Value::Descriptors(descriptors),
        };
        made.set(*name, value)?;
    }
    made.finalize()?;
    Ok(made)
}

fn named(tensor: &Descriptor) -> [&Descriptor; 1] {
    [tensor]
}

pub fn matmul(a: &Tensor, b: &Tensor, c: &Tensor) -> Result<Descriptor, String> {
    let way = finalized(MATMUL, &[(1500, Value::Choice(DATA_TYPE, F32))])?;
    let (a, b, c) = (a.made()?, b.made()?, c.made()?);
    let operands = [(1523, &way), (1520, &a), (1521, &b), (1522, &c)];
    of_operands(OPERATION_MATMUL, &operands)
}

fn of_operands(kind: i32, operands: &[(i32, &Descriptor)]) -> Result<Descriptor, String> {
    let made = Descriptor::new(kind)?;
    for (name, operand) in operands {
        made.set(*name, Value::Descriptors(&named(operand)))?;
    }
    made.finalize()?;
    Ok(made)
}

/// `y = mode(x, b)`, or of `x` alone, or `x` where `t` and `b` elsewhere.
pub fn pointwise(mode: i32, operands: &[&Tensor], y: &Tensor) -> Result<Descriptor, String> {
    let way = Descriptor::new(POINTWISE)?;
    way.set(0, Value::Choice(POINTWISE_MODE, mode))?;
    way.set(1, Value::Choice(DATA_TYPE, F32))?;
    way.finalize()?;
    with_way(&way, operands, y)
}

/// Indices along an axis.
pub fn index(axis: i64, x: &Tensor, y: &Tensor) -> Result<Descriptor, String> {
    let way = Descriptor::new(POINTWISE)?;
    way.set(0, Value::Choice(POINTWISE_MODE, INDEX))?;
    way.set(1, Value::Choice(DATA_TYPE, I32))?;
    way.set(9, Value::Numbers(&[axis]))?;
    way.finalize()?;
    with_way(&way, &[x], y)
}

fn with_way(way: &Descriptor, operands: &[&Tensor], y: &Tensor) -> Result<Descriptor, String> {
    let made: Vec<Descriptor> = operands
        .iter()
        .map(|operand| operand.made())
        .collect::<Result<_, _>>()?;
    let y = y.made()?;
    let mut all = vec![(750, way), (753, &y)];
    all.extend([751, 752, 758].into_iter().zip(&made));
    of_operands(OPERATION_POINTWISE, &all)
}

pub fn reduction(x: &Tensor, y: &Tensor) -> Result<Descriptor, String> {
    reduction_by(0, x, y)
}

/// A reduction: mode 0 sums, mode 3 takes the greatest.
pub fn reduction_by(way: i32, x: &Tensor, y: &Tensor) -> Result<Descriptor, String> {
    let way = finalized(
        REDUCTION,
        &[
            (1601, Value::Choice(DATA_TYPE, F32)),
            (1600, Value::Choice(REDUCTION_OPERATOR, way)),
        ],
    )?;
    let (x, y) = (x.made()?, y.made()?);
    of_operands(OPERATION_REDUCTION, &[(1612, &way), (1610, &x), (1611, &y)])
}

pub fn reshape(x: &Tensor, y: &Tensor) -> Result<Descriptor, String> {
    let (x, y) = (x.made()?, y.made()?);
    of_operands(OPERATION_RESHAPE, &[(2200, &x), (2201, &y)])
}

pub fn band_mask(x: &Tensor, y: &Tensor) -> Result<Descriptor, String> {
    let (x, fill, y) = (x.made()?, Tensor::number(uid::FILL).made()?, y.made()?);
    finalized(
        OPERATION_BAND_MASK,
        &[
            (3000, Value::Descriptors(&[&x])),
            (3005, Value::Descriptors(&[&fill])),
            (3006, Value::Descriptors(&[&y])),
            (3007, Value::Choice(POINTWISE_MODE, GE)),
        ],
    )
}

pub fn graph(operations: &[Descriptor]) -> Result<Descriptor, String> {
    let named: Vec<&Descriptor> = operations.iter().collect();
    finalized(OPERATION_GRAPH, &[(801, Value::Descriptors(&named))])
}

/// The forward pass as one node, with the mask as an inner graph.
pub fn forward(shape: Shape) -> Result<Descriptor, String> {
    graph(&[attention(shape, shape.q(uid::Q))?])
}

/// The node, with queries as they are described.
pub fn attention(shape: Shape, q: Tensor) -> Result<Descriptor, String> {
    attention_of(
        shape,
        [q, shape.kv(uid::K), shape.kv(uid::V), shape.q(uid::O)],
        &[],
    )
}

/// The node, with sequences that have lengths, if they are told, and begin where lists say.
pub fn ragged(shape: Shape, has_lengths: bool) -> Result<Descriptor, String> {
    let tensors = [
        shape.q(uid::Q),
        shape.kv(uid::K),
        shape.kv(uid::V),
        shape.q(uid::O),
    ];
    let lengths = Tensor::list(uid::LENGTHS, shape.batch).made()?;
    let all = [(2809, &lengths), (2810, &lengths)];
    let told = if has_lengths { &all[..] } else { &[] };
    graph(&[attention_of(shape, tensors.map(Tensor::ragged), told)?])
}

fn attention_of(
    shape: Shape,
    [q, k, v, o]: [Tensor; 4],
    lengths: &[(i32, &Descriptor)],
) -> Result<Descriptor, String> {
    let within = graph(&[band_mask(&shape.scores(100), &shape.scores(101))?])?;
    let (x, y) = (shape.scores(102).made()?, shape.scores(103).made()?);
    let lse = shape.row_numbers(uid::LSE).made()?;
    let softmax = of_operands(OPERATION_SOFTMAX, &[(3100, &x), (3101, &y), (3102, &lse)])?;
    let (q, k, v, o) = (q.made()?, k.made()?, v.made()?, o.made()?);
    let scale = Tensor::number(uid::SCALE).made()?;
    let named = [
        (2800, &q),
        (2801, &k),
        (2802, &v),
        (2803, &o),
        (2814, &softmax),
        (2805, &scale),
        (2811, &within),
    ];
    let made = Descriptor::new(OPERATION_ATTENTION)?;
    for (name, operand) in named.iter().chain(lengths) {
        made.set(*name, Value::Descriptors(&[operand]))?;
    }
    made.set(2812, Value::Numbers(&[100]))?;
    made.set(2813, Value::Numbers(&[101]))?;
    made.finalize()?;
    Ok(made)
}

/// The same from single operations: products, the mask by indices, softmax by its parts.
pub fn forward_in_parts(shape: Shape) -> Result<Descriptor, String> {
    let keys = shape.kv(0).transposed(uid::K);
    let scores = |uid| shape.scores(uid);
    let row = |uid| shape.row_numbers(uid).hidden();
    let fill = Tensor::number(uid::FILL);
    let mask = scores(104).of_kind(BOOLEAN);
    let (rows, columns) = (scores(102).of_kind(I32), scores(103).of_kind(I32));
    graph(&[
        matmul(&shape.q(uid::Q), &keys, &scores(100))?,
        pointwise(
            MUL,
            &[&scores(100), &Tensor::number(uid::SCALE)],
            &scores(101),
        )?,
        index(2, &scores(101), &rows)?,
        index(3, &scores(101), &columns)?,
        pointwise(GE, &[&rows, &columns], &mask)?,
        pointwise(SELECT, &[&scores(101), &fill, &mask], &scores(105))?,
        reduction_by(3, &scores(105), &row(106))?,
        pointwise(SUB, &[&scores(105), &row(106)], &scores(107))?,
        pointwise(EXP, &[&scores(107)], &scores(108))?,
        reduction(&scores(108), &row(109))?,
        pointwise(LOG, &[&row(109)], &row(110))?,
        pointwise(ADD, &[&row(106), &row(110)], &shape.row_numbers(uid::LSE))?,
        pointwise(DIV, &[&scores(108), &row(109)], &scores(111))?,
        matmul(&scores(111), &shape.kv(uid::V), &shape.q(uid::O))?,
    ])
}

/// The gradients, with that of queries added up in f32 of memory; or at once, where it `is_direct`.
pub fn backward(shape: Shape, is_direct: bool) -> Result<Descriptor, String> {
    let (keys, values) = (
        shape.kv(0).transposed(uid::K),
        shape.kv(0).transposed(uid::V),
    );
    let (scale, lse) = (Tensor::number(uid::SCALE), shape.row_numbers(uid::LSE));
    let scores = |uid| shape.scores(uid);
    // In bf16, with the last two dimensions exchanged: a view.
    let flipped = |uid| scores(0).transposed(uid).of_kind(BF16);
    let wide = Tensor::packed(0, &[shape.batch, shape.heads, shape.seq, shape.head_dim]);
    let full = |uid| {
        Tensor {
            uid,
            ..wide.clone()
        }
        .hidden()
        .of_kind(BF16)
    };
    let sums = Tensor {
        uid: uid::D_Q_SUMS,
        ..wide.clone()
    };
    let products = Tensor {
        uid: 120,
        ..wide.clone()
    }
    .hidden();
    let shared = shape.heads != shape.kv_heads;
    let mut operations = vec![
        pointwise(MUL, &[&shape.q(uid::D_O), &shape.q(uid::O)], &products)?,
        reduction(&products, &shape.row_numbers(121).hidden())?,
        pointwise(
            MUL,
            &[&shape.row_numbers(121).hidden(), &Tensor::number(uid::ONE)],
            &shape.row_numbers(uid::ROW_SUMS),
        )?,
        matmul(&shape.q(uid::Q), &keys, &scores(100))?,
        pointwise(MUL, &[&scores(100), &scale], &scores(101))?,
        pointwise(SUB, &[&scores(101), &lse], &scores(102))?,
        pointwise(EXP, &[&scores(103)], &scores(104))?,
        reshape(&scores(104), &flipped(105))?,
        matmul(&shape.q(uid::D_O), &values, &scores(106))?,
        pointwise(
            SUB,
            &[&scores(106), &shape.row_numbers(uid::ROW_SUMS)],
            &scores(107),
        )?,
        pointwise(MUL, &[&scores(107), &scores(104)], &scores(108))?,
        pointwise(MUL, &[&scores(108), &scale], &scores(109))?,
        reshape(&scores(109), &flipped(110))?,
        reshape(&keys, &shape.kv(111).hidden().of_kind(F32))?,
    ];
    for (left, right, whole, result) in
        [(105, uid::D_O, 112, uid::D_V), (110, uid::Q, 113, uid::D_K)]
    {
        let (left, right, result) = (flipped(left), shape.q(right), shape.kv(result));
        if shared {
            operations.push(matmul(&left, &right, &full(whole))?);
            operations.push(reduction(&full(whole), &result)?);
        } else {
            operations.push(matmul(&left, &right, &result)?);
        }
    }
    let unmoved = shape.kv(111).hidden().of_kind(F32);
    if is_direct {
        operations.push(matmul(&scores(109), &unmoved, &shape.q(uid::D_Q))?);
    } else {
        operations.push(matmul(&scores(109), &unmoved, &sums)?);
        operations.push(pointwise(IDENTITY, &[&sums], &shape.q(uid::D_Q))?);
    }
    // Last, as in the frontend: the order of operations does not matter.
    operations.push(band_mask(&scores(102), &scores(103))?);
    graph(&operations)
}

/// Tile sizes, configuration, and stages where there are any.
pub type Knobs<'a> = &'a [(i32, i64)];

/// The backward pass of Hopper whose sums are added up in order.
pub const ORDERED: Knobs = &[(40, 2), (41, 1), (24, 2), (38, 0), (27, 0), (14, 4)];

pub fn described(json: &str) -> Result<Descriptor, String> {
    finalized(DEVICE, &[(2702, Value::Text(json))])
}

/// A plan by an engine and knobs, for a described device, or the present one.
pub fn chosen(
    graph: &Descriptor,
    engine: i64,
    knobs: Knobs,
    device: Option<&Descriptor>,
) -> Result<Descriptor, String> {
    let made = Descriptor::new(ENGINE)?;
    made.set(1300, Value::Descriptors(&[graph]))?;
    made.set(1301, Value::Numbers(&[engine]))?;
    if let Some(device) = device {
        made.set(1307, Value::Descriptors(&[device]))?;
    }
    made.finalize()?;
    let choices: Vec<Descriptor> = knobs
        .iter()
        .map(|(kind, value)| {
            let kind = Value::Choice(KNOB, *kind);
            finalized(
                KNOB_CHOICE,
                &[(600, kind), (601, Value::Numbers(&[*value]))],
            )
        })
        .collect::<Result<_, _>>()?;
    let choices: Vec<&Descriptor> = choices.iter().collect();
    let configuration = finalized(
        CONFIGURATION,
        &[
            (300, Value::Descriptors(&[&made])),
            (302, Value::Descriptors(&choices)),
        ],
    )?;
    plan(&configuration, device)
}

/// A plan by the library's first choice.
pub fn heuristic(graph: &Descriptor, device: Option<&Descriptor>) -> Result<Descriptor, String> {
    let asked = Descriptor::new(HEURISTIC)?;
    asked.set(201, Value::Descriptors(&[graph]))?;
    asked.set(200, Value::Choice(HEURISTIC_MODE, 3))?;
    if let Some(device) = device {
        asked.set(204, Value::Descriptors(&[device]))?;
    }
    asked.finalize()?;
    plan(&asked.first(202, CONFIGURATION)?, device)
}

fn plan(configuration: &Descriptor, device: Option<&Descriptor>) -> Result<Descriptor, String> {
    let made = Descriptor::new(PLAN)?;
    made.set(401, Value::Descriptors(&[configuration]))?;
    if let Some(device) = device {
        made.set(407, Value::Descriptors(&[device]))?;
    }
    made.finalize()?;
    Ok(made)
}

pub fn workspace_bytes(plan: &Descriptor) -> usize {
    plan.number(402).expect("a plan knows its workspace") as usize
}
