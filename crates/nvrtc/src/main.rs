//! Compiles a folder of CUDA sources to a folder of machine code and PTX.
//!
//! `nvrtc FOLDER --out DIR [--target sm_90]...`, by the toolkit that `CUDA_HOME` names, for all targets of a build
//! unless some are named. Writes `NAME.sm_90.cubin`, and the PTX of the oldest target as `NAME.ptx`. Warnings and notes
//! go to stderr; after a warning it exits with 1.

use nvrtc::{Compiled, Error, Job, MACHINE_CODE, Nvrtc, PTX_OF, compile_all, jobs, read_sources};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

const USAGE: &str = "usage: nvrtc FOLDER --out DIR [--target sm_90]...";

/// The command line.
struct Arguments {
    folder: PathBuf,
    out: PathBuf,
    targets: Vec<String>,
}

fn main() -> ExitCode {
    let Some(arguments) = parse(std::env::args().skip(1)) else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    match compile(&arguments) {
        Ok(warned) => ExitCode::from(u8::from(warned)),
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn parse(mut arguments: impl Iterator<Item = String>) -> Option<Arguments> {
    let (mut folder, mut out, mut targets) = (None, None, Vec::new());
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--out" => out = Some(arguments.next()?.into()),
            "--target" => targets.push(arguments.next()?),
            flag if flag.starts_with('-') => return None,
            path => folder = Some(path.into()),
        }
    }
    if targets.is_empty() {
        targets = MACHINE_CODE.map(String::from).to_vec();
    }
    Some(Arguments {
        folder: folder?,
        out: out?,
        targets,
    })
}

/// Whether the compiler warned of anything.
fn compile(arguments: &Arguments) -> Result<bool, Error> {
    let home = std::env::var_os("CUDA_HOME").map(PathBuf::from);
    let nvrtc = Nvrtc::load(home.as_deref())?;
    let sources = read_sources(&arguments.folder)?;
    let write = |name: String, bytes: &[u8]| {
        let path = arguments.out.join(name);
        std::fs::write(&path, bytes).map_err(|error| Error::File { path, error })
    };
    std::fs::create_dir_all(&arguments.out).map_err(|error| Error::File {
        path: arguments.out.clone(),
        error,
    })?;
    let warned = AtomicBool::new(false);
    let done = |Job { source, target }: Job, compiled: Compiled| {
        warned.fetch_or(!compiled.warnings.is_empty(), Ordering::Relaxed);
        for said in [&compiled.warnings, &compiled.notes] {
            if !said.is_empty() {
                eprintln!("{} for {target}:\n{said}", source.path.display());
            }
        }
        if target == PTX_OF {
            let ptx = compiled.ptx.strip_suffix(b"\0").unwrap_or(&compiled.ptx);
            write(format!("{}.ptx", source.name), ptx)?;
        }
        write(
            format!("{}.{target}.cubin", source.name),
            &compiled.machine_code,
        )
    };
    let targets: Vec<&str> = arguments.targets.iter().map(String::as_str).collect();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    compile_all(&nvrtc, jobs(&sources, &targets), threads, done)?;
    Ok(warned.load(Ordering::Relaxed))
}
