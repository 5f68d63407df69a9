//! How operations are declared: a field a line, and behind each tensor what it must be.

use super::Init;
use super::check::Checked;
use super::operand::{OperandPlace, OperandRow, OperandRule};
use crate::KernelError;
use crate::Result;
use memory::{Dims, In, Out};

/// Declares operations: structs whose tensors say what they must be.
///
/// ```text
/// /// `y [t, h] = x rstd weight`, ...
/// RmsNorm "rms_norm": x [t, h] {
///     y: Option<Out<'a>> [t, h],
///     rstd: Option<Out<'a>> [t] f32,
///     x: In<'a> [t, h],
///     weight: In<'a> [h],
///     eps: f32,
/// }
/// ```
///
/// The sizes `t` and `h` are those of `x`, whose shape also tells calls apart. In brackets is a tensor's shape: sizes,
/// which may follow from other fields, or `..` and what has that shape. The words behind it are methods of [`OperandRule`].
/// Without one, a tensor is contiguous, holds the compute type (f32 or bf16, the same in all such tensors of a call), and
/// is read or written whole.
macro_rules! operation {
    ($(
        $(#[$text:meta])*
        $operation:ident $name:literal:
            $subject:ident $([$($size:tt),*])? $(, $other:ident [$($other_size:tt),*])* {
            $($(#[$field_text:meta])* $field:ident: $type:ty
                $([$($dim:tt)*] $($word:ident $(($($argument:expr),*))?)*)?,)*
        }
    )+) => {$(
        $(#[$text])*
        pub struct $operation<'a> {
            $($(#[$field_text])* pub $field: $type,)*
        }

        impl $crate::operation::declaration::Declaration for $operation<'_> {
            fn name(&self) -> &'static str {
                $name
            }

            fn subject(&self) -> &[usize] {
                self.$subject.dims()
            }

            #[allow(unused_variables, reason = "shapes follow from few fields")]
            fn rows<'b>(
                &'b self,
                visit: $crate::operation::declaration::Visit<'_, 'b>,
            ) -> $crate::operation::check::Checked {
                use $crate::operation::declaration::{Field, dims};
                let $operation { $($field),* } = self;
                $(let [$($size),*] =
                    $crate::operation::declaration::sizes($name, stringify!($subject), $subject.dims())?;)?
                $(let [$($other_size),*] =
                    $crate::operation::declaration::sizes($name, stringify!($other), $other.dims())?;)*
                $($(
                    let rule = $crate::operation::operand::OperandRule::new($name, stringify!($field), dims!($($dim)*));
                    $field.visit(rule$(.$word($($($argument),*)?))*, &mut *visit)?;
                )?)*
                Ok(())
            }
        }
    )+};
}

/// The shape in a declaration's brackets.
macro_rules! dims {
    () => {
        memory::Dims::from([0; 0])
    };
    (.. $like:expr) => {
        $crate::operation::declaration::HasShape::shape(&$like)
    };
    ($($size:expr),*) => {
        memory::Dims::from([$($size),*])
    };
}

pub(super) use {dims, operation};

/// What a declaration says of an operation.
pub(crate) trait Declaration {
    /// Its name in messages and measurements.
    fn name(&self) -> &'static str;

    /// The shape that tells calls of the same name apart.
    fn subject(&self) -> &[usize];

    /// Visits every tensor that is given, with what it must be.
    fn rows<'b>(&'b self, visit: Visit<'_, 'b>) -> Checked;
}

/// What is done with each tensor of an operation.
pub(crate) type Visit<'v, 'b> = &'v mut dyn FnMut(OperandRow<'b>) -> Checked;

/// A field with tensors: one, none or several.
pub(super) trait Field {
    fn visit<'b>(&'b self, rule: OperandRule, visit: Visit<'_, 'b>) -> Checked;
}

impl Field for In<'_> {
    fn visit<'b>(&'b self, rule: OperandRule, visit: Visit<'_, 'b>) -> Checked {
        let place = OperandPlace::In(self);
        visit(OperandRow { place, rule })
    }
}

impl Field for Out<'_> {
    fn visit<'b>(&'b self, rule: OperandRule, visit: Visit<'_, 'b>) -> Checked {
        let place = OperandPlace::Out(self);
        visit(OperandRow { place, rule })
    }
}

impl Field for Init<'_> {
    fn visit<'b>(&'b self, rule: OperandRule, visit: Visit<'_, 'b>) -> Checked {
        let (place, rule) = (OperandPlace::Init(self), rule.uncounted());
        visit(OperandRow { place, rule })
    }
}

impl<F: Field> Field for Option<F> {
    fn visit<'b>(&'b self, rule: OperandRule, visit: Visit<'_, 'b>) -> Checked {
        let mut fields = self.iter();
        fields.try_for_each(|field| field.visit(rule, &mut *visit))
    }
}

impl<F: Field, const N: usize> Field for [F; N] {
    fn visit<'b>(&'b self, rule: OperandRule, visit: Visit<'_, 'b>) -> Checked {
        let mut fields = self.iter();
        fields.try_for_each(|field| field.visit(rule, &mut *visit))
    }
}

/// What has a shape.
pub(crate) trait HasShape {
    fn shape(&self) -> Dims;
}

impl HasShape for In<'_> {
    fn shape(&self) -> Dims {
        Dims::try_from(self.dims()).expect("a view has a shape")
    }
}

impl HasShape for Out<'_> {
    fn shape(&self) -> Dims {
        self.as_in().shape()
    }
}

impl<const N: usize> HasShape for [usize; N] {
    fn shape(&self) -> Dims {
        Dims::from(*self)
    }
}

impl<S: HasShape> HasShape for &S {
    fn shape(&self) -> Dims {
        (*self).shape()
    }
}

/// The sizes of a tensor that has as many dimensions.
pub(super) fn sizes<const N: usize>(
    operation: &'static str,
    name: &str,
    dims: impl AsRef<[usize]>,
) -> Result<[usize; N]> {
    let dims = dims.as_ref();
    let sizes = dims.try_into();
    let refusal = || format!("`{name}` is {dims:?}, expected {N} dimensions");
    sizes.map_err(|_| KernelError::misfit(operation, refusal()))
}

/// The size of a tensor in one dimension; none if it lacks that, or is left out.
pub(super) fn size(x: Option<&impl HasShape>, axis: usize) -> usize {
    let dims = x.map(HasShape::shape);
    let size = dims.as_ref().and_then(|dims| dims.as_slice().get(axis));
    size.copied().unwrap_or(0)
}
