//! A graph of operations in cuDNN's terms, as it is put together.
//!
//! Nothing is computed here: engines recognise the graph as a whole, and run it as one or a few kernels. What is virtual
//! never exists in memory.

use super::descriptor::{Descriptor, Refused, Value};
use super::interface::{DataType, Kind, Name, Pointwise, Raw, Reduction};
use crate::cuda::LibraryShape;

/// Operands are aligned at least so; what is leased is at 256 bytes.
const ALIGNMENT_BYTES: i64 = 16;

/// The first number of a virtual tensor.
const VIRTUAL: i64 = 100;

/// Types of tensors.
pub(super) const BF16: DataType = DataType::CUDNN_DATA_BFLOAT16;
pub(super) const F32: DataType = DataType::CUDNN_DATA_FLOAT;
pub(super) const I32: DataType = DataType::CUDNN_DATA_INT32;
pub(super) const BOOLEAN: DataType = DataType::CUDNN_DATA_BOOLEAN;

/// Numbers of the tensors that are handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i64)]
pub(super) enum Uid {
    Q = 1,
    K = 2,
    V = 3,
    Out = 4,
    Lse = 5,
    Dout = 6,
    Dq = 7,
    Dk = 8,
    Dv = 9,
    /// Factor on the scores; a number on the host.
    Scale = 10,
    /// What stands for scores above the diagonal; a number on the host.
    Masked = 11,
    /// Factor on the row sums, 1; a number on the host.
    One = 12,
    /// f32 sums of dq.
    DqSums = 13,
    /// Row sums of dout * out.
    RowSums = 14,
    /// dk of every query head, where documents are packed.
    DkOfHeads = 15,
    /// dv of every query head.
    DvOfHeads = 16,
    /// How long packed documents are.
    Lengths = 17,
    /// Where their rows of q and of the output begin.
    OutOffsets = 18,
    /// Where those of k and v do.
    KeyOffsets = 19,
    /// Where those of the statistics do.
    RowOffsets = 20,
    /// The score that the backward pass uses beyond the end of a document. It is a number on the host.
    Beyond = 21,
}

/// How a tensor of four dimensions lies in memory: batch, head, then two more.
#[derive(Clone, Copy)]
pub(super) struct Lay {
    pub(super) dims: [i64; 4],
    pub(super) strides: [i64; 4],
    /// Numbers that say where each document begins, which is then not where the strides say.
    pub(super) offsets: Option<Uid>,
}

impl Lay {
    /// `[b, s, heads, d]` in memory, seen as `[b, heads, s, d]`, with so many elements from a token to the next: q, k, v, o
    /// and their gradients.
    pub(super) fn by_token([b, heads, s, d]: [i64; 4], row: i64) -> Lay {
        Lay {
            dims: [b, heads, s, d],
            strides: [s * row, d, row, 1],
            offsets: None,
        }
    }

    /// `[b, heads, s, d]`, a head after the other: scores, statistics, sums of dq.
    pub(super) fn by_head([b, heads, s, d]: [i64; 4]) -> Lay {
        Lay {
            dims: [b, heads, s, d],
            strides: [heads * s * d, s * d, d, 1],
            offsets: None,
        }
    }

    /// Numbers, one after the other.
    fn numbers(count: i64) -> Lay {
        Lay {
            dims: [count, 1, 1, 1],
            strides: [1; 4],
            offsets: None,
        }
    }

    /// The same elements with the last two dimensions exchanged.
    pub(super) fn transposed(self) -> Lay {
        let exchanged = |[b, heads, rows, columns]: [i64; 4]| [b, heads, columns, rows];
        Lay {
            dims: exchanged(self.dims),
            strides: exchanged(self.strides),
            ..self
        }
    }
}

/// The sizes of a shape as cuDNN counts them, and elements from a row of q, k or v to the next. Where documents are packed, its
/// batch is as many as there is room for.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub(super) has_documents: bool,
    pub(super) b: i64,
    pub(super) heads: i64,
    pub(super) kv_heads: i64,
    pub(super) s: i64,
    pub(super) d: i64,
    rows: [i64; 3],
}

impl Sizes {
    pub(super) fn of(shape: LibraryShape) -> Sizes {
        let sizes = shape.sizes;
        let [b, heads, kv_heads, s, d] = [
            shape.documents.unwrap_or(sizes.batch),
            sizes.heads,
            sizes.kv_heads,
            sizes.seq,
            sizes.qk_head_dim,
        ]
        .map(|size| size as i64);
        Sizes {
            has_documents: shape.documents.is_some(),
            b,
            heads,
            kv_heads,
            s,
            d,
            rows: shape.row_strides.map(|stride| stride as i64),
        }
    }

    /// q and its gradient.
    pub(super) fn q(self) -> Lay {
        self.of_documents(self.by_token(self.heads, self.rows[0]), Uid::OutOffsets)
    }

    /// k and its gradient.
    pub(super) fn k(self) -> Lay {
        self.of_documents(self.by_token(self.kv_heads, self.rows[1]), Uid::KeyOffsets)
    }

    /// v and its gradient.
    pub(super) fn v(self) -> Lay {
        self.of_documents(self.by_token(self.kv_heads, self.rows[2]), Uid::KeyOffsets)
    }

    /// The output and its gradient.
    pub(super) fn out(self) -> Lay {
        let lay = self.by_token(self.heads, self.heads * self.d);
        self.of_documents(lay, Uid::OutOffsets)
    }

    /// f32 sums of dq.
    pub(super) fn dq_sums(self) -> Lay {
        match self.has_documents {
            true => self.q(),
            false => self.by_head(),
        }
    }

    /// The gradient of k or v of every query head. Where documents are packed, cuDNN multiplies the numbers that say where they
    /// begin in k by the heads that share one.
    pub(super) fn of_heads(self) -> Lay {
        match self.has_documents {
            true => {
                let row = self.rows[1] * (self.heads / self.kv_heads);
                self.of_documents(self.by_token(self.heads, row), Uid::KeyOffsets)
            }
            false => self.by_head(),
        }
    }

    fn by_token(self, heads: i64, row: i64) -> Lay {
        Lay::by_token([self.b, heads, self.s, self.d], row)
    }

    /// A row for each query, a head after the other.
    pub(super) fn by_head(self) -> Lay {
        Lay::by_head([self.b, self.heads, self.s, self.d])
    }

    /// The same, with documents where numbers say, if there are any.
    fn of_documents(self, lay: Lay, offsets: Uid) -> Lay {
        Lay {
            offsets: self.has_documents.then_some(offsets),
            ..lay
        }
    }

    /// A number for each query and key.
    pub(super) fn scores(self) -> Lay {
        Lay::by_head([self.b, self.heads, self.s, self.s])
    }

    /// A number for each query, a head after the other.
    pub(super) fn rows(self) -> Lay {
        Lay::by_head([self.b, self.heads, self.s, 1])
    }

    /// Where it lies in memory: where documents are packed, a token after the other.
    pub(super) fn stored_rows(self) -> Lay {
        let strides = match self.has_documents {
            true => [self.heads * self.s, 1, self.heads, 1],
            false => self.rows().strides,
        };
        let rows = Lay {
            strides,
            ..self.rows()
        };
        self.of_documents(rows, Uid::RowOffsets)
    }
}

/// A tensor of a graph.
#[derive(Clone, Copy)]
pub(super) struct Tensor {
    raw: Raw,
    pub(super) uid: i64,
}

impl Tensor {
    pub(super) fn raw(self) -> Raw {
        self.raw
    }
}

/// Operations, and all descriptors that they refer to.
#[derive(Default)]
pub(super) struct Graph {
    operations: Vec<Raw>,
    kept: Vec<Descriptor>,
    virtual_tensors: i64,
    /// Numbers about packed documents, if there are any: first their lengths.
    documents: Vec<(Uid, Tensor)>,
}

/// Which dimensions of a product are tokens, of which a document has fewer than there is room for: names of what overrides them.
pub(super) type Overrides = [Name; 2];

/// Rows and columns: scores.
pub(super) const OF_SCORES: Overrides = [
    Name::CUDNN_ATTR_OPERATION_MATMUL_GEMM_M_OVERRIDE_DESC,
    Name::CUDNN_ATTR_OPERATION_MATMUL_GEMM_N_OVERRIDE_DESC,
];

/// Rows, and what is added up: scores times rows of tokens.
pub(super) const OF_ROWS: Overrides = [
    Name::CUDNN_ATTR_OPERATION_MATMUL_GEMM_M_OVERRIDE_DESC,
    Name::CUDNN_ATTR_OPERATION_MATMUL_GEMM_K_OVERRIDE_DESC,
];

impl Graph {
    /// A graph for these sizes, with the numbers about packed documents where there are any.
    pub(super) fn of(sizes: Sizes) -> Result<Graph, Refused> {
        let mut graph = Graph::default();
        if sizes.has_documents {
            for (uid, count) in [
                (Uid::Lengths, sizes.b),
                (Uid::OutOffsets, sizes.b + 1),
                (Uid::KeyOffsets, sizes.b + 1),
                (Uid::RowOffsets, sizes.b + 1),
            ] {
                let numbers = graph.tensor(uid, I32, Lay::numbers(count))?;
                graph.documents.push((uid, numbers));
            }
        }
        Ok(graph)
    }

    /// How long documents are, where there are any.
    pub(super) fn lengths(&self) -> Option<Tensor> {
        self.documents.first().map(|(_, lengths)| *lengths)
    }

    /// A tensor in device memory.
    pub(super) fn tensor(
        &mut self,
        uid: Uid,
        dtype: DataType,
        lay: Lay,
    ) -> Result<Tensor, Refused> {
        let descriptor = self.described(uid as i64, dtype, lay)?.finalized()?;
        Ok(self.keep(descriptor, uid as i64))
    }

    /// A number that is handed over by its address on the host.
    pub(super) fn scalar(&mut self, uid: Uid) -> Result<Tensor, Refused> {
        let descriptor = self.described(uid as i64, F32, Lay::numbers(1))?;
        let descriptor = descriptor.with(Name::CUDNN_ATTR_TENSOR_IS_BY_VALUE, true)?;
        Ok(self.keep(descriptor.finalized()?, uid as i64))
    }

    /// What passes from one operation to others and is never stored.
    pub(super) fn passing(&mut self, dtype: DataType, lay: Lay) -> Result<Tensor, Refused> {
        let uid = VIRTUAL + self.virtual_tensors;
        self.virtual_tensors += 1;
        let descriptor = self.described(uid, dtype, lay)?;
        let descriptor = descriptor.with(Name::CUDNN_ATTR_TENSOR_IS_VIRTUAL, true)?;
        Ok(self.keep(descriptor.finalized()?, uid))
    }

    fn keep(&mut self, descriptor: Descriptor, uid: i64) -> Tensor {
        let raw = self.hold(descriptor);
        Tensor { raw, uid }
    }

    /// Keeps a descriptor that others refer to.
    pub(super) fn hold(&mut self, descriptor: Descriptor) -> Raw {
        let raw = descriptor.raw();
        self.kept.push(descriptor);
        raw
    }

    /// Adds an operation.
    pub(super) fn add(&mut self, operation: Descriptor) {
        let raw = self.hold(operation);
        self.operations.push(raw);
    }

    /// `y = x mode b`, in f32; `b` is repeated where it is shorter.
    pub(super) fn pointwise(
        &mut self,
        mode: Pointwise,
        x: Tensor,
        b: Option<Tensor>,
        y: Tensor,
    ) -> Result<Tensor, Refused> {
        let operator = operator(mode, F32)?;
        self.pointwise_by(operator, [Some(x), b, None], y)
    }

    /// An operator on each element of up to three tensors, the third of which chooses between the others.
    fn pointwise_by(
        &mut self,
        operator: Descriptor,
        [x, b, t]: [Option<Tensor>; 3],
        y: Tensor,
    ) -> Result<Tensor, Refused> {
        let operator = self.hold(operator.finalized()?);
        let mut operation = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR)?
            .with(Name::CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, operator)?
            .with(Name::CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y.raw)?;
        for (name, tensor) in [
            (Name::CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x),
            (Name::CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b),
            (Name::CUDNN_ATTR_OPERATION_POINTWISE_TDESC, t),
        ] {
            if let Some(tensor) = tensor {
                operation = operation.with(name, tensor.raw)?;
            }
        }
        let operation = operation
            .with(Name::CUDNN_ATTR_OPERATION_POINTWISE_ALPHA1, 1.0_f32)?
            .with(Name::CUDNN_ATTR_OPERATION_POINTWISE_ALPHA2, 1.0_f32)?
            .finalized()?;
        self.add(operation);
        Ok(y)
    }

    /// Scores `x` where query and key are within their document, else minus infinity.
    pub(super) fn length_mask(
        &mut self,
        x: Tensor,
        lengths: Tensor,
        scores: Lay,
    ) -> Result<Tensor, Refused> {
        let fill = self.scalar(Uid::Beyond)?;
        let mut within = |axis: i64| {
            let index = operator(Pointwise::CUDNN_POINTWISE_GEN_INDEX, I32)?
                .with(Name::CUDNN_ATTR_POINTWISE_AXIS, axis)?;
            let place = self.passing(I32, scores)?;
            self.pointwise_by(index, [Some(x), None, None], place)?;
            let is_less = operator(Pointwise::CUDNN_POINTWISE_CMP_LT, BOOLEAN)?;
            let within = self.passing(BOOLEAN, scores)?;
            self.pointwise_by(is_less, [Some(place), Some(lengths), None], within)
        };
        let (query, key) = (within(2)?, within(3)?);
        let both = self.passing(BOOLEAN, scores)?;
        let and = operator(Pointwise::CUDNN_POINTWISE_LOGICAL_AND, BOOLEAN)?;
        self.pointwise_by(and, [Some(query), Some(key), None], both)?;
        let y = self.passing(F32, scores)?;
        let select = operator(Pointwise::CUDNN_POINTWISE_BINARY_SELECT, F32)?;
        self.pointwise_by(select, [Some(x), Some(fill), Some(both)], y)
    }

    /// `y` = sums of `x` in f32, over the dimensions in which `y` is shorter.
    pub(super) fn sum(&mut self, x: Tensor, y: Tensor) -> Result<Tensor, Refused> {
        let operator = Descriptor::new(Kind::CUDNN_BACKEND_REDUCTION_DESCRIPTOR)?
            .with(Name::CUDNN_ATTR_REDUCTION_COMP_TYPE, F32)?
            .with(
                Name::CUDNN_ATTR_REDUCTION_OPERATOR,
                Reduction::CUDNN_REDUCE_TENSOR_ADD,
            )?
            .with(Name::CUDNN_ATTR_REDUCTION_IS_DETERMINISTIC, false)?
            .finalized()?;
        let operator = self.hold(operator);
        let operation = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR)?
            .with(Name::CUDNN_ATTR_OPERATION_REDUCTION_DESC, operator)?
            .with(Name::CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x.raw)?
            .with(Name::CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y.raw)?
            .finalized()?;
        self.add(operation);
        Ok(y)
    }

    /// `c = a b`, for every head; a `b` of fewer heads serves several of `a`.
    pub(super) fn product(
        &mut self,
        [a, b, c]: [Tensor; 3],
        tokens: Overrides,
    ) -> Result<Tensor, Refused> {
        let operator = Descriptor::new(Kind::CUDNN_BACKEND_MATMUL_DESCRIPTOR)?
            .with(Name::CUDNN_ATTR_MATMUL_COMP_TYPE, F32)?
            .finalized()?;
        let operator = self.hold(operator);
        let mut operation = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR)?
            .with(Name::CUDNN_ATTR_OPERATION_MATMUL_ADESC, a.raw)?
            .with(Name::CUDNN_ATTR_OPERATION_MATMUL_BDESC, b.raw)?
            .with(Name::CUDNN_ATTR_OPERATION_MATMUL_CDESC, c.raw)?
            .with(Name::CUDNN_ATTR_OPERATION_MATMUL_DESC, operator)?;
        if let Some(lengths) = self.lengths() {
            for name in tokens {
                operation = operation.with(name, lengths.raw)?;
            }
        }
        self.add(operation.finalized()?);
        Ok(c)
    }

    /// `y`: the elements of `x` in the order of other strides, rounded where its type is narrower.
    pub(super) fn reshape(&mut self, x: Tensor, y: Tensor) -> Result<Tensor, Refused> {
        let operation = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR)?
            .with(Name::CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x.raw)?
            .with(Name::CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y.raw)?
            .finalized()?;
        self.add(operation);
        Ok(y)
    }

    /// `y`: `x` where a row's number is at least its column's, else `fill`.
    pub(super) fn causal_mask(
        &mut self,
        x: Tensor,
        fill: Tensor,
        y: Tensor,
    ) -> Result<Tensor, Refused> {
        let operation =
            Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_DIAGONAL_BAND_MASK_DESCRIPTOR)?
                .with(Name::CUDNN_ATTR_OPERATION_DIAGONAL_BAND_MASK_XDESC, x.raw)?
                .with(
                    Name::CUDNN_ATTR_OPERATION_DIAGONAL_BAND_MASK_BDESC,
                    fill.raw,
                )?
                .with(Name::CUDNN_ATTR_OPERATION_DIAGONAL_BAND_MASK_YDESC, y.raw)?
                .with(
                    Name::CUDNN_ATTR_OPERATION_DIAGONAL_BAND_MASK_COMPARISON_MODE,
                    Pointwise::CUDNN_POINTWISE_CMP_GE,
                )?
                .finalized()?;
        self.add(operation);
        Ok(y)
    }

    /// A tensor that is not finalized yet.
    fn described(&self, uid: i64, dtype: DataType, lay: Lay) -> Result<Descriptor, Refused> {
        let descriptor = Descriptor::new(Kind::CUDNN_BACKEND_TENSOR_DESCRIPTOR)?
            .with(Name::CUDNN_ATTR_TENSOR_DATA_TYPE, dtype)?
            .with_all(Name::CUDNN_ATTR_TENSOR_DIMENSIONS, &lay.dims)?
            .with_all(Name::CUDNN_ATTR_TENSOR_STRIDES, &lay.strides)?
            .with(Name::CUDNN_ATTR_TENSOR_UNIQUE_ID, uid)?
            .with(Name::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, ALIGNMENT_BYTES)?;
        let mut numbers = self.documents.iter();
        match numbers.find(|(numbers, _)| Some(*numbers) == lay.offsets) {
            Some((_, offsets)) => {
                descriptor.with(Name::CUDNN_ATTR_TENSOR_RAGGED_OFFSET_DESC, offsets.raw)
            }
            None => Ok(descriptor),
        }
    }

    /// The whole, as engines are asked about it, with all that it refers to.
    pub(super) fn finished<V: Value>(
        mut self,
        at: Option<(Name, V)>,
    ) -> Result<(Descriptor, Vec<Descriptor>), Refused> {
        let operations = std::mem::take(&mut self.operations);
        let graph = Descriptor::new(Kind::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)?
            .with_all(Name::CUDNN_ATTR_OPERATIONGRAPH_OPS, &operations)?;
        let graph = match at {
            None => graph,
            Some((name, value)) => graph.with(name, value)?,
        };
        Ok((graph.finalized()?, self.kept))
    }
}

/// An operator on each element, which is not finalized yet.
fn operator(mode: Pointwise, precision: DataType) -> Result<Descriptor, Refused> {
    Descriptor::new(Kind::CUDNN_BACKEND_POINTWISE_DESCRIPTOR)?
        .with(Name::CUDNN_ATTR_POINTWISE_MODE, mode)?
        .with(Name::CUDNN_ATTR_POINTWISE_MATH_PREC, precision)
}
