//! The operands of an operation: what each must be, and how it is used.

use super::Init;
use super::check::{Check, Checked};
use memory::{DType, Dims, In, Out};

/// A tensor of an operation, and what it must be.
pub struct OperandRow<'b> {
    pub place: OperandPlace<'b>,
    pub(super) rule: OperandRule,
}

/// Where an operation has a tensor.
#[derive(Clone, Copy)]
pub enum OperandPlace<'b> {
    In(&'b In<'b>),
    Out(&'b Out<'b>),
    Init(&'b Init<'b>),
}

/// What a tensor must be, and how it is used.
#[derive(Clone, Copy)]
pub(super) struct OperandRule {
    pub(super) operation: &'static str,
    name: &'static str,
    /// What follows the name, of one tensor of several.
    part: &'static str,
    dims: Dims,
    elements: Elements,
    layout: Layout,
    /// None: an input is read, an output written.
    access: Option<OperandAccess>,
    is_counted: bool,
    /// Rows of the last dimension that are used; none: all.
    touched: Option<usize>,
}

#[derive(Clone, Copy)]
enum Elements {
    /// f32 or bf16, the same in all tensors of the call that have this.
    Compute,
    Real,
    Fp8,
    Exactly(DType),
}

#[derive(Clone, Copy)]
enum Layout {
    Contiguous,
    ByRows,
    Strided,
    /// No tensor may be given.
    Absent,
}

/// The words of a declaration.
impl OperandRule {
    pub(super) fn new(operation: &'static str, name: &'static str, dims: Dims) -> OperandRule {
        OperandRule {
            operation,
            name,
            part: "",
            dims,
            elements: Elements::Compute,
            layout: Layout::Contiguous,
            access: None,
            is_counted: true,
            touched: None,
        }
    }

    /// The declared shape.
    pub(super) fn dims(&self) -> &[usize] {
        self.dims.as_slice()
    }

    fn of(mut self, elements: Elements) -> OperandRule {
        self.elements = elements;
        self
    }

    fn lying(mut self, layout: Layout) -> OperandRule {
        self.layout = layout;
        self
    }

    pub(super) fn used(mut self, access: OperandAccess) -> OperandRule {
        self.access = Some(access);
        self
    }

    /// f32 or bf16, whatever other tensors hold.
    pub(super) fn real(self) -> OperandRule {
        self.of(Elements::Real)
    }

    /// Either type of FP8.
    pub(super) fn fp8(self) -> OperandRule {
        self.of(Elements::Fp8)
    }

    pub(super) fn holds(self, dtype: DType) -> OperandRule {
        self.of(Elements::Exactly(dtype))
    }

    pub(super) fn e4m3(self) -> OperandRule {
        self.of(Elements::Exactly(DType::F8E4M3))
    }

    /// e4m3 where codes are made in place of values.
    pub(super) fn codes_if(self, are_made: bool) -> OperandRule {
        if are_made { self.e4m3() } else { self }
    }

    pub(super) fn f32(self) -> OperandRule {
        self.of(Elements::Exactly(DType::F32))
    }

    pub(super) fn f64(self) -> OperandRule {
        self.of(Elements::Exactly(DType::F64))
    }

    pub(super) fn i16(self) -> OperandRule {
        self.of(Elements::Exactly(DType::I16))
    }

    pub(super) fn i32(self) -> OperandRule {
        self.of(Elements::Exactly(DType::I32))
    }

    pub(super) fn u8(self) -> OperandRule {
        self.of(Elements::Exactly(DType::U8))
    }

    pub(super) fn u32(self) -> OperandRule {
        self.of(Elements::Exactly(DType::U32))
    }

    /// With contiguous rows, between which there may be gaps.
    pub(super) fn by_rows(self) -> OperandRule {
        self.lying(Layout::ByRows)
    }

    pub(super) fn strided(self) -> OperandRule {
        self.lying(Layout::Strided)
    }

    /// Of an [`Init`]: no other tensor than the output is added to.
    pub(super) fn in_place(self) -> OperandRule {
        self.lying(Layout::Absent)
    }

    /// Costs leave it out: scratch, or a few numbers.
    pub(super) fn uncounted(mut self) -> OperandRule {
        self.is_counted = false;
        self
    }

    pub(super) fn reads(self) -> OperandRule {
        self.used(OperandAccess::Read)
    }

    pub(super) fn changes(self) -> OperandRule {
        self.used(OperandAccess::Changed)
    }

    /// A result that is added to this.
    pub(super) fn plus(self, init: &Init) -> OperandRule {
        match init {
            Init::Overwrite => self,
            Init::Accumulate | Init::Add(_) => self.changes(),
        }
    }

    /// Uses at most so many rows of the last dimension.
    pub(super) fn touched(mut self, rows: usize) -> OperandRule {
        self.touched = Some(rows);
        self
    }

    /// One tensor of several: its own name.
    pub(super) fn named(mut self, name: &'static str) -> OperandRule {
        self.name = name;
        self
    }

    /// One tensor of several: what follows the name of all.
    pub(super) fn part(mut self, part: &'static str) -> OperandRule {
        self.part = part;
        self
    }

    pub(super) fn shaped(mut self, dims: impl Into<Dims>) -> OperandRule {
        self.dims = dims.into();
        self
    }
}

impl<'b> OperandRow<'b> {
    /// Its name in messages.
    pub fn name(&self) -> String {
        format!("{}{}", self.rule.name, self.rule.part)
    }

    /// The tensor; none of an [`Init`] that has none.
    pub fn view(&self) -> Option<In<'b>> {
        match self.place {
            OperandPlace::In(x) | OperandPlace::Init(Init::Add(x)) => Some(*x),
            OperandPlace::Out(x) => Some(x.as_in()),
            OperandPlace::Init(Init::Overwrite | Init::Accumulate) => None,
        }
    }

    /// What costs count of it.
    pub(super) fn operand(&self) -> Option<Operand<'b>> {
        let default = match self.place {
            OperandPlace::Out(_) => OperandAccess::Written,
            OperandPlace::In(_) | OperandPlace::Init(_) => OperandAccess::Read,
        };
        let access = self.rule.access.unwrap_or(default);
        let view = self.view().filter(|_| self.rule.is_counted)?;
        let view = match (self.rule.touched, view.dims()) {
            (Some(rows), &[.., width]) => {
                let all = view.elements() / width.max(1);
                view.reshape([all, width]).rows(0..rows.min(all))
            }
            _ => view,
        };
        Some(Operand { view, access })
    }

    /// Refuses a tensor that is something else. `compute` is the compute type, once a tensor has it.
    pub(super) fn check(&self, check: &Check, compute: &mut Option<DType>) -> Checked {
        let Some(x) = self.view() else { return Ok(()) };
        let (dims, expected, dtype) = (x.dims(), self.rule.dims(), x.dtype());
        check.that(!matches!(self.rule.layout, Layout::Absent), || {
            "only `matmul` and `sum_rows` add to another tensor".into()
        })?;
        check.that(dims == expected, || {
            format!("`{}` is {dims:?}, expected {expected:?}", self.name())
        })?;
        let fits = match (self.rule.elements, *compute) {
            (Elements::Exactly(only), _) | (Elements::Compute, Some(only)) => dtype == only,
            (Elements::Fp8, _) => dtype.is_fp8(),
            (Elements::Real | Elements::Compute, _) => matches!(dtype, DType::F32 | DType::BF16),
        };
        check.that(fits, || {
            let expected = match (self.rule.elements, *compute) {
                (Elements::Exactly(only), _) | (Elements::Compute, Some(only)) => {
                    format!("{only:?}")
                }
                (Elements::Fp8, _) => "F8E4M3 or F8E5M2".into(),
                _ => "F32 or BF16".into(),
            };
            format!("`{}` holds {dtype:?}, expected {expected}", self.name())
        })?;
        if let Elements::Compute = self.rule.elements {
            *compute = Some(dtype);
        }
        self.check_layout(check, x)
    }

    fn check_layout(&self, check: &Check, x: In) -> Checked {
        match self.rule.layout {
            Layout::Strided | Layout::Absent => Ok(()),
            Layout::Contiguous => check.that(x.is_contiguous(), || {
                format!("`{}` is strided, expected contiguous", self.name())
            }),
            Layout::ByRows => check.that(x.is_by_rows() || x.is_contiguous(), || {
                let name = self.name();
                format!("the elements of a row of `{name}` are strided, expected contiguous")
            }),
        }
    }
}

/// How an operation uses a tensor.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum OperandAccess {
    Read,
    Written,
    /// Read and written.
    Changed,
}

/// A tensor that an operation reads, writes or both.
pub(crate) struct Operand<'a> {
    /// The tensor, or the part of it that is used.
    pub(crate) view: In<'a>,
    pub(crate) access: OperandAccess,
}

impl Operand<'_> {
    /// Bytes that cross between memory and processor.
    pub(super) fn bytes(&self) -> u64 {
        let crossings = if self.access == OperandAccess::Changed {
            2
        } else {
            1
        };
        crossings * self.view.bytes() as u64
    }
}

/// A tensor that is read.
pub(crate) fn reads(view: In<'_>) -> Operand<'_> {
    Operand {
        view,
        access: OperandAccess::Read,
    }
}
