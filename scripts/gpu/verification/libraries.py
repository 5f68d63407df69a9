"""Where cuBLASLt is, and whether this machine's C library is new enough."""
import ctypes
import importlib.util
import os
import pathlib
import re

# Where toolkits and distributions put it.
SYSTEM_FOLDERS = ["/usr/local/cuda/lib64", "/usr/local/cuda/targets/x86_64-linux/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib64"]


def driver_major():
    """The major version of CUDA that the driver is for; None where there is no driver."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return version.value // 1000


def library_major(folder):
    """The major version of the cuBLASLt in a folder, from its file name; 0 if that has none."""
    names = (re.fullmatch(r"libcublasLt\.so\.(\d+)", path.name) for path in folder.glob("libcublasLt.so.*"))
    return max((int(name[1]) for name in names if name), default=0)


def by_preference(folders, driver):
    """Folders by preference, the newest that works with the driver first: cuBLASLt 12 (nvidia-cublas-cu12) runs on drivers of
    CUDA 12 and 13, cuBLASLt 13 (nvidia-cublas) only on those of 13."""
    is_too_new = lambda major: driver is not None and major > driver
    return sorted(folders, key=lambda folder: (is_too_new(library_major(folder)), -library_major(folder)))


def folders_with(library, roots):
    """Folders with a library: those of Python packages (PyTorch brings it) under these roots, then those of LD_LIBRARY_PATH, then
    the system's."""
    found = [path.parent for root in roots for path in sorted(pathlib.Path(root).glob(f"*/lib/{library}*"))]
    named = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    found += [pathlib.Path(folder) for folder in named + SYSTEM_FOLDERS if any(pathlib.Path(folder).glob(f"{library}*"))]
    return list(dict.fromkeys(found))


def package_roots():
    """Where NVIDIA's Python packages lie."""
    found = importlib.util.find_spec("nvidia")
    return list(found.submodule_search_locations or []) if found else []


def cublaslt_folders():
    """Folders with libcublasLt, the preferred first."""
    return by_preference(folders_with("libcublasLt.so", package_roots()), driver_major())


def library_path():
    """LD_LIBRARY_PATH for the trainer, and the folder of cuBLASLt that was added to it."""
    given = [part for part in os.environ.get("LD_LIBRARY_PATH", "").split(":") if part]
    folder = next(iter(cublaslt_folders()), None)
    return ":".join([str(folder)] * (folder is not None) + given), folder


def version_pair(text):
    """`glibc 2.36` or `2.36` as (2, 36)."""
    major, minor = re.search(r"(\d+)\.(\d+)", text).groups()
    return int(major), int(minor)


def glibc_complaint(needed):
    """Why a binary that needs this version of glibc does not start here; none if it does."""
    try:
        own = os.confstr("CS_GNU_LIBC_VERSION") or "none"
    except (ValueError, OSError):
        own = "none"
    if own == "none":
        return f"the binaries need glibc {needed}, and this machine has another C library"
    if version_pair(own) < version_pair(needed):
        return (f"the binaries need glibc {needed}, and this machine has {own}: make the bundle on a machine that is as old, "
                "or run it in a newer image")
    return None
