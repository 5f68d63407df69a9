//! The GPU's context, in which a communicator is made and rehearsed, and how much of its memory is free. These are all
//! functions of CUDA's driver that this crate uses.

use crate::GroupError;
use crate::Result;
use crate::loading::{functions, load};
use libloading::os::unix::RTLD_LOCAL;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

/// The same name as in the code that opens the device.
const NAMES: [&str; 2] = ["libcuda.so", "libcuda.so.1"];

/// `CUresult`: done, and not yet.
const SUCCESS: c_int = 0;
const NOT_READY: c_int = 600;

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: c_uint = 1;

/// `CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP`: devices use it by the same addresses.
const PORTABLE_AND_MAPPED: c_uint = 3;

functions! {
    init: "cuInit" (c_uint) -> c_int;
    device_get: "cuDeviceGet" (*mut c_int, c_int) -> c_int;
    primary_ctx_retain: "cuDevicePrimaryCtxRetain" (*mut *mut c_void, c_int) -> c_int;
    ctx_set_current: "cuCtxSetCurrent" (*mut c_void) -> c_int;
    stream_create: "cuStreamCreate" (*mut *mut c_void, c_uint) -> c_int;
    stream_destroy: "cuStreamDestroy_v2" (*mut c_void) -> c_int;
    stream_query: "cuStreamQuery" (*mut c_void) -> c_int;
    mem_get_info: "cuMemGetInfo_v2" (*mut usize, *mut usize) -> c_int;
    mem_host_alloc: "cuMemHostAlloc" (*mut *mut c_void, usize, c_uint) -> c_int;
    mem_free_host: "cuMemFreeHost" (*mut c_void) -> c_int;
    mem_alloc: "cuMemAlloc_v2" (*mut u64, usize) -> c_int;
    mem_free: "cuMemFree_v2" (u64) -> c_int;
    get_error_name: "cuGetErrorName" (c_int, *mut *const c_char) -> c_int;
}

/// The primary context of a GPU, which everything in this process that uses the GPU shares. It is never released,
/// because libraries have code in it.
pub(super) struct Context {
    functions: Functions,
    handle: *mut c_void,
}

// SAFETY: the driver lets any thread use a context; this one is only read.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// The context of the GPU of that number, current in this thread from now on.
    pub(super) fn of(ordinal: usize) -> Result<Context> {
        // SAFETY: a library of that name is CUDA's driver, which only initialises itself when it is loaded.
        let open = |name| unsafe { load(name, RTLD_LOCAL) };
        let library = open(NAMES[0])
            .or_else(|_| open(NAMES[1]))
            .map_err(|reason| {
                GroupError::Missing(format!(
                    "NCCL needs NVIDIA's driver, which does not load: {reason}"
                ))
            })?;
        // SAFETY: it is CUDA's driver; these are the types in `cuda.h`.
        let functions = unsafe { Functions::of(library) }.map_err(|reason| {
            GroupError::Missing(format!("NVIDIA's driver lacks a function: {reason}"))
        })?;
        let (mut device, mut handle) = (0, std::ptr::null_mut());
        // SAFETY: device and context are written before the calls return.
        unsafe {
            functions.checked("cuInit", (functions.init)(0))?;
            let code = (functions.device_get)(&mut device, ordinal as c_int);
            functions.checked("cuDeviceGet", code)?;
            let code = (functions.primary_ctx_retain)(&mut handle, device);
            functions.checked("cuDevicePrimaryCtxRetain", code)?;
        }
        let context = Context { functions, handle };
        context.enter()?;
        Ok(context)
    }

    /// Makes it current in the calling thread.
    pub(super) fn enter(&self) -> Result {
        // SAFETY: the context stays retained.
        let code = unsafe { (self.functions.ctx_set_current)(self.handle) };
        self.functions.checked("cuCtxSetCurrent", code)
    }

    /// Free bytes of the GPU's memory.
    pub(super) fn free_bytes(&self) -> Result<u64> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are written before it returns.
        let code = unsafe { (self.functions.mem_get_info)(&mut free, &mut total) };
        self.functions.checked("cuMemGetInfo", code)?;
        Ok(free as u64)
    }

    /// A stream that waits for no other.
    pub(super) fn stream(&self) -> Result<*mut c_void> {
        let mut stream = std::ptr::null_mut();
        // SAFETY: the stream is written before it returns.
        let code = unsafe { (self.functions.stream_create)(&mut stream, NON_BLOCKING) };
        self.functions.checked("cuStreamCreate", code)?;
        Ok(stream)
    }

    /// Whether a stream of [`Context::stream`] has done all its work.
    pub(super) fn is_done(&self, stream: *mut c_void) -> Result<bool> {
        // SAFETY: the stream is alive.
        match unsafe { (self.functions.stream_query)(stream) } {
            NOT_READY => Ok(false),
            code => self.functions.checked("cuStreamQuery", code).map(|()| true),
        }
    }

    /// Page-locked memory, which host and device use by the same addresses.
    pub(super) fn memory(&self, bytes: usize) -> Result<*mut u8> {
        let mut memory = std::ptr::null_mut();
        // SAFETY: the address is written before it returns.
        let code =
            unsafe { (self.functions.mem_host_alloc)(&mut memory, bytes, PORTABLE_AND_MAPPED) };
        self.functions.checked("cuMemHostAlloc", code)?;
        Ok(memory.cast())
    }

    /// Memory of the GPU.
    pub(super) fn device_memory(&self, bytes: usize) -> Result<*mut u8> {
        let mut address = 0;
        // SAFETY: the address is written before it returns.
        let code = unsafe { (self.functions.mem_alloc)(&mut address, bytes) };
        self.functions.checked("cuMemAlloc", code)?;
        Ok(std::ptr::without_provenance_mut(address as usize))
    }

    /// Gives back what [`Context::device_memory`] returned, and ignores errors.
    ///
    /// # Safety
    /// Nothing uses it.
    pub(super) unsafe fn give_back_device_memory(&self, memory: *mut u8) {
        // SAFETY: the caller's promise; it is from here.
        unsafe { (self.functions.mem_free)(memory.addr() as u64) };
    }

    /// Gives back what [`Context::memory`] and [`Context::stream`] returned, and ignores errors.
    ///
    /// # Safety
    /// Nothing uses them.
    pub(super) unsafe fn give_back(&self, memory: *mut u8, stream: *mut c_void) {
        // SAFETY: the caller's promise; they are from here.
        unsafe {
            if !memory.is_null() {
                (self.functions.mem_free_host)(memory.cast());
            }
            if !stream.is_null() {
                (self.functions.stream_destroy)(stream);
            }
        }
    }
}

impl Functions {
    fn checked(&self, what: &str, code: c_int) -> Result {
        if code == SUCCESS {
            return Ok(());
        }
        let mut name = std::ptr::null();
        // SAFETY: the text is static, or null for codes without a name.
        let name = unsafe {
            (self.get_error_name)(code, &mut name);
            match name.is_null() {
                true => code.to_string(),
                false => CStr::from_ptr(name).to_string_lossy().into_owned(),
            }
        };
        Err(GroupError::Failed(format!("{what} failed: {name}")))
    }
}
