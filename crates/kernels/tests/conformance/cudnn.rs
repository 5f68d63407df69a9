//! Attention by cuDNN: on a GPU of compute capability 9.0 with the library, or on what stands in for both.

use crate::attention::{Attention, Scores, shape};
use crate::device::planning;
use crate::dropout::Dropped;
use crate::flash_attention::FlashAttention;
use kernels::{Fault, Flash, Target};
use memory::DType;

fn case(dtype: DType, sizes: [usize; 5]) -> FlashAttention {
    let attention = Attention {
        dtype,
        shape: shape(sizes),
        scores: Scores::Random(1.5),
        dropout: None,
    };
    FlashAttention {
        by: Flash::Cudnn,
        ..FlashAttention::plain(attention)
    }
}

/// As planned as on a device: what cuDNN does not compute is a defect of the caller.
#[test]
fn what_cudnn_does_not_compute_is_refused() {
    let fits = || case(DType::BF16, [2, 37, 8, 2, 16]);
    let mut dropped = fits();
    dropped.attention.dropout = Some(Dropped {
        probability: 0.1,
        key: 1,
    });
    let packed = FlashAttention {
        lengths: vec![5, 30],
        ..fits()
    };
    let mut narrow = fits();
    narrow.attention.shape.v_head_dim = 8;
    let misfits = [
        case(DType::F32, [2, 37, 8, 2, 16]),
        case(DType::BF16, [2, 37, 8, 2, 20]),
        case(DType::BF16, [2, 37, 8, 2, 136]),
        case(DType::BF16, [2, 1, 8, 2, 16]),
        narrow,
        dropped,
        packed,
    ];
    for device in planning(DType::BF16) {
        let called = |case: &FlashAttention| {
            let qkv = case.attention.qkv().map(|host| device.put(&host));
            let mut out = device.room(case.attention.dtype, case.attention.shape.out());
            case.run_forward(&device, Some(out.view_mut()), None, qkv.each_ref())
        };
        let is_cuda = device.kernels.target() == Target::Cuda;
        assert_eq!(called(&fits()).is_ok(), is_cuda, "{}", device.name);
        for misfit in &misfits {
            let refused = called(misfit).unwrap_err();
            assert_eq!(refused.fault, Fault::Caller, "{misfit:?}: {refused}");
        }
    }
}

/// The emulation runs our kernels, and has no library.
#[test]
fn a_device_without_cudnn_says_so() {
    use crate::case::Case;
    let devices = crate::device::computing(DType::BF16);
    let emulated = devices
        .iter()
        .find(|device| device.name.contains("emulated"));
    let Some(device) = emulated else { return };
    let refused = case(DType::BF16, [1, 37, 2, 1, 16])
        .run(device)
        .unwrap_err();
    assert!(refused.message.contains("no cuDNN"), "{refused}");
}

/// batch, seq, heads, kv_heads, head_dim: two tokens; below, at and above tiles of queries and keys; groups of 1 to 8.
#[cfg(feature = "cuda")]
const SHAPES: [[usize; 5]; 8] = [
    [1, 2, 1, 1, 8],
    [2, 37, 8, 1, 24],
    [1, 63, 2, 1, 48],
    [3, 65, 4, 4, 40],
    [1, 128, 2, 2, 128],
    [2, 129, 6, 2, 72],
    [1, 192, 8, 2, 64],
    [1, 200, 4, 1, 96],
];

#[cfg(feature = "cuda")]
mod on_a_device {
    use super::*;
    use crate::case::{judge, run};
    use crate::device::gpu;
    use crate::optional_outputs::flash_attention;
    use kernels::cuda::CudaDevice;
    use std::process::Command;

    /// Whether the first GPU computes attention by cuDNN.
    fn is_there() -> bool {
        let device = CudaDevice::open(0);
        let checked = device.and_then(|device| device.check_cudnn(shape([1, 64, 4, 2, 64])));
        if let Err(error) = &checked {
            println!("no cuDNN: {error}");
        }
        checked.is_ok()
    }

    /// Against the oracle, twice the same bits, whatever was in memory before, and whichever output is left out.
    #[test]
    fn cases() {
        if !is_there() {
            return;
        }
        let device = gpu(DType::BF16).expect("it was opened");
        for sizes in SHAPES {
            let case = case(DType::BF16, sizes);
            device.memory.set_poison(true);
            judge(&case, std::slice::from_ref(&device));
            let first = run(&case, &device);
            device.memory.set_poison(false);
            assert!(first == run(&case, &device), "{case:?}: other bits");
            let wanted = [[true, true], [true, false], [false, true]];
            let [both, out, lse] = wanted.map(|wanted| flash_attention(&case, &device, wanted));
            assert!(out[0] == both[0], "out alone of {case:?}");
            assert!(lse[1] == both[1], "lse alone of {case:?}");
            let own = FlashAttention {
                by: Flash::Own,
                ..self::case(DType::BF16, sizes)
            };
            judge(&own, std::slice::from_ref(&device));
            println!("{sizes:?}: passed on {}", device.name);
        }
    }

    /// In a process of its own, since a process finds one driver.
    fn with_libraries(version: &str) -> (String, String) {
        let driver = emulation::stand_in_folder();
        let folders = std::env::join_paths([driver.to_path_buf(), driver.join("cudnn")]);
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "cudnn::on_a_device::cases", "--nocapture"])
            .env("LD_LIBRARY_PATH", folders.unwrap())
            .env("STAND_IN_CUDNN_VERSION", version)
            .output()
            .unwrap();
        let [stdout, stderr] =
            [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
        assert!(output.status.success(), "{stdout}{stderr}");
        assert!(!stderr.contains("stand-in: "), "{stderr}");
        (stdout, stderr)
    }

    #[test]
    fn the_stand_in_gives_what_cudnn_must() {
        let (stdout, stderr) = with_libraries("92800");
        let passed = stdout.matches("passed on Stand-in GPU").count();
        assert_eq!(passed, SHAPES.len(), "{stdout}{stderr}");
    }

    #[test]
    fn a_version_without_ordered_sums_is_not_taken() {
        let (stdout, _) = with_libraries("92100");
        let told = stdout.contains("no cuDNN") && stdout.contains("9.25.0 or newer");
        assert!(told && !stdout.contains("passed on"), "{stdout}");
    }
}
