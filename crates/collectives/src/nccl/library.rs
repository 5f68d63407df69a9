//! NCCL's functions.

use crate::GroupError;
use crate::Result;
use crate::loading::{functions, load, reason};
use libloading::os::unix::RTLD_LOCAL;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::offset_of;

/// Names a library outright.
const VARIABLE: &str = "TRAINER_NCCL";
const NAME: &str = "libnccl.so.2";

/// The oldest version with all functions used here: 2.18.1, as the number that `NCCL_VERSION` of `nccl.h` makes of it.
const OLDEST: c_int = 2_18_01;

/// The most channels that NCCL opens to each of a rank's peers. Each channel has buffers of its own, and takes a block of the GPU
/// during an exchange. NCCL's own limit is 32, and it rounds up to a power of two. `NCCL_MAX_CTAS` in the environment overrides
/// this.
pub const NCCL_CHANNELS: u32 = 16;

/// `ncclDataType_t` of bytes.
pub(super) const INT8: c_int = 0;

/// `ncclResult_t`: done, and not yet.
const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;

/// `ncclComm_t`.
pub(super) type Handle = *mut c_void;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct UniqueId(pub(super) [u8; 128]);

/// `ncclConfig_t` as in the `nccl.h` of 2.18. Later versions (2.32.3 too) have more fields behind these, and tell by
/// `size` and `version` which are there.
#[repr(C)]
pub(super) struct CommConfig {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

// The same size as in the stand-in, which `scripts/check-nccl` compares with `nccl.h`.
const _: () =
    assert!(offset_of!(CommConfig, version) == 12 && offset_of!(CommConfig, blocking) == 16);
const _: () =
    assert!(offset_of!(CommConfig, net_name) == 32 && offset_of!(CommConfig, split_share) == 40);

impl CommConfig {
    /// Calls return before they are done, so that waiting can time out, and there are at most [`NCCL_CHANNELS`]
    /// channels.
    pub(super) fn non_blocking() -> CommConfig {
        // `NCCL_CONFIG_UNDEF_INT`.
        let undefined = c_int::MIN;
        CommConfig {
            size: size_of::<CommConfig>(),
            magic: 0xcafe_beef,
            version: OLDEST as c_uint,
            blocking: 0,
            cga_cluster_size: undefined,
            min_ctas: undefined,
            max_ctas: NCCL_CHANNELS as c_int,
            net_name: std::ptr::null(),
            split_share: undefined,
        }
    }
}

functions! {
    get_unique_id: "ncclGetUniqueId" (*mut UniqueId) -> c_int;
    comm_init_rank_config: "ncclCommInitRankConfig" (*mut Handle, c_int, UniqueId, c_int, *mut CommConfig) -> c_int;
    comm_get_async_error: "ncclCommGetAsyncError" (Handle, *mut c_int) -> c_int;
    comm_finalize: "ncclCommFinalize" (Handle) -> c_int;
    comm_destroy: "ncclCommDestroy" (Handle) -> c_int;
    comm_abort: "ncclCommAbort" (Handle) -> c_int;
    group_start: "ncclGroupStart" () -> c_int;
    group_end: "ncclGroupEnd" () -> c_int;
    send: "ncclSend" (*const c_void, usize, c_int, c_int, Handle, *mut c_void) -> c_int;
    recv: "ncclRecv" (*mut c_void, usize, c_int, c_int, Handle, *mut c_void) -> c_int;
    all_gather: "ncclAllGather" (*const c_void, *mut c_void, usize, c_int, Handle, *mut c_void) -> c_int;
    get_error_string: "ncclGetErrorString" (c_int) -> *const c_char;
    get_last_error: "ncclGetLastError" (Handle) -> *const c_char;
}

/// NCCL, loaded until the process ends.
pub(super) struct NcclLibrary {
    pub(super) functions: Functions,
    /// `NCCL 2.32.3`.
    pub(super) version: String,
}

impl NcclLibrary {
    /// Loads it by its name, or from the path in [`VARIABLE`].
    pub(super) fn load() -> Result<&'static NcclLibrary> {
        let path = std::env::var_os(VARIABLE).filter(|path| !path.is_empty());
        let path = path.unwrap_or_else(|| NAME.into());
        // SAFETY: a library of that name is NCCL, which only initialises itself when it is loaded.
        let library = unsafe { load(&path, RTLD_LOCAL) };
        let library = library.map_err(|error| {
            GroupError::Missing(format!(
                "NCCL does not load: {error}; install it (`apt install libnccl2`, or `pip install nvidia-nccl-cu12`, with the \
                 folder of its {NAME} in LD_LIBRARY_PATH), or name its file in {VARIABLE}"
            ))
        })?;
        let lacks = |error| GroupError::Missing(format!("{} is no NCCL: {error}", path.display()));
        let mut number = 0;
        // SAFETY: the type is that in `nccl.h`; the function needs no GPU.
        let code = unsafe {
            let version =
                library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>("ncclGetVersion");
            version.map_err(reason).map_err(lacks)?(&mut number)
        };
        // Since 2.9 the number has two digits for each of the later parts.
        let version = format!(
            "NCCL {}.{}.{}",
            number / 10_000,
            number / 100 % 100,
            number % 100
        );
        if code != SUCCESS || number < OLDEST {
            return Err(GroupError::Missing(format!(
                "{} says that it is {version}; 2.18.1 or later is needed: install it, or name one in {VARIABLE}",
                path.display()
            )));
        }
        // SAFETY: it is NCCL, of a version that has them.
        let functions = unsafe { Functions::of(library) }.map_err(lacks)?;
        Ok(Box::leak(Box::new(NcclLibrary { functions, version })))
    }

    /// Turns a function's code into a result, for a communicator or none. A call still in progress has not failed.
    pub(super) fn checked(&self, comm: Handle, what: &str, code: c_int) -> Result {
        if matches!(code, SUCCESS | IN_PROGRESS) {
            return Ok(());
        }
        // SAFETY: both give texts that stay, and the communicator may be null.
        let [said, last] = unsafe {
            let texts = [
                (self.functions.get_error_string)(code),
                (self.functions.get_last_error)(comm),
            ];
            texts.map(|text| match text.is_null() {
                true => String::new(),
                false => CStr::from_ptr(text).to_string_lossy().trim().to_owned(),
            })
        };
        let last = if last.is_empty() {
            last
        } else {
            format!(" ({last})")
        };
        let version = &self.version;
        Err(GroupError::Failed(format!(
            "{version}: {what} failed: {said}{last}"
        )))
    }

    /// Whether a communicator's last call is complete.
    pub(super) fn is_settled(&self, comm: Handle, what: &str) -> Result<bool> {
        let mut state = SUCCESS;
        // SAFETY: the communicator is alive, and the state is written before it returns.
        let code = unsafe { (self.functions.comm_get_async_error)(comm, &mut state) };
        self.checked(comm, what, code)?;
        self.checked(comm, what, state)?;
        Ok(state == SUCCESS)
    }
}
