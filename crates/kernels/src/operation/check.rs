//! The parts that checks of operations are made of.

use super::Init;
use crate::{KernelError, Target};
use memory::{DType, In, Out};

/// Ok, or why an operation does not fit.
pub(crate) type Checked = Result<(), KernelError>;

/// A tensor to check, for reading or writing.
pub(crate) trait View {
    fn view(&self) -> In<'_>;
}

impl View for In<'_> {
    fn view(&self) -> In<'_> {
        *self
    }
}

impl View for Out<'_> {
    fn view(&self) -> In<'_> {
        self.as_in()
    }
}

/// The checks of one operation for one device.
pub(crate) struct Check {
    /// The operation's name, for messages.
    pub(crate) operation: &'static str,
    /// The device whose scratch sizes apply.
    pub(crate) target: Target,
    /// Whether matrix products may have bf16 operands.
    pub(crate) widens: bool,
}

impl Check {
    pub(crate) fn that(&self, condition: bool, message: impl FnOnce() -> String) -> Checked {
        KernelError::unless(condition, self.operation, message)
    }

    /// Checks for a contiguous tensor of this shape and type.
    pub(crate) fn tensor(
        &self,
        name: &str,
        x: &dyn View,
        shape: &[usize],
        dtype: DType,
    ) -> Checked {
        self.shape(name, x, shape, dtype)?;
        self.contiguous(name, x)
    }

    /// Checks for a tensor of this shape and type in contiguous rows. There may be gaps between rows.
    pub(crate) fn by_rows(
        &self,
        name: &str,
        x: &dyn View,
        shape: &[usize],
        dtype: DType,
    ) -> Checked {
        self.shape(name, x, shape, dtype)?;
        self.that(x.view().is_by_rows(), || {
            format!("the elements of a row of `{name}` are strided, expected contiguous")
        })
    }

    fn shape(&self, name: &str, x: &dyn View, shape: &[usize], dtype: DType) -> Checked {
        let x = x.view();
        self.that(x.dims() == shape, || {
            format!("`{name}` is {:?}, expected {shape:?}", x.dims())
        })?;
        self.that(x.dtype() == dtype, || {
            format!("`{name}` holds {:?}, expected {dtype:?}", x.dtype())
        })
    }

    /// Checks for a contiguous tensor of this shape and type, unless it was left out.
    pub(crate) fn optional(
        &self,
        name: &str,
        x: &Option<Out>,
        shape: &[usize],
        dtype: DType,
    ) -> Checked {
        x.iter()
            .try_for_each(|x| self.tensor(name, x, shape, dtype))
    }

    /// Checks for a place for the largest magnitude of `y`, unless it was left out. It may not be given without `y`.
    pub(crate) fn largest_of(&self, y: &Option<Out>, largest: &Option<Out>) -> Checked {
        self.that(y.is_some() || largest.is_none(), || {
            "`largest` is that of `y`, which is left out".into()
        })?;
        self.optional("largest", largest, &[1], DType::F32)
    }

    /// Checks for a contiguous tensor of this shape that holds f32 or bf16.
    pub(crate) fn real(&self, name: &str, x: &dyn View, shape: &[usize]) -> Checked {
        self.real_type(name, x)?;
        self.tensor(name, x, shape, x.view().dtype())
    }

    /// Checks for a tensor of this shape that holds f32 or bf16 in contiguous rows. There may be gaps between rows.
    pub(crate) fn real_by_rows(&self, name: &str, x: &dyn View, shape: &[usize]) -> Checked {
        self.real_type(name, x)?;
        self.by_rows(name, x, shape, x.view().dtype())
    }

    /// Checks for a contiguous tensor of `rank` dimensions that holds f32 or bf16.
    pub(crate) fn real_of_rank(&self, name: &str, x: &dyn View, rank: usize) -> Checked {
        self.rank(name, x, rank)?;
        self.real(name, x, x.view().dims())
    }

    /// Checks for a tensor that holds f32 or bf16.
    pub(crate) fn real_type(&self, name: &str, x: &dyn View) -> Checked {
        let dtype = x.view().dtype();
        self.that(matches!(dtype, DType::F32 | DType::BF16), || {
            format!("`{name}` holds {dtype:?}, expected F32 or BF16")
        })
    }

    pub(crate) fn rank(&self, name: &str, x: &dyn View, rank: usize) -> Checked {
        let x = x.view();
        self.that(x.dims().len() == rank, || {
            format!("`{name}` is {:?}, expected {rank} dimensions", x.dims())
        })
    }

    pub(crate) fn contiguous(&self, name: &str, x: &dyn View) -> Checked {
        self.that(x.view().is_contiguous(), || {
            format!("`{name}` is strided, expected contiguous")
        })
    }

    /// Checks that a result is added to nothing, or to the output's contents.
    pub(crate) fn no_residual(&self, init: &Init) -> Checked {
        self.that(!matches!(init, Init::Add(_)), || {
            "only `matmul` and `sum_rows` add to another tensor".into()
        })
    }
}
