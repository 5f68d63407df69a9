//! Compiles the CUDA sources of `kernels/` to PTX and writes the list that `src/cuda/device/modules.rs` includes.
//!
//! Every source becomes PTX for compute capability 8.0, which any later GPU compiles for itself. A source that asks
//! for `__CUDA_ARCH_FEAT_SM90_ALL`, and so has instructions that only Hopper has, becomes PTX for 9.0a as well.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

/// What a source names that has code for Hopper alone; the compiler defines it for `compute_90a`.
const HOPPER: &str = "__CUDA_ARCH_FEAT_SM90_ALL";

/// One run of the compiler.
struct Job {
    source: PathBuf,
    target: &'static str,
    output: PathBuf,
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
    let (jobs, list) = jobs(&folder, &out);
    let nvcc = nvcc();
    if let Err(message) = compile_all(&nvcc, jobs) {
        println!("cargo::error={}", message.replace('\n', "\ncargo::error="));
        std::process::exit(1);
    }
    std::fs::write(out.join("ptx.rs"), list).expect("OUT_DIR can be written");
}

/// What is to be compiled, and the list of the results as a Rust expression.
fn jobs(folder: &Path, out: &Path) -> (Vec<Job>, String) {
    let entries = std::fs::read_dir(folder)
        .unwrap_or_else(|error| panic!("cannot read {}: {error}", folder.display()));
    let mut sources: Vec<PathBuf> = entries
        .map(|entry| entry.expect("a folder entry can be read").path())
        .filter(|path| path.extension().is_some_and(|end| end == "cu"))
        .collect();
    sources.sort();
    let (mut jobs, mut list) = (Vec::new(), String::from("&[\n"));
    for source in sources {
        let name = source
            .file_stem()
            .expect("it ends in .cu")
            .to_string_lossy();
        let name = name.into_owned();
        let text = std::fs::read_to_string(&source)
            .unwrap_or_else(|error| panic!("cannot read {}: {error}", source.display()));
        let mut ptx = |target| {
            let output = out.join(format!("{name}.{target}.ptx"));
            let included = format!("include_bytes!({output:?})");
            jobs.push(Job {
                source: source.clone(),
                target,
                output,
            });
            included
        };
        let portable = ptx("compute_80");
        let hopper = match text.contains(HOPPER) {
            true => format!("Some({})", ptx("compute_90a")),
            false => "None".to_string(),
        };
        list += &format!("Ptx {{ source: {name:?}, portable: {portable}, hopper: {hopper} }},\n");
    }
    (jobs, list + "]\n")
}

/// The compiler of CUDA_HOME, or else of PATH.
fn nvcc() -> PathBuf {
    let home = std::env::var_os("CUDA_HOME").map(|home| Path::new(&home).join("bin/nvcc"));
    home.filter(|nvcc| nvcc.exists()).unwrap_or("nvcc".into())
}

/// Compiles as many sources at a time as cargo lets this script use threads.
fn compile_all(nvcc: &Path, jobs: Vec<Job>) -> Result<(), String> {
    let threads = std::env::var("NUM_JOBS")
        .ok()
        .and_then(|jobs| jobs.parse().ok());
    let queue = Mutex::new(jobs);
    std::thread::scope(|scope| {
        let work = || {
            while let Some(job) = queue.lock().expect("no thread panics").pop() {
                compile(nvcc, &job)?;
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

fn compile(nvcc: &Path, job: &Job) -> Result<(), String> {
    let compiled = Command::new(nvcc)
        .args(["--std=c++17", "-O3", "-ptx"])
        .arg(format!("-arch={}", job.target))
        .arg("-o")
        .arg(&job.output)
        .arg(&job.source)
        .output();
    let compiled = compiled.map_err(|error| {
        format!(
            "the feature `cuda` needs NVIDIA's compiler, and {} does not run ({error}); \
             eval \"$(scripts/cuda-toolkit)\" installs one without a GPU",
            nvcc.display()
        )
    })?;
    if !compiled.status.success() {
        let said = String::from_utf8_lossy(&compiled.stderr);
        return Err(format!(
            "{} does not compile:\n{said}",
            job.source.display()
        ));
    }
    // The driver reads PTX up to a zero.
    let mut ptx = std::fs::read(&job.output).map_err(|error| error.to_string())?;
    ptx.push(0);
    std::fs::write(&job.output, ptx).map_err(|error| error.to_string())
}
