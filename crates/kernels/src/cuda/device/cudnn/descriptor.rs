//! Descriptors of cuDNN's backend interface: what a graph, an engine and a plan are made of.

use super::interface::{self as sys, Kind, Name, Raw, Status, Type};
use crate::KernelError;
use std::ffi::{CStr, c_char, c_void};

/// A descriptor, which is destroyed when it is dropped.
pub(super) struct Descriptor {
    raw: Raw,
    kind: Kind,
}

/// What cuDNN answered instead of success.
#[derive(Debug)]
pub(super) struct Refused {
    pub(super) status: Status,
    /// The call, and what it was about.
    call: String,
    /// What the library says itself.
    details: String,
}

/// A value as an attribute takes it.
pub(super) trait Value: Copy {
    const TYPE: Type;
}

macro_rules! values {
    ($($rust:ty => $cudnn:ident,)*) => {
        $(impl Value for $rust {
            const TYPE: Type = Type::$cudnn;
        })*
    };
}

values! {
    i64 => CUDNN_TYPE_INT64,
    f32 => CUDNN_TYPE_FLOAT,
    bool => CUDNN_TYPE_BOOLEAN,
    u8 => CUDNN_TYPE_CHAR,
    Raw => CUDNN_TYPE_BACKEND_DESCRIPTOR,
    Pointer => CUDNN_TYPE_VOID_PTR,
    sys::CudnnHandle => CUDNN_TYPE_HANDLE,
    sys::DataType => CUDNN_TYPE_DATA_TYPE,
    sys::Pointwise => CUDNN_TYPE_POINTWISE_MODE,
    sys::Reduction => CUDNN_TYPE_REDUCTION_OPERATOR_TYPE,
    sys::Mode => CUDNN_TYPE_HEUR_MODE,
    sys::Knob => CUDNN_TYPE_KNOB_TYPE,
}

/// The address of a tensor; a type of its own, since descriptors are addresses too.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Pointer(pub(super) *const u8);

impl Descriptor {
    pub(super) fn new(kind: Kind) -> Result<Descriptor, Refused> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one pointer.
        let status = unsafe { sys::cudnnBackendCreateDescriptor(kind, &mut raw) };
        accepted(status, || format!("creating {kind:?}"))?;
        Ok(Descriptor { raw, kind })
    }

    /// The library's own name for it.
    pub(super) fn raw(&self) -> Raw {
        self.raw
    }

    /// Sets an attribute, and hands the descriptor back for the next.
    pub(super) fn with<V: Value>(self, name: Name, value: V) -> Result<Descriptor, Refused> {
        self.with_all(name, &[value])
    }

    /// Sets an attribute of several elements.
    pub(super) fn with_all<V: Value>(self, name: Name, all: &[V]) -> Result<Descriptor, Refused> {
        let (count, values) = (all.len() as i64, all.as_ptr().cast::<c_void>());
        // SAFETY: as many values of the type that is named, which are copied before the call returns.
        let status =
            unsafe { sys::cudnnBackendSetAttribute(self.raw, name, V::TYPE, count, values) };
        accepted(status, || format!("{:?}, {name:?}", self.kind))?;
        Ok(self)
    }

    /// Ends what can be set; what does not fit together is refused here.
    pub(super) fn finalized(self) -> Result<Descriptor, Refused> {
        // SAFETY: created in `new`.
        let status = unsafe { sys::cudnnBackendFinalize(self.raw) };
        accepted(status, || format!("finalizing {:?}", self.kind))?;
        Ok(self)
    }

    /// An attribute that is one number.
    pub(super) fn number(&self, name: Name) -> Result<i64, Refused> {
        let (mut value, mut count) = (0_i64, 0);
        let out = std::ptr::from_mut(&mut value).cast::<c_void>();
        // SAFETY: room for one element of the type that is named.
        let status =
            unsafe { sys::cudnnBackendGetAttribute(self.raw, name, i64::TYPE, 1, &mut count, out) };
        accepted(status, || format!("{:?}, {name:?}", self.kind))?;
        Ok(value)
    }

    /// An attribute that is text.
    pub(super) fn text(&self, name: Name) -> Result<Vec<u8>, Refused> {
        let (mut bytes, mut count) = (Vec::<u8>::new(), 0_i64);
        // The library first tells how long it is.
        for _ in 0..2 {
            bytes.resize(count.max(0) as usize, 0);
            let (room, out) = (bytes.len() as i64, bytes.as_mut_ptr().cast::<c_void>());
            // SAFETY: room for as many bytes; none are written where there is no room.
            let status = unsafe {
                sys::cudnnBackendGetAttribute(self.raw, name, u8::TYPE, room, &mut count, out)
            };
            accepted(status, || format!("{:?}, {name:?}", self.kind))?;
        }
        bytes.truncate(count.max(0) as usize);
        Ok(bytes)
    }

    /// An attribute that is a list of descriptors of a kind, at most `most` of them.
    pub(super) fn list(
        &self,
        name: Name,
        kind: Kind,
        most: usize,
    ) -> Result<Vec<Descriptor>, Refused> {
        let made = (0..most).map(|_| Descriptor::new(kind));
        let mut made = made.collect::<Result<Vec<_>, Refused>>()?;
        let mut raw: Vec<Raw> = made.iter().map(Descriptor::raw).collect();
        let mut count = 0;
        let out = raw.as_mut_ptr().cast::<c_void>();
        // SAFETY: room for `most` descriptors, each of the kind that the attribute has.
        let status = unsafe {
            sys::cudnnBackendGetAttribute(self.raw, name, Raw::TYPE, most as i64, &mut count, out)
        };
        accepted(status, || format!("{:?}, {name:?}", self.kind))?;
        made.truncate(count.max(0) as usize);
        Ok(made)
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: created in `new`; whoever uses it in another has it alive.
        let _ = unsafe { sys::cudnnBackendDestroyDescriptor(self.raw) };
    }
}

/// Nothing, or what the library says about the call that `call` names.
pub(super) fn accepted(status: Status, call: impl FnOnce() -> String) -> Result<(), Refused> {
    match status {
        Status::CUDNN_STATUS_SUCCESS => Ok(()),
        status => Err(Refused {
            status,
            call: call(),
            details: last_message(),
        }),
    }
}

/// What the library wrote about its last refusal in this thread.
fn last_message() -> String {
    let mut text = [0 as c_char; 512];
    // SAFETY: writes at most as many bytes, with a zero at the end.
    unsafe { sys::cudnnGetLastErrorString(text.as_mut_ptr(), text.len()) };
    text[text.len() - 1] = 0;
    // SAFETY: the last byte at the latest is zero.
    let text = unsafe { CStr::from_ptr(text.as_ptr()) };
    text.to_string_lossy().trim().to_owned()
}

impl Refused {
    /// What the library was not even asked.
    pub(super) fn because(status: Status, call: &str) -> Refused {
        Refused {
            status,
            call: call.into(),
            details: String::new(),
        }
    }

    /// The refusal as an error of an operation.
    pub(super) fn of(self, operation: &'static str) -> KernelError {
        KernelError::device(operation, self.to_string())
    }
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        // SAFETY: the library is there, and its texts stay.
        let name = unsafe { CStr::from_ptr(sys::cudnnGetErrorString(self.status)) };
        let name = name.to_string_lossy();
        write!(f, "cuDNN answers {name} ({})", self.call)?;
        match self.details.is_empty() {
            true => Ok(()),
            false => write!(f, ": {}", self.details),
        }
    }
}
