//! GPUs that are there, that are not, and that cannot be used.

use super::{IDLE, on_gpu};
use crate::workplace::Workplace;
use serde_json::Value;

const RUN: &str = "--config small.toml --device cuda --out run";

/// What was created by then is given back: the stand-in says what is left.
#[test]
fn a_gpu_that_cannot_be_used_ends_the_run_before_it_begins() {
    let place = Workplace::new();
    for (setting, word) in [
        (("STAND_IN_DEVICES", "0"), "CUDA_ERROR_NO_DEVICE"),
        (("STAND_IN_CAPABILITY", "7.5"), "compute capability 7.5"),
        (
            ("STAND_IN_DRIVER_VERSION", "11080"),
            "is for CUDA 11.8, and the kernels",
        ),
        (("STAND_IN_POOLS", "0"), "CUDA_ERROR_NOT_SUPPORTED"),
    ] {
        let words = [word, "the device cuda cannot be used", "--device cpu"];
        on_gpu(&place, RUN, &[setting]).fails(5, &words);
        assert!(!place.path("run").exists());
    }
    let second = "--config small.toml --device cuda:1";
    on_gpu(&place, second, &[]).fails(5, &["there is no GPU 1: the driver finds 1"]);
}

#[test]
fn host_memory_that_cannot_be_locked_is_said() {
    let place = Workplace::new();
    let settings = [("STAND_IN_LOCKED_BYTES_MAX", "1048576")];
    on_gpu(&place, RUN, &settings).fails(5, &["page-locked", "ulimit -l"]);
}

#[test]
fn a_gpu_is_chosen_by_its_number_and_by_default() {
    let place = Workplace::new();
    let flags = "--config small.toml --steps 1 --accum 1";
    let two = [("STAND_IN_DEVICES", "2")];
    on_gpu(
        &place,
        &format!("{flags} --device cuda:1 --out second"),
        &two,
    )
    .succeeds();
    on_gpu(&place, &format!("{flags} --out default"), &[]).succeeds();
    for (out, device) in [("second", "cuda:1"), ("default", "cuda")] {
        let config = place.text(&format!("{out}/config.toml"));
        assert!(
            config.contains(&format!("device = \"{device}\"")),
            "{config}"
        );
    }
}

/// As a GPU of a compute capability and a driver for a CUDA version.
fn machine<'a>(capability: &'a str, driver: &'a str) -> [(&'a str, &'a str); 3] {
    [
        IDLE,
        ("STAND_IN_CAPABILITY", capability),
        ("STAND_IN_DRIVER_VERSION", driver),
    ]
}

/// What a GPU has its kernels from: machine code for it, on any driver that knows it, or PTX where the binary has none. All
/// are there before the first step, used or not.
#[test]
fn every_gpu_has_its_kernels_from_what_was_made_for_it() {
    let place = Workplace::new();
    let sources = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../../kernels"));
    let is_source = |path: &std::path::Path| path.extension().is_some_and(|end| end == "cu");
    let sources = sources.unwrap().map(|entry| entry.unwrap().path());
    let sources = sources.filter(|path| is_source(path));
    let sources: Vec<String> = sources.map(|path| path.display().to_string()).collect();
    for (capability, image, drivers) in [
        ("8.0", "sm_80", &["12000", "12020", "12080", "13000"][..]),
        ("8.9", "sm_80", &["12020"]),
        ("9.0", "sm_90", &["12000", "12020", "12080", "13000"]),
        ("10.0", "sm_100", &["12080", "13000"]),
        ("10.3", "sm_100", &["12090"]),
        ("11.0", "compute_80", &["13000"]),
        ("12.0", "sm_120", &["12080", "13000"]),
    ] {
        for driver in drivers {
            let path = place.path("images");
            let loaded = ("STAND_IN_IMAGES", path.to_str().unwrap());
            let settings = [&machine(capability, driver)[..], &[loaded]].concat();
            std::fs::write(&path, "").unwrap();
            let run = "--config small.toml --device cuda --steps 1 --attention eager";
            on_gpu(&place, run, &settings).succeeds();
            let loaded = place.text("images");
            let loaded: Vec<&str> = loaded.lines().collect();
            // Sources of instructions that Hopper alone has are named so.
            let is_loaded = |name: &&String| image == "sm_90" || !name.ends_with("_sm90.cu");
            let sources = sources.iter().filter(is_loaded).count();
            assert_eq!(loaded, vec![image; sources], "{capability} on {driver}");
        }
    }
}

#[test]
fn a_driver_that_is_too_old_is_refused_with_both_versions() {
    let place = Workplace::new();
    for (capability, driver, has, needs) in [
        ("8.0", "11080", "11.8", "12.0"),
        ("9.0", "11080", "11.8", "12.0"),
        ("10.0", "12020", "12.2", "12.8"),
        ("12.0", "12020", "12.2", "12.8"),
        ("11.0", "12080", "12.8", "12.9"),
    ] {
        let has = format!("is for CUDA {has}, and the kernels");
        let needs = format!("need one for CUDA {needs} or newer");
        let outcome = on_gpu(&place, RUN, &machine(capability, driver));
        outcome.fails(5, &[&has, &needs, "update the driver"]);
        assert!(!place.path("run").exists());
    }
}

/// CUDA 12 and 13 name the library after themselves, and a driver starts none that is later than it.
#[test]
fn cublaslt_is_found_by_either_name_and_must_fit_the_driver() {
    let run = "doctor --json --threads 1";
    for (name, version, driver) in [
        ("libcublasLt.so.12", "120904", "12020"),
        ("libcublasLt.so.13", "130002", "13000"),
    ] {
        let place = Workplace::new();
        for (library, name) in [("libcuda.so", "libcuda.so"), ("libcublasLt.so", name)] {
            let library = emulation::stand_in_folder().join(library);
            std::fs::copy(library, place.path(name)).unwrap();
        }
        let folder = place.path("");
        let folder = ("LD_LIBRARY_PATH", folder.to_str().unwrap());
        let library = ("STAND_IN_LIBRARY_VERSION", version);
        let settings = [&machine("9.0", driver)[..], &[folder, library]].concat();
        let outcome = place.trainer_with(run, &settings).succeeds();
        let found: Value = serde_json::from_str(&outcome.stdout).unwrap();
        let gpu = &found["gpus"][0];
        assert_eq!(gpu["library_version"].to_string(), version, "{found}");
        let path = gpu["library_path"].as_str().unwrap();
        assert!(path.ends_with(name), "{path}");
    }
    let place = Workplace::new();
    let too_new = [("STAND_IN_LIBRARY_VERSION", "130002")];
    let settings = [&machine("9.0", "12080")[..], &too_new].concat();
    let words = [
        "that of CUDA 13.0 (",
        "libcublasLt.so), and the driver is for CUDA 12.8",
        "nvidia-cublas-cu12",
    ];
    on_gpu(&place, RUN, &settings).fails(5, &words);
}

/// A block has 99 KiB of shared memory on 8.6 and 8.9, and 227 on Hopper. Flash attention for heads of 128 fits in bf16,
/// and what does not fit is said.
#[test]
fn a_gpu_with_less_shared_memory_trains_what_fits() {
    let place = Workplace::new();
    let train = |capability: &str, flags: &str| {
        let model = "--set model.heads=1 --set model.kv_heads=1 --set model.head_dim=128";
        let run = format!("--config small.toml --device cuda --steps 1 {model} {flags}");
        on_gpu(&place, &run, &[IDLE, ("STAND_IN_CAPABILITY", capability)])
    };
    train("8.9", "--attention flash --dtype bf16").succeeds();
    train("8.9", "--attention eager --dtype f32").succeeds();
    train("9.0", "--attention flash --dtype f32").succeeds();
    let refused = train("8.9", "--attention flash --dtype f32");
    let words = [
        "KiB of shared memory",
        "Stand-in GPU has 99",
        "take --dtype bf16",
        "--attention eager",
    ];
    refused.fails(2, &words);
}

/// Weight gradients of f32 in bf16 are no product of cuBLASLt's.
#[test]
fn settings_that_are_slow_on_a_gpu_are_said() {
    let place = Workplace::new();
    for (dtype, is_slow) in [("f32", true), ("bf16", false)] {
        let run = format!(
            "--config small.toml --device cuda --steps 1 --grad-dtype bf16 --dtype {dtype}"
        );
        let outcome = on_gpu(&place, &run, &[IDLE]).succeeds();
        let is_said = outcome.stderr.contains("take --grad-dtype f32");
        assert_eq!(is_said, is_slow, "{outcome:?}");
    }
}

#[test]
fn the_doctor_sees_it() {
    let place = Workplace::new();
    let outcome = on_gpu(&place, "doctor --json --threads 1", &[IDLE]).succeeds();
    let machine: Value = serde_json::from_str(&outcome.stdout).unwrap();
    assert_eq!(machine["missing"].as_array().unwrap().len(), 0);
    let gpu = &machine["gpus"][0];
    assert_eq!(
        (&gpu["name"], &gpu["capability"]),
        (&"Stand-in GPU".into(), &"9.0".into())
    );
    assert_eq!(gpu["memory"]["total"], 80u64 << 30);
    let carried = [
        "sm_80",
        "sm_90",
        "sm_100",
        "sm_120",
        "compute_80 ptx 8.8",
        "sm_90a",
    ];
    assert_eq!(machine["carries"], serde_json::json!(carried));
    assert!(gpu["bf16"]["gemm_tflops"].as_f64().unwrap() > 0.0);
}

/// Eight, the driver's own choice, are shared by streams. Who sets another number has it.
#[test]
fn streams_have_connections_of_their_own_before_the_driver_starts() {
    let place = Workplace::new();
    let file = place.path("connections");
    let noted = ("STAND_IN_CONNECTIONS", file.to_str().unwrap());
    let run = |out: &str, more: &[(&str, &str)]| {
        std::fs::write(&file, "").unwrap();
        let run = format!("--config small.toml --device cuda --steps 1 --out {out}");
        on_gpu(&place, &run, &[&[IDLE, noted], more].concat()).succeeds();
        place.text("connections")
    };
    assert_eq!(run("by-itself", &[]), "32\n");
    let set = [("CUDA_DEVICE_MAX_CONNECTIONS", "1")];
    assert_eq!(run("set", &set), "1\n");
}

/// The stand-in refuses blocks that large unless a multiprocessor's memory is divided so that several fit.
#[test]
fn kernels_with_much_shared_memory_ask_for_the_largest_carve_out() {
    let place = Workplace::new();
    let wide = "--set model.head_dim=128 --attention flash --dtype bf16 --seq 64 --steps 1";
    let run = format!("--config small.toml --device cuda {wide} --out run");
    on_gpu(&place, &run, &[IDLE]).succeeds();
}
