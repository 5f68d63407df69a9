//! Compiles the CUDA sources and the emulation of their execution model with the machine's C++ compiler, and links
//! them into libraries that stand in for NVIDIA's.

use std::path::{Path, PathBuf};

/// The files of a folder with an extension, sorted.
fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder)
        .unwrap_or_else(|error| panic!("cannot read {}: {error}", folder.display()));
    let mut files: Vec<PathBuf> = entries
        .map(|entry| entry.expect("a folder entry can be read").path())
        .filter(|path| path.extension().is_some_and(|found| found == extension))
        .collect();
    files.sort();
    files
}

fn main() {
    // Read when this runs, not when it was compiled: it may have been compiled for another checkout.
    let own = std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo says where the crate is");
    let kernels = Path::new(&own).join("../../kernels");
    let emulation = kernels.join("emulation");
    println!("cargo::rerun-if-changed={}", kernels.display());

    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++17")
        .opt_level(2)
        // A race names the lines of both accesses.
        .flag("-g1")
        .warnings(true)
        .include(&emulation)
        // Kernels read values of any type as 16 bytes at a time, which strict aliasing would forbid.
        .flag("-fno-strict-aliasing")
        // The same bits on every processor.
        .flag("-ffp-contract=off")
        .flag_if_supported("-Wno-unknown-pragmas");

    let plain = build.clone();
    let runtime = files(&emulation, "cpp");
    plain.clone().files(&runtime).compile("emulation_runtime");

    // For a look at the suite's tolerances: kernels/emulation/README.md.
    println!("cargo::rerun-if-env-changed=EMULATION_ROUNDING");
    if std::env::var_os("EMULATION_ROUNDING").is_some_and(|rounding| rounding == "device") {
        build
            .define("EMULATION_ROUNDING", None)
            .flag("-mfma")
            .flag("-ffp-contract=fast");
    }
    let sources = files(&kernels, "cu")
        .into_iter()
        .chain(files(&emulation.join("tests"), "cu"));
    build
        // Makes every access to memory call a function. `races.cpp` defines these; the sanitizer's library is not
        // linked.
        .flag("-fsanitize=thread")
        .flag_if_supported("--param=tsan-instrument-func-entry-exit=0")
        .flag("-include")
        .flag(emulation.join("emulation.h"))
        .flag("-x")
        .flag("c++")
        .files(sources)
        // Only their registrations refer to kernels: without this the linker would drop them.
        .link_lib_modifier("+whole-archive")
        .compile("emulation_kernels");

    let stand_in = emulation.join("stand_in");
    let archives = [
        "-Wl,--whole-archive",
        "libemulation_kernels.a",
        "-Wl,--no-whole-archive",
        "libemulation_runtime.a",
    ];
    link(&plain, &stand_in.join("cuda"), "libcuda.so", &archives);
    link(&plain, &stand_in.join("cublaslt"), "libcublasLt.so", &[]);
    let nvml = stand_in.join("nvml");
    link(&plain, &nvml, "libnvidia-ml.so.1", &["-ldl"]);
    let nccl = stand_in.join("nccl");
    link(&plain, &nccl, "libnccl.so.2", &["-ldl", "-lpthread"]);
}

/// Links the sources of a folder, and archives of OUT_DIR, into a shared library at a path below `OUT_DIR/stand_in`.
fn link(build: &cc::Build, folder: &Path, path: &str, archives: &[&str]) {
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let libraries = out.join("stand_in");
    let library = libraries.join(path);
    let below = library.parent().expect("the path is below a folder");
    std::fs::create_dir_all(below).expect("OUT_DIR can be written");
    let name = path.rsplit('/').next().expect("a path has a last part");
    let objects = build
        .clone()
        .files(files(folder, "cpp"))
        .compile_intermediates();
    let linked = build
        .get_compiler()
        .to_command()
        .current_dir(&out)
        .args([
            "-shared",
            "-Wl,-z,defs",
            &format!("-Wl,-soname,{name}"),
            "-o",
        ])
        .arg(library)
        .args(objects)
        .args(archives)
        .status();
    let linked = linked.expect("the compiler that made the objects runs");
    assert!(linked.success(), "{name} does not link");
    println!("cargo::rustc-env=STAND_IN={}", libraries.display());
}
