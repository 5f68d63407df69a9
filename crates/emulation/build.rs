//! Compiles the CUDA sources and the emulation of their execution model with the machine's C++ compiler.

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
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernels");
    let emulation = kernels.join("emulation");
    println!("cargo::rerun-if-changed={}", kernels.display());

    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++17")
        .opt_level(2)
        .warnings(true)
        .include(&emulation)
        // Kernels see memory as bytes, 16 at a time.
        .flag("-fno-strict-aliasing")
        // The same bits on every processor.
        .flag("-ffp-contract=off")
        .flag_if_supported("-Wno-unknown-pragmas")
        // Fibers jump between stacks, which looks to the hardened `longjmp` like an attack.
        .flag("-U_FORTIFY_SOURCE");

    let mut runtime = build.clone();
    runtime
        .files(files(&emulation, "cpp"))
        .compile("emulation_runtime");

    let sources = files(&kernels, "cu")
        .into_iter()
        .chain(files(&emulation.join("tests"), "cu"));
    build
        .flag("-include")
        .flag(emulation.join("emulation.h"))
        .flag("-x")
        .flag("c++")
        .files(sources)
        // Kernels are named by their registrations alone: without this the linker would drop them.
        .link_lib_modifier("+whole-archive")
        .compile("emulation_kernels");
}
