"""NVIDIA's tools from PyPI, pinned, each version in a folder of its own that is made once."""
import os
import pathlib
import shutil
import subprocess
import sys

# The disassembler knows machine code of every compiler up to its own version; CUDA 12 has none on PyPI.
DISASSEMBLER = ("nvdisasm-13.2", ["nvidia-cuda-nvdisasm==13.2.78"])
# The compiler, and the headers that sources include.
COMPILER = ("nvrtc-12.9-sass", ["nvidia-cuda-nvrtc-cu12==12.9.86", "nvidia-cuda-runtime-cu12==12.9.79"])


class Missing(Exception):
    """A tool is not there, or not as it was pinned."""


def find(folder, pattern):
    """The one file of a folder whose path ends as the pattern says."""
    found = sorted(pathlib.Path(folder).glob(f"**/{pattern}"))
    if not found:
        raise Missing(f"there is no {pattern} in {folder}")
    return found[0]


def installed(packages):
    """The folder with the packages, which pip fills if it does not exist."""
    name, pins = packages
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "trainer"
    home, partial = cache / name, cache / f"{name}.partial-{os.getpid()}"
    pinned = home / "packages.txt"
    if pinned.exists() and pinned.read_text().split() == pins:
        return home
    print(f"{pathlib.Path(sys.argv[0]).name}: installing {', '.join(pins)} into {home}", file=sys.stderr)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--root-user-action=ignore",
           "--no-deps", "--no-compile", "--target", str(partial), *pins]
    try:
        subprocess.run(pip, check=True, stdout=sys.stderr)
    except (OSError, subprocess.CalledProcessError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise Missing(f"pip could not install {', '.join(pins)}: {error}") from error
    (partial / "packages.txt").write_text("\n".join(pins) + "\n")
    shutil.rmtree(home, ignore_errors=True)
    partial.rename(home)
    return home


def disassembler():
    """The path of nvdisasm."""
    tool = find(installed(DISASSEMBLER), "bin/nvdisasm")
    tool.chmod(0o755)
    return tool
