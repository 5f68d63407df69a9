//! Compiles the CUDA sources of `kernels/` and writes the list that `src/cuda/device/modules.rs` includes.
//!
//! Every source becomes PTX for compute capability 8.0, and that becomes a fat binary: machine code for 8.0 (which
//! 8.6 and 8.9 run too) and 9.0, and the PTX itself, which the driver of any later GPU compiles when it is loaded. A
//! source that asks for `__CUDA_ARCH_FEAT_SM90_ALL`, and so has instructions that only Hopper has, gets its machine
//! code for 9.0 from a compilation of its own, for `sm_90a`. The PTX stays in OUT_DIR, where tests read it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

/// What a source names that has code for Hopper alone; the compiler defines it for `compute_90a`.
const HOPPER: &str = "__CUDA_ARCH_FEAT_SM90_ALL";

/// One source file.
struct Source {
    path: PathBuf,
    name: String,
    text: String,
}

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernels");
    println!("cargo::rerun-if-changed={}", folder.display());
    println!("cargo::rerun-if-env-changed=CUDA_HOME");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    match embed(&nvcc(), sources(&folder), &out) {
        Ok(list) => std::fs::write(out.join("embedded.rs"), list).expect("OUT_DIR can be written"),
        Err(message) => {
            println!("cargo::error={}", message.replace('\n', "\ncargo::error="));
            std::process::exit(1);
        }
    }
}

/// The sources by name.
fn sources(folder: &Path) -> Vec<Source> {
    let entries = std::fs::read_dir(folder)
        .unwrap_or_else(|error| panic!("cannot read {}: {error}", folder.display()));
    let paths = entries.map(|entry| entry.expect("a folder entry can be read").path());
    let source = |path: PathBuf| {
        let name = path.file_stem().expect("it ends in .cu").to_string_lossy();
        let text = std::fs::read_to_string(&path)
            .unwrap_or_else(|error| panic!("cannot read {}: {error}", path.display()));
        Source {
            name: name.into_owned(),
            text,
            path,
        }
    };
    let mut sources: Vec<Source> = paths
        .filter(|path| path.extension().is_some_and(|end| end == "cu"))
        .map(source)
        .collect();
    sources.sort_by(|one, other| one.name.cmp(&other.name));
    sources
}

/// Compiles everything; what is embedded, as a Rust expression.
fn embed(nvcc: &Path, sources: Vec<Source>, out: &Path) -> Result<String, String> {
    let version = toolkit_version(nvcc)?;
    let mut list = format!("Embedded {{ toolkit_version: {version}, sources: &[\n");
    let names: Vec<String> = sources.iter().map(|source| source.name.clone()).collect();
    compile_all(nvcc, sources, out)?;
    for name in names {
        let ptx = std::fs::read_to_string(out.join(format!("{name}.ptx")));
        let ptx = ptx.map_err(|error| error.to_string())?;
        let kernels = kernels(&ptx);
        let image = out.join(format!("{name}.fatbin"));
        list += &format!(
            "Source {{ name: {name:?}, kernels: &{kernels:?}, image: &Aligned(*include_bytes!({image:?})) }},\n"
        );
    }
    Ok(list + "]}\n")
}

/// Names of the kernels in a module. In PTX each is `.visible .entry name(`.
fn kernels(ptx: &str) -> Vec<&str> {
    ptx.split(".visible .entry ")
        .skip(1)
        .filter_map(|entry| entry.split('(').next())
        .collect()
}

/// The compiler of CUDA_HOME, or else of PATH.
fn nvcc() -> PathBuf {
    let home = std::env::var_os("CUDA_HOME").map(|home| Path::new(&home).join("bin/nvcc"));
    home.filter(|nvcc| nvcc.exists()).unwrap_or("nvcc".into())
}

/// Version of the toolkit as the driver counts, 13000 for 13.0.
fn toolkit_version(nvcc: &Path) -> Result<u32, String> {
    let said = run(nvcc, &["--version".as_ref()])?;
    let release = said.split("release ").nth(1);
    let release = release.and_then(|rest| rest.split(',').next());
    let numbers = release.and_then(|release| release.trim().split_once('.'));
    let version = numbers.and_then(|(major, minor)| {
        Some(major.parse::<u32>().ok()? * 1000 + minor.parse::<u32>().ok()? * 10)
    });
    version.ok_or_else(|| format!("{} does not tell its version: {said}", nvcc.display()))
}

/// Compiles as many sources at a time as cargo lets this script use threads.
fn compile_all(nvcc: &Path, mut sources: Vec<Source>, out: &Path) -> Result<(), String> {
    let threads = std::env::var("NUM_JOBS")
        .ok()
        .and_then(|jobs| jobs.parse().ok());
    // The longest is taken first: nothing else should wait for it at the end.
    sources.sort_by_key(|source| source.text.len());
    let queue = Mutex::new(sources);
    let next = || queue.lock().expect("no thread panics").pop();
    std::thread::scope(|scope| {
        let work = || {
            while let Some(source) = next() {
                compile(nvcc, &source, out)?;
            }
            Ok(())
        };
        let threads: Vec<_> = (0..threads.unwrap_or(1))
            .map(|_| scope.spawn(work))
            .collect();
        let outcomes = threads
            .into_iter()
            .map(|thread| thread.join().expect("no thread panics"));
        outcomes.collect()
    })
}

/// PTX, and the fat binary.
fn compile(nvcc: &Path, source: &Source, out: &Path) -> Result<(), String> {
    let file = |end: &str| out.join(format!("{}.{end}", source.name));
    let (ptx, image) = (file("ptx"), file("fatbin"));
    let compile = |options: &[&str], from: &Path, to: &Path| {
        let options = ["--std=c++17", "-O3"].iter().chain(options);
        let options = options.map(|option| option.as_ref());
        let files = ["-o".as_ref(), to.as_os_str(), from.as_os_str()];
        run(nvcc, &options.chain(files).collect::<Vec<_>>())
    };
    compile(&["-ptx", "-arch=compute_80"], &source.path, &ptx)?;
    if source.text.contains(HOPPER) {
        let portable = "arch=compute_80,code=[sm_80,compute_80]";
        let hopper = "arch=compute_90a,code=sm_90a";
        let options = ["-fatbin", "-gencode", portable, "-gencode", hopper];
        compile(&options, &source.path, &image)?;
    } else {
        // From the same PTX: the front end takes most of the time, and both GPUs have the same code.
        let targets = "arch=compute_80,code=[sm_80,sm_90,compute_80]";
        compile(&["-fatbin", "-gencode", targets], &ptx, &image)?;
    }
    Ok(())
}

/// Runs the compiler; what it says on stdout.
fn run(nvcc: &Path, arguments: &[&std::ffi::OsStr]) -> Result<String, String> {
    let ended = Command::new(nvcc).args(arguments).output();
    let ended = ended.map_err(|error| {
        format!(
            "the feature `cuda` needs NVIDIA's compiler, and {} does not run ({error}); \
             eval \"$(scripts/cuda-toolkit)\" installs one without a GPU",
            nvcc.display()
        )
    })?;
    if !ended.status.success() {
        let said = String::from_utf8_lossy(&ended.stderr);
        let file = arguments.last().unwrap_or(&"".as_ref()).to_string_lossy();
        return Err(format!("{file} does not compile:\n{said}"));
    }
    Ok(String::from_utf8_lossy(&ended.stdout).into_owned())
}
