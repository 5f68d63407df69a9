//! Compiles the CUDA sources of `kernels/` and writes the list that `src/cuda/device/modules.rs` includes.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "cuda")]
    cuda::main();
}

/// NVRTC makes machine code of every source for each kind of GPU that it knows, and PTX for others (`crates/nvrtc`). Each
/// is embedded by itself, compressed: together they are 22 MB of code that looks much the same.
///
/// A source is compiled again only where its text, a header, the compiler or this script is another.
#[cfg(feature = "cuda")]
mod cuda {
    use miniz_oxide::{deflate::compress_to_vec_zlib, inflate::decompress_to_vec_zlib};
    use nvrtc::{Compiled, Error, HOPPER, Job, MACHINE_CODE, Nvrtc, PTX_OF, Source};
    use std::collections::BTreeMap;
    use std::path::{Path, PathBuf};
    use std::sync::Mutex;

    /// Set to anything, it makes warnings errors, spilled registers among them. CI sets it; the compiler of a toolkit
    /// that was not tried may warn of more.
    const DENY_WARNINGS: &str = "KERNELS_DENY_WARNINGS";

    /// For a build that runs on one kind of GPU alone: the targets of machine code, separated by commas. The one whose PTX is kept
    /// is always among them.
    const TARGETS: &str = "KERNELS_TARGETS";

    /// Names the PTX for Hopper: that of the sources which have other code there.
    const PTX_ON_HOPPER: &str = "ptx_on_hopper";

    /// What the compilers warned of, by source.
    type Warnings = BTreeMap<String, String>;

    pub(super) fn main() {
        // Asked at run time: a target folder may have been copied from another checkout.
        let own = std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo says where the crate is");
        let folder = Path::new(&own).join("../../kernels");
        println!("cargo::rerun-if-changed={}", folder.display());
        println!("cargo::rerun-if-env-changed=CUDA_HOME");
        println!("cargo::rerun-if-env-changed={DENY_WARNINGS}");
        println!("cargo::rerun-if-env-changed={TARGETS}");
        let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
        let kind = match embed(&folder, &out) {
            Err(error) => Some((
                "error",
                format!("the feature `cuda` compiles kernels: {error}"),
            )),
            Ok(warnings) if warnings.is_empty() => None,
            Ok(warnings) => {
                let said = warnings.into_values().collect::<String>();
                let denied = std::env::var_os(DENY_WARNINGS).is_some();
                Some((if denied { "error" } else { "warning" }, said))
            }
        };
        if let Some((kind, message)) = kind {
            for line in message.lines() {
                println!("cargo::{kind}={line}");
            }
        }
    }

    /// The targets of machine code.
    ///
    /// # Panics
    /// If [`TARGETS`] names one that is not built.
    fn targets() -> Vec<&'static str> {
        let Ok(named) = std::env::var(TARGETS) else {
            return MACHINE_CODE.to_vec();
        };
        let named: Vec<&str> = named.split(',').collect();
        let unknown = named.iter().find(|name| !MACHINE_CODE.contains(name));
        if let Some(unknown) = unknown {
            panic!("{TARGETS} names `{unknown}`; kernels are built for {MACHINE_CODE:?}");
        }
        let is_wanted = |target: &&str| *target == PTX_OF || named.contains(target);
        MACHINE_CODE.into_iter().filter(is_wanted).collect()
    }

    /// Compiles what has changed, and lists everything.
    fn embed(folder: &Path, out: &Path) -> Result<Warnings, Error> {
        let home = std::env::var_os("CUDA_HOME").map(PathBuf::from);
        let nvrtc = Nvrtc::load(home.as_deref())?;
        let sources = nvrtc::read_sources(folder)?;
        let common = format!(
            "{} {:?} {:?}\n{}",
            nvrtc.version(),
            targets(),
            script_time(),
            headers(folder)?
        );
        let stamp = |source: &Source| out.join(format!("{}.inputs", source.name));
        let inputs = |source: &Source| format!("{common}{}", source.text).into_bytes();
        let is_stale = |source: &&Source| read(&stamp(source)).ok() != Some(inputs(source));
        let stale: Vec<Source> = sources.iter().filter(is_stale).cloned().collect();
        let warnings = compile(&nvrtc, &stale, out)?;
        // What was warned of is compiled, and warned of, again.
        for source in stale
            .iter()
            .filter(|source| !warnings.contains_key(&source.name))
        {
            write(&stamp(source), &inputs(source))?;
        }
        write(
            &out.join("embedded.rs"),
            list(&nvrtc, &sources, out)?.as_bytes(),
        )?;
        let on_hopper = list_on_hopper(&sources, out);
        write(&out.join("on_hopper.rs"), on_hopper.as_bytes())?;
        Ok(warnings)
    }

    /// When this script was compiled: with it may have changed how sources are.
    fn script_time() -> Option<std::time::SystemTime> {
        let script = std::env::current_exe().ok()?;
        script.metadata().ok()?.modified().ok()
    }

    /// All headers of the folder.
    fn headers(folder: &Path) -> Result<String, Error> {
        let failed = |error| Error::File {
            path: folder.into(),
            error,
        };
        let entries = std::fs::read_dir(folder).map_err(failed)?;
        let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        paths.retain(|path| path.extension().is_some_and(|end| end == "cuh"));
        paths.sort();
        let texts = paths.iter().map(|path| read(path));
        let texts: Vec<Vec<u8>> = texts.collect::<Result<_, _>>()?;
        Ok(String::from_utf8_lossy(&texts.concat()).into_owned())
    }

    /// Compiles as many at a time as cargo lets this script use threads.
    fn compile(nvrtc: &Nvrtc, sources: &[Source], out: &Path) -> Result<Warnings, Error> {
        let threads = std::env::var("NUM_JOBS").ok();
        let threads = threads.and_then(|jobs| jobs.parse().ok()).unwrap_or(1);
        let warnings = Mutex::new(Warnings::new());
        let done = |Job { source, target }: Job, compiled: Compiled| {
            let write = |kind: &str, code: &[u8]| {
                write(&image(out, source, kind), &compress_to_vec_zlib(code, 9))
            };
            if !compiled.warnings.is_empty() {
                let mut warnings = warnings.lock().expect("no thread panics");
                let said = warnings.entry(source.name.clone()).or_default();
                *said += &format!("{}.cu for {target}:\n{}\n", source.name, compiled.warnings);
            }
            if target == PTX_OF {
                write("ptx", &compiled.ptx)?;
            }
            if source.target(HOPPER) == Some(target) && source.has_own_code_on_hopper() {
                write(PTX_ON_HOPPER, &compiled.ptx)?;
            }
            write(target, &compiled.machine_code)
        };
        nvrtc::compile_all(nvrtc, nvrtc::jobs(sources, &targets()), threads, done)?;
        Ok(warnings.into_inner().expect("no thread panics"))
    }

    /// Where what was made of a source lies: machine code by its target, or `ptx`.
    fn image(out: &Path, source: &Source, kind: &str) -> PathBuf {
        out.join(format!("{}.{kind}.z", source.name))
    }

    /// What is embedded, as a Rust expression.
    fn list(nvrtc: &Nvrtc, sources: &[Source], out: &Path) -> Result<String, Error> {
        let version = nvrtc.version();
        let mut list = format!("Embedded {{ toolkit_version: {version}, sources: &[\n");
        for source in sources {
            let made: Vec<&str> = targets()
                .into_iter()
                .filter_map(|target| source.target(target))
                .collect();
            let kept = match source.is_for_hopper_alone() {
                true if made.is_empty() => continue,
                true => PTX_ON_HOPPER,
                false => "ptx",
            };
            let ptx = read(&image(out, source, kept))?;
            let ptx = decompress_to_vec_zlib(&ptx).expect("it was compressed above");
            let ptx = String::from_utf8_lossy(&ptx);
            // No driver compiles PTX of what Hopper alone runs: there is machine code for it.
            let images = made.into_iter().chain((kept == "ptx").then_some(kept));
            let images = images.map(|kind| {
                let path = image(out, source, kind);
                format!("Image(include_bytes!({path:?})), ")
            });
            let (name, kernels) = (&source.name, kernels(&ptx));
            let images: String = images.collect();
            list += &format!(
                "Source {{ name: {name:?}, is_for_hopper_alone: {}, kernels: &{kernels:?}, images: &[{images}] }},\n",
                source.is_for_hopper_alone()
            );
        }
        Ok(list + "]}\n")
    }

    /// The PTX for Hopper of sources that are others there, as a Rust expression: for tests, so in no image.
    fn list_on_hopper(sources: &[Source], out: &Path) -> String {
        let is_made = targets().contains(&HOPPER);
        let own = sources
            .iter()
            .filter(|source| is_made && source.has_own_code_on_hopper());
        let images = own.map(|source| {
            let path = image(out, source, PTX_ON_HOPPER);
            format!("({:?}, Image(include_bytes!({path:?}))), ", source.name)
        });
        format!("&[{}]", images.collect::<String>())
    }

    /// Names of the kernels in a module. In PTX each is `.visible .entry name(`.
    fn kernels(ptx: &str) -> Vec<&str> {
        ptx.split(".visible .entry ")
            .skip(1)
            .filter_map(|entry| entry.split('(').next())
            .collect()
    }

    fn read(path: &Path) -> Result<Vec<u8>, Error> {
        std::fs::read(path).map_err(|error| Error::File {
            path: path.into(),
            error,
        })
    }

    fn write(path: &Path, bytes: &[u8]) -> Result<(), Error> {
        std::fs::write(path, bytes).map_err(|error| Error::File {
            path: path.into(),
            error,
        })
    }
}
