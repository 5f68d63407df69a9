//! Libraries that are loaded at run time, and never unloaded, since none of them supports it well.

use libloading::os::unix::{Library, RTLD_NOW};
use std::error::Error;
use std::ffi::{OsStr, c_int};

/// Loads a library by its name or path, and `scope` (`RTLD_LOCAL`, `RTLD_GLOBAL`).
///
/// # Safety
/// The library's initialisers, which run when it is loaded, are sound.
///
/// # Errors
/// What the loader says.
pub(crate) unsafe fn load(
    name: impl AsRef<OsStr>,
    scope: c_int,
) -> Result<&'static Library, String> {
    // SAFETY: the caller's promise.
    let library = unsafe { Library::open(Some(name.as_ref()), RTLD_NOW | scope) };
    library
        .map(|library| &*Box::leak(Box::new(library)))
        .map_err(reason)
}

/// The loader's own message, without libloading's.
pub(crate) fn reason(error: libloading::Error) -> String {
    error
        .source()
        .map_or_else(|| error.to_string(), ToString::to_string)
}

/// Makes a struct `Functions` of a library's functions; it may have a type parameter, which the functions' types may
/// use.
macro_rules! functions {
    ($(<$parameter:ident>)? $($name:ident: $symbol:literal ($($argument:ty),*) -> $result:ty;)*) => {
        /// What is called.
        pub(super) struct Functions $(<$parameter>)? {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl $(<$parameter>)? Functions $(<$parameter>)? {
            /// # Safety
            /// The library's functions of these names have these types.
            pub(super) unsafe fn of(library: &libloading::os::unix::Library) -> Result<Self, String> {
                Ok(Functions {
                    // SAFETY: the caller's promise.
                    $($name: *unsafe { library.get($symbol) }.map_err(crate::loading::reason)?,)*
                })
            }
        }
    };
}

pub(crate) use functions;
