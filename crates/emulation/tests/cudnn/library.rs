//! The stand-in's functions as a program calls them, with the driver's memory below.

use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::transmute;
use std::sync::OnceLock;

unsafe extern "C" {
    fn dlopen(file: *const c_char, mode: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// Names that `cudnn_graph.h` gives to kinds of descriptors, attributes and types.
pub mod names {
    pub const POINTWISE: i32 = 0;
    pub const ENGINE: i32 = 2;
    pub const CONFIGURATION: i32 = 3;
    pub const HEURISTIC: i32 = 4;
    pub const PLAN: i32 = 5;
    pub const KNOB_CHOICE: i32 = 7;
    pub const OPERATION_POINTWISE: i32 = 13;
    pub const OPERATION_GRAPH: i32 = 15;
    pub const VARIANT_PACK: i32 = 16;
    pub const TENSOR: i32 = 17;
    pub const MATMUL: i32 = 18;
    pub const OPERATION_MATMUL: i32 = 19;
    pub const REDUCTION: i32 = 21;
    pub const OPERATION_REDUCTION: i32 = 22;
    pub const OPERATION_RESHAPE: i32 = 31;
    pub const DEVICE: i32 = 38;
    pub const OPERATION_ATTENTION: i32 = 41;
    pub const OPERATION_BAND_MASK: i32 = 44;
    pub const OPERATION_SOFTMAX: i32 = 45;

    pub const DATA_TYPE: i32 = 1;
    pub const HEURISTIC_MODE: i32 = 8;
    pub const KNOB: i32 = 9;
    pub const POINTWISE_MODE: i32 = 14;
    pub const REDUCTION_OPERATOR: i32 = 18;

    pub const F32: i32 = 0;
    pub const F16: i32 = 2;
    pub const I32: i32 = 4;
    pub const BF16: i32 = 9;
    pub const BOOLEAN: i32 = 11;
}

/// The value of an attribute.
pub enum Value<'a> {
    Numbers(&'a [i64]),
    Real(f32),
    Flag(bool),
    /// A type of attributes, and a value of it.
    Choice(i32, i32),
    Text(&'a str),
    Pointers(&'a [*mut c_void]),
    Descriptors(&'a [&'a Descriptor]),
}

/// A library that is never unloaded.
struct Loaded(*mut c_void);

// SAFETY: a handle of the loader, which any thread may use.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

impl Loaded {
    fn open(path: &std::path::Path) -> Loaded {
        let text = CString::new(path.as_os_str().as_encoded_bytes()).expect("paths hold no zero");
        // SAFETY: the text ends in a zero; RTLD_NOW is 2.
        let library = unsafe { dlopen(text.as_ptr(), 2) };
        assert!(!library.is_null(), "{} does not load", path.display());
        Loaded(library)
    }

    fn address(&self, name: &str) -> *mut c_void {
        let text = CString::new(name).expect("names hold no zero");
        // SAFETY: the library is loaded, the text ends in a zero.
        let address = unsafe { dlsym(self.0, text.as_ptr()) };
        assert!(!address.is_null(), "there is no {name}");
        address
    }
}

pub fn load_cudnn_alone() {
    Loaded::open(&emulation::cudnn_folder().join("libcudnn.so.9"));
}

fn driver() -> &'static Loaded {
    static DRIVER: OnceLock<Loaded> = OnceLock::new();
    DRIVER.get_or_init(|| {
        emulation::load_stand_in();
        Loaded::open(&emulation::stand_in_folder().join("libcuda.so"))
    })
}

fn cudnn() -> &'static Loaded {
    static CUDNN: OnceLock<Loaded> = OnceLock::new();
    CUDNN.get_or_init(|| {
        driver();
        Loaded::open(&emulation::cudnn_folder().join("libcudnn.so.9"))
    })
}

macro_rules! call {
    ($library:expr, $name:ident($($argument:expr => $type:ty),*)) => {{
        type Function = unsafe extern "C" fn($($type),*) -> c_int;
        // SAFETY: the function has this type, and the arguments live as long as the call.
        unsafe { transmute::<*mut c_void, Function>($library.address(stringify!($name)))($($argument),*) }
    }};
}

/// A call's status; an error with the library's message if it refuses.
fn checked(status: c_int) -> Result<(), String> {
    if status == 0 {
        return Ok(());
    }
    let mut text = [0 as c_char; 512];
    type LastError = unsafe extern "C" fn(*mut c_char, usize);
    // SAFETY: the function has this type, and ends its text with a zero.
    let said = unsafe {
        transmute::<*mut c_void, LastError>(cudnn().address("cudnnGetLastErrorString"))(
            text.as_mut_ptr(),
            text.len(),
        );
        CStr::from_ptr(text.as_ptr())
    };
    Err(format!("{status}: {}", said.to_string_lossy()))
}

/// A descriptor, destroyed when it is dropped.
pub struct Descriptor(Cell<*mut c_void>);

impl Descriptor {
    pub fn new(kind: i32) -> Result<Descriptor, String> {
        let mut made = std::ptr::null_mut();
        checked(
            call!(cudnn(), cudnnBackendCreateDescriptor(kind => i32, &mut made => *mut *mut c_void)),
        )?;
        Ok(Descriptor(Cell::new(made)))
    }

    pub fn set(&self, attribute: i32, value: Value) -> Result<(), String> {
        let (flag, real, choice);
        let handles: Vec<*mut c_void>;
        let (kind, count, elements): (i32, usize, *const c_void) = match value {
            Value::Numbers(numbers) => (3, numbers.len(), numbers.as_ptr().cast()),
            Value::Real(number) => {
                real = number;
                (4, 1, (&raw const real).cast())
            }
            Value::Flag(set) => {
                flag = u8::from(set);
                (2, 1, (&raw const flag).cast())
            }
            Value::Choice(kind, chosen) => {
                choice = chosen;
                (kind, 1, (&raw const choice).cast())
            }
            Value::Text(text) => (24, text.len(), text.as_ptr().cast()),
            Value::Pointers(pointers) => (6, pointers.len(), pointers.as_ptr().cast()),
            Value::Descriptors(descriptors) => {
                handles = descriptors.iter().map(|each| each.0.get()).collect();
                (15, handles.len(), handles.as_ptr().cast())
            }
        };
        checked(
            call!(cudnn(), cudnnBackendSetAttribute(self.0.get() => *mut c_void, attribute => i32, kind => i32,
            count as i64 => i64, elements => *const c_void)),
        )
    }

    pub fn finalize(&self) -> Result<(), String> {
        checked(call!(cudnn(), cudnnBackendFinalize(self.0.get() => *mut c_void)))
    }

    /// An attribute that is one number.
    pub fn number(&self, attribute: i32) -> Result<i64, String> {
        let mut number = 0i64;
        checked(
            call!(cudnn(), cudnnBackendGetAttribute(self.0.get() => *mut c_void, attribute => i32, 3 => i32, 1 => i64,
            std::ptr::null_mut() => *mut i64, &mut number => *mut i64)),
        )?;
        Ok(number)
    }

    /// The first descriptor of an attribute, of this kind.
    pub fn first(&self, attribute: i32, kind: i32) -> Result<Descriptor, String> {
        let place = Descriptor::new(kind)?;
        let (mut count, mut handle) = (0i64, place.0.get());
        checked(
            call!(cudnn(), cudnnBackendGetAttribute(self.0.get() => *mut c_void, attribute => i32, 15 => i32, 1 => i64,
            &mut count => *mut i64, &mut handle => *mut *mut c_void)),
        )?;
        if count == 0 {
            return Err("none was found".into());
        }
        Ok(place)
    }

    /// Destroys it now; using it afterwards is a mistake.
    pub fn destroy(&self) -> Result<(), String> {
        checked(call!(cudnn(), cudnnBackendDestroyDescriptor(self.0.get() => *mut c_void)))
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // If a test has destroyed it already, the library refuses; ignore that.
        let _ = self.destroy();
    }
}

/// A handle with its stream, in a context that is current on this thread, and a pool of memory.
pub struct Session {
    handle: *mut c_void,
    pool: *mut c_void,
    pub stream: *mut c_void,
}

impl Session {
    pub fn new() -> Session {
        let (mut context, mut stream, mut pool, mut handle) = [std::ptr::null_mut(); 4].into();
        let mut properties = [0u64; 11];
        // Pinned, without handles; on device 0.
        (properties[0], properties[1]) = (1, 1);
        for status in [
            call!(driver(), cuInit(0 => u32)),
            call!(driver(), cuDevicePrimaryCtxRetain(&mut context => *mut *mut c_void, 0 => i32)),
            call!(driver(), cuCtxSetCurrent(context => *mut c_void)),
            call!(driver(), cuStreamCreate(&mut stream => *mut *mut c_void, 1 => u32)),
            call!(driver(), cuMemPoolCreate(&mut pool => *mut *mut c_void, properties.as_ptr() => *const u64)),
            call!(cudnn(), cudnnCreate(&mut handle => *mut *mut c_void)),
            call!(cudnn(), cudnnSetStream(handle => *mut c_void, stream => *mut c_void)),
        ] {
            assert_eq!(status, 0);
        }
        Session {
            handle,
            pool,
            stream,
        }
    }

    /// A block of the device: NaN, and unmapped beyond its end.
    pub fn block(&self, bytes: usize) -> *mut c_void {
        let mut address = std::ptr::null_mut();
        let status = call!(driver(), cuMemAllocFromPoolAsync(&mut address => *mut *mut c_void, bytes => usize,
            self.pool => *mut c_void, self.stream => *mut c_void));
        assert_eq!(status, 0);
        address
    }

    pub fn set_stream(&self, stream: *mut c_void) {
        assert_eq!(
            call!(cudnn(), cudnnSetStream(self.handle => *mut c_void, stream => *mut c_void)),
            0
        );
    }

    pub fn execute(&self, plan: &Descriptor, pack: &Descriptor) -> Result<(), String> {
        checked(
            call!(cudnn(), cudnnBackendExecute(self.handle => *mut c_void, plan.0.get() => *mut c_void,
            pack.0.get() => *mut c_void)),
        )
    }
}
