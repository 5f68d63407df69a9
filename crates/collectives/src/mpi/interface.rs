//! Which binary interface an MPI library has: the standard one of MPI 5, Open MPI's, or MPICH's.

use super::calls::{Constants, Functions, MpiCalls};
use crate::loading::reason;
use libloading::os::unix::Library;
use std::ffi::{c_int, c_void};

/// A library with either kind of handles.
pub(super) enum AnyCalls {
    /// Handles are addresses.
    Addresses(MpiCalls<*mut c_void>),
    /// Handles are numbers.
    Numbers(MpiCalls<c_int>),
}

impl AnyCalls {
    /// Finds out which binary interface a library has, whatever its file is called.
    ///
    /// # Safety
    /// The library is an MPI.
    pub(super) unsafe fn of(library: &Library) -> Result<AnyCalls, String> {
        // SAFETY: the caller's promise, and what each interface's header says of its handles.
        unsafe {
            if has_standard_interface(library) {
                // `mpi_abi.h` of MPICH 5.0.2, as chapter 20 of MPI 5.0 has it: addresses that are numbers.
                let constants = Constants {
                    world: 0x101 as *mut c_void,
                    byte: 0x247 as *mut c_void,
                    errors_return: 0x143 as *mut c_void,
                    funneled: 1024,
                };
                let functions = Functions::of(library)?;
                return Ok(AnyCalls::Addresses(MpiCalls {
                    functions,
                    constants,
                }));
            }
            let object = |name: &str| {
                let found = library.get::<*mut c_void>(name);
                found.map(|found| found.as_raw_ptr()).map_err(reason)
            };
            if let Ok(world) = object("ompi_mpi_comm_world") {
                // `mpi.h` of Open MPI 4.1.4 and 5.0.11: addresses of the library's objects.
                let constants = Constants {
                    world,
                    byte: object("ompi_mpi_byte")?,
                    errors_return: object("ompi_mpi_errors_return")?,
                    funneled: 1,
                };
                let functions = Functions::of(library)?;
                return Ok(AnyCalls::Addresses(MpiCalls {
                    functions,
                    constants,
                }));
            }
            // `mpi.h` of MPICH 4.0.2 and 5.0.2, whose interface others share: numbers.
            let constants = Constants {
                world: 0x4400_0000,
                byte: 0x4c00_010d,
                errors_return: 0x5400_0001,
                funneled: 1,
            };
            let functions = Functions::of(library)?;
            Ok(AnyCalls::Numbers(MpiCalls {
                functions,
                constants,
            }))
        }
    }
}

/// Whether a library has the interface of MPI 5's standard: one of MPICH 5's own says -1.
///
/// # Safety
/// The library is an MPI.
unsafe fn has_standard_interface(library: &Library) -> bool {
    type Version = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
    // SAFETY: the caller's promise; the standard gives the function this type, and lets it be called before all others.
    unsafe {
        let (mut major, mut minor) = (-1, -1);
        match library.get::<Version>("MPI_Abi_get_version") {
            Ok(version) => version(&mut major, &mut minor) == 0 && major >= 1,
            Err(_) => false,
        }
    }
}
