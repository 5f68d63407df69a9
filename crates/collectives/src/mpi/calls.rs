//! The functions of an MPI library, as its binary interface has them. `H` is the type of its handles: communicators,
//! types, requests, error handlers.

use crate::GroupError;
use crate::Result;
use crate::loading::functions;
use std::ffi::{CStr, c_char, c_int, c_void};

functions! {
    <H>
    init_thread: "MPI_Init_thread" (*mut c_int, *mut *mut *mut c_char, c_int, *mut c_int) -> c_int;
    finalize: "MPI_Finalize" () -> c_int;
    abort: "MPI_Abort" (H, c_int) -> c_int;
    comm_rank: "MPI_Comm_rank" (H, *mut c_int) -> c_int;
    comm_size: "MPI_Comm_size" (H, *mut c_int) -> c_int;
    comm_dup: "MPI_Comm_dup" (H, *mut H) -> c_int;
    comm_set_errhandler: "MPI_Comm_set_errhandler" (H, H) -> c_int;
    isend: "MPI_Isend" (*const c_void, c_int, H, c_int, c_int, H, *mut H) -> c_int;
    irecv: "MPI_Irecv" (*mut c_void, c_int, H, c_int, c_int, H, *mut H) -> c_int;
    test: "MPI_Test" (*mut H, *mut c_int, *mut Status) -> c_int;
    get_count: "MPI_Get_count" (*const Status, H, *mut c_int) -> c_int;
    error_string: "MPI_Error_string" (c_int, *mut c_char, *mut c_int) -> c_int;
    get_library_version: "MPI_Get_library_version" (*mut c_char, *mut c_int) -> c_int;
}

/// Room for an `MPI_Status`, whose fields are not read here, since each library orders them in its own way: 20 bytes in
/// MPICH's `mpi.h`, 24 in Open MPI's, 32 in MPI 5's `mpi_abi.h`.
#[repr(C, align(8))]
pub(super) struct Status([u8; 64]);

/// `MPI_MAX_LIBRARY_VERSION_STRING` of MPICH and MPI 5, the longest text that a call here returns (`mpi.h`,
/// `mpi_abi.h`).
const TEXT_BYTES: usize = 8192;

/// Handles and numbers that differ between the interfaces.
pub(super) struct Constants<H> {
    /// `MPI_COMM_WORLD`.
    pub(super) world: H,
    /// `MPI_BYTE`.
    pub(super) byte: H,
    /// `MPI_ERRORS_RETURN`.
    pub(super) errors_return: H,
    /// `MPI_THREAD_FUNNELED`.
    pub(super) funneled: c_int,
}

/// An MPI library; one thread makes all calls.
pub(super) struct MpiCalls<H> {
    pub(super) functions: Functions<H>,
    pub(super) constants: Constants<H>,
}

impl<H: Copy> MpiCalls<H> {
    /// Turns a function's return value into a result.
    fn checked(&self, function: &str, code: c_int) -> Result {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: there is room for the longest text.
        let said =
            text(|text, length| unsafe { (self.functions.error_string)(code, text, length) });
        Err(GroupError::Failed(format!("{function} failed: {said}")))
    }

    /// The library's name and version, on a line: `Open MPI 4.1.4`.
    pub(super) fn version(&self) -> String {
        // SAFETY: there is room for the longest text.
        let said =
            text(|text, length| unsafe { (self.functions.get_library_version)(text, length) });
        let line = said.split([',', '\n']).next().unwrap_or_default();
        let words = line.split_whitespace().filter(|word| *word != "Version:");
        let plain = words.map(|word| match word.strip_prefix('v') {
            Some(number) if number.starts_with(|first: char| first.is_ascii_digit()) => number,
            _ => word,
        });
        plain.collect::<Vec<_>>().join(" ")
    }

    /// Starts MPI for calls from this thread only. From then on functions return errors instead of ending the process.
    pub(super) fn init(&self) -> Result {
        let mut provided = 0;
        let wanted = self.constants.funneled;
        let none = std::ptr::null_mut();
        // SAFETY: the standard lets both arguments be null; the level is written before it returns.
        let code =
            unsafe { (self.functions.init_thread)(none, none.cast(), wanted, &mut provided) };
        self.checked("MPI_Init_thread", code)?;
        let Constants {
            world,
            errors_return,
            ..
        } = self.constants;
        // SAFETY: both handles are the library's own.
        let code = unsafe { (self.functions.comm_set_errhandler)(world, errors_return) };
        self.checked("MPI_Comm_set_errhandler", code)
    }

    /// Ends MPI; waits for the other ranks.
    pub(super) fn finalize(&self) {
        // SAFETY: this thread started it. MPI is ending, so the result does not matter.
        unsafe { (self.functions.finalize)() };
    }

    /// Ends all ranks with a code; may return.
    pub(super) fn abort(&self, code: c_int) {
        // SAFETY: the handle is the library's own.
        unsafe { (self.functions.abort)(self.constants.world, code) };
    }

    /// This rank and how many there are.
    pub(super) fn rank_and_size(&self) -> Result<(usize, usize)> {
        let (mut rank, mut size) = (0, 0);
        let world = self.constants.world;
        // SAFETY: the handle is the library's own, and the number is written before it returns.
        let code = unsafe { (self.functions.comm_rank)(world, &mut rank) };
        self.checked("MPI_Comm_rank", code)?;
        // SAFETY: as above.
        let code = unsafe { (self.functions.comm_size)(world, &mut size) };
        self.checked("MPI_Comm_size", code)?;
        Ok((rank as usize, size as usize))
    }

    /// A communicator of all ranks, whose messages are separate from those of others.
    pub(super) fn communicator(&self) -> Result<H> {
        let mut made = self.constants.world;
        // SAFETY: the handle is the library's own, and the new one is written before it returns.
        let code = unsafe { (self.functions.comm_dup)(self.constants.world, &mut made) };
        self.checked("MPI_Comm_dup", code)?;
        Ok(made)
    }

    /// Begins to send.
    ///
    /// # Safety
    /// The bytes are alive and unchanged until the request is done.
    pub(super) unsafe fn send(
        &self,
        bytes: *const u8,
        count: c_int,
        to: usize,
        communicator: H,
    ) -> Result<H> {
        let (byte, mut request) = (self.constants.byte, self.constants.byte);
        // SAFETY: the caller's promise; the request is written before it returns.
        let code = unsafe {
            (self.functions.isend)(
                bytes.cast(),
                count,
                byte,
                to as c_int,
                0,
                communicator,
                &mut request,
            )
        };
        self.checked("MPI_Isend", code)?;
        Ok(request)
    }

    /// Begins to receive.
    ///
    /// # Safety
    /// The bytes are alive, and nothing else uses them, until the request is done.
    pub(super) unsafe fn receive(
        &self,
        bytes: *mut u8,
        count: c_int,
        from: usize,
        communicator: H,
    ) -> Result<H> {
        let (byte, mut request) = (self.constants.byte, self.constants.byte);
        // SAFETY: the caller's promise; the request is written before it returns.
        let code = unsafe {
            (self.functions.irecv)(
                bytes.cast(),
                count,
                byte,
                from as c_int,
                0,
                communicator,
                &mut request,
            )
        };
        self.checked("MPI_Irecv", code)?;
        Ok(request)
    }

    /// The number of bytes received, if the request is done.
    pub(super) fn done(&self, request: &mut H) -> Result<Option<c_int>> {
        let (mut done, mut count) = (0, 0);
        let mut status = Status([0; 64]);
        // SAFETY: the request is one that was begun and not yet done; there is room for the status.
        let code = unsafe { (self.functions.test)(request, &mut done, &mut status) };
        self.checked("a message", code)?;
        if done == 0 {
            return Ok(None);
        }
        // SAFETY: the status was filled by the call above.
        let code = unsafe { (self.functions.get_count)(&status, self.constants.byte, &mut count) };
        self.checked("MPI_Get_count", code)?;
        Ok(Some(count))
    }
}

/// A text that a function of the library writes.
fn text(write: impl FnOnce(*mut c_char, *mut c_int) -> c_int) -> String {
    // One byte more, which stays zero and ends the text.
    let mut bytes = [0_u8; TEXT_BYTES + 1];
    let mut length = 0;
    write(bytes.as_mut_ptr().cast(), &mut length);
    let text = CStr::from_bytes_until_nul(&bytes).expect("the last byte is zero");
    text.to_string_lossy().trim().to_owned()
}
