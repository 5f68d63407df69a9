//! Attention by cuDNN: on a GPU of compute capability 9.0 with the library, or on what stands in for both.

use crate::attention::{Attention, Scores, shape};
use crate::device::{Tensor, planning};
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
    let documents = |sizes| FlashAttention {
        lengths: vec![37],
        ..case(DType::BF16, sizes)
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
        documents([2, 37, 8, 2, 24]),
    ];
    for device in planning(DType::BF16) {
        let called = |case: &FlashAttention| {
            let qkv = case.attention.qkv().map(|host| device.put(&host));
            let mut out = device.room(case.attention.dtype, case.attention.shape.out());
            let qkv = qkv.each_ref().map(Tensor::view);
            case.run_forward(&device, Some(out.view_mut()), None, qkv)
        };
        let is_cuda = device.kernels.target() == Target::Cuda;
        for fits in [
            fits(),
            documents([2, 37, 8, 2, 16]),
            case(DType::BF16, [2, 37, 8, 2, 24]),
        ] {
            assert_eq!(called(&fits).is_ok(), is_cuda, "{}", device.name);
        }
        for misfit in &misfits {
            let refused = called(misfit).unwrap_err();
            assert_eq!(refused.fault, Fault::Caller, "{misfit:?}: {refused}");
        }
    }
}

/// Rows of q, k and v, and of their gradients, may have gaps between them where cuDNN computes: as large ones for both, and
/// whole pieces of 16 bytes.
#[test]
fn rows_that_cudnn_cannot_read_are_refused() {
    let shape = shape([2, 37, 8, 2, 16]);
    let widths = [shape.q(), shape.k(), shape.v()].map(|[_, width]| width);
    let width: usize = widths.iter().sum();
    for device in planning(DType::BF16) {
        if device.kernels.target() != Target::Cuda {
            continue;
        }
        let called = |by: Flash, extra: usize, of_gradients: usize| {
            let case = FlashAttention {
                by,
                ..self::case(DType::BF16, [2, 37, 8, 2, 16])
            };
            let dims = |extra| [shape.q()[0], width + extra];
            let mut out = device.room(DType::BF16, shape.out());
            let mut lse = device.room(DType::F32, case.lse_dims());
            let qkv = device.room(DType::BF16, dims(extra));
            let mut joined = device.room(DType::BF16, dims(of_gradients));
            let qkv = qkv.view().split_columns(widths);
            case.run_forward(&device, Some(out.view_mut()), Some(lse.view_mut()), qkv)?;
            let gradients = joined.view_mut().split_columns(widths);
            case.run_backward(&device, gradients, qkv, [&out, &lse])
        };
        for fits in [0, 8] {
            called(Flash::Cudnn, fits, fits).unwrap();
        }
        for (by, extra, of_gradients, word) in [
            (Flash::Own, 0, 0, "`q` is strided"),
            (
                Flash::Cudnn,
                4,
                4,
                "rows of `q` do not begin at multiples of 16",
            ),
            (
                Flash::Cudnn,
                8,
                0,
                "rows of `dq` are not as far apart as those of `q`",
            ),
        ] {
            let refused = called(by, extra, of_gradients).unwrap_err();
            assert_eq!(refused.fault, Fault::Caller, "{refused}");
            assert!(refused.message.contains(word), "{refused}");
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

/// Sizes, and lengths of the documents of every row: that end within tiles and at them; of one token; as long as the sequence; as many
/// as there is room for, and fewer.
#[cfg(feature = "cuda")]
const DOCUMENTS: [([usize; 5], &[usize]); 5] = [
    ([2, 200, 4, 2, 64], &[70, 130]),
    ([2, 128, 2, 2, 16], &[64]),
    ([1, 300, 8, 1, 48], &[100, 1, 199]),
    ([2, 130, 6, 2, 128], &[130]),
    ([3, 65, 4, 4, 32], &[1, 64]),
];

#[cfg(feature = "cuda")]
mod on_a_device {
    use super::*;
    use crate::cached_attention::columns;
    use crate::case::{judge, run};
    use crate::device::{Device, gpu};
    use crate::host::Host;
    use crate::optional_outputs::flash_attention;
    use kernels::cuda::{CudaDevice, LibraryShape};
    use std::process::Command;

    /// Whether the first GPU computes attention by cuDNN.
    fn is_there() -> bool {
        let whole = LibraryShape::packed(shape([1, 64, 4, 2, 64]));
        let of_documents = LibraryShape::of_documents(shape([1, 64, 4, 2, 64]));
        [whole, of_documents].into_iter().all(|shape| {
            let device = CudaDevice::open(0);
            let checked = device.and_then(|device| device.check_cudnn(shape));
            if let Err(error) = &checked {
                println!("no cuDNN: {error}");
            }
            checked.is_ok()
        })
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
            assert!(
                first == packed(&case, &device),
                "{case:?}: other bits where packed"
            );
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

    /// Against the oracle, which our own kernels keep to as well, and twice the same bits, whatever was in memory before.
    #[test]
    fn documents() {
        if !is_there() {
            return;
        }
        let device = gpu(DType::BF16).expect("it was opened");
        for (sizes, lengths) in DOCUMENTS {
            let whole = case(DType::BF16, sizes);
            let case = |by| FlashAttention {
                lengths: lengths.to_vec(),
                by,
                ..self::case(DType::BF16, sizes)
            };
            let (case, own) = (case(Flash::Cudnn), case(Flash::Own));
            device.memory.set_poison(true);
            for case in [&case, &own] {
                judge(case, std::slice::from_ref(&device));
            }
            let first = run(&case, &device);
            device.memory.set_poison(false);
            assert!(first == run(&case, &device), "{case:?}: other bits");
            if lengths != [sizes[1]] {
                assert!(first != run(&whole, &device), "{case:?}: as without");
            }
            println!("{sizes:?}: passed on {}", device.name);
        }
    }

    /// As the case runs, but with q, k and v, and their gradients, as columns of one tensor each.
    fn packed(case: &FlashAttention, device: &Device) -> Vec<Host> {
        let (shape, dtype) = (case.attention.shape, case.attention.dtype);
        let widths = [shape.q(), shape.k(), shape.v()].map(|[_, width]| width);
        let dims = [shape.q()[0], widths.iter().sum()];
        let parts = case.attention.qkv().map(|part| part.values());
        let row = |token: usize| {
            let of_part =
                |(part, width): (&Vec<f64>, usize)| part[token * width..][..width].to_vec();
            parts
                .iter()
                .zip(widths)
                .flat_map(of_part)
                .collect::<Vec<_>>()
        };
        let qkv = device.put(&Host::new(dtype, dims, (0..dims[0]).flat_map(row)));
        let mut out = device.room(dtype, shape.out());
        let mut lse = device.room(DType::F32, case.lse_dims());
        let mut joined = device.room(dtype, dims);
        let (out_view, lse_view) = (out.view_mut(), lse.view_mut());
        let qkv = qkv.view().split_columns(widths);
        let ran = case.run_forward(device, Some(out_view), Some(lse_view), qkv);
        ran.unwrap();
        let gradients = joined.view_mut().split_columns(widths);
        let ran = case.run_backward(device, gradients, qkv, [&out, &lse]);
        ran.unwrap();
        let joined = device.take(&joined);
        let [q_width, k_width, _] = widths;
        let ends = [0, q_width, q_width + k_width, dims[1]];
        let gradients = ends.windows(2).map(|end| columns(&joined, end[0]..end[1]));
        let forward = [device.take(&lse), device.take(&out)];
        forward.into_iter().chain(gradients).collect()
    }

    /// In a process of its own, since a process finds one driver.
    fn with_libraries(test: &str, version: &str) -> (String, String) {
        let driver = emulation::stand_in_folder();
        let folders = std::env::join_paths([driver.to_path_buf(), driver.join("cudnn")]);
        let output = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                &format!("cudnn::on_a_device::{test}"),
                "--nocapture",
            ])
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
        for (test, cases) in [("cases", SHAPES.len()), ("documents", DOCUMENTS.len())] {
            let (stdout, stderr) = with_libraries(test, "92800");
            let passed = stdout.matches("passed on Stand-in GPU").count();
            assert_eq!(passed, cases, "{stdout}{stderr}");
        }
    }

    #[test]
    fn a_version_without_ordered_sums_is_not_taken() {
        let (stdout, _) = with_libraries("cases", "92100");
        let told = stdout.contains("no cuDNN") && stdout.contains("9.25.0 or newer");
        assert!(told && !stdout.contains("passed on"), "{stdout}");
    }
}
