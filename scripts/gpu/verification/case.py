"""What is verified, recorded and left out, one case at a time."""
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A case of a section. Its result holds while the files that `sources` name are the same."""
    section: str
    name: str
    seconds: float
    sources: tuple
    # It takes times.
    is_speed: bool = False
    # If it has run before, it comes after times: other cases see the same changes sooner.
    is_late: bool = False

    @property
    def full(self):
        return f"{self.section}/{self.name}"


CUDA = "crates/kernels/src/cuda"
# A kernel's source and its launches have the same name, but for these.
LAUNCHES = {"flash_attention": "flash/sm80", "flash_forward_sm90": "flash/sm90", "flash_backward_sm90": "flash/sm90", "grouped_matmul": "experts", "grouped_matmul_sm90": "experts"}


def kernels(*names):
    """The sources of CUDA kernels and of their launches."""
    return tuple(path for name in names for path in (f"kernels/{name}.cu", f"{CUDA}/{LAUNCHES.get(name, name)}.rs"))


def device(*names):
    """Files of the CUDA device."""
    return tuple(f"{CUDA}/device/{name}.rs" for name in names)


def crate(name, *files):
    return tuple(f"crates/{name}/src/{file}.rs" for file in files)


# What every launch and every product goes through.
CALLS = (f"{CUDA}/mod.rs", f"{CUDA}/calls.rs", f"{CUDA}/extent.rs", f"{CUDA}/driver.rs", *device("driver", "modules"))
PRODUCTS = device("products", "problem", "algorithms")
STREAMS, MEMORY, REHEARSAL = device("streams", "staging"), device("blocks"), device("rehearsal", "modules")
GRAPHS = (*device("graphs", "calls", "streams"), *crate("session", "passes"))
# States, weights and gradients that are not on the device.
HOMES = (*STREAMS, *crate("optim", "streamed", "chunks"), *crate("optim", "optimizer"), *crate("session", "update"))
# A step's passes and its update.
PASSES = (*crate("model", "forward_backward", "pass", "linear"), *crate("session", "passes", "update"))
NORM_BACKWARD = (f"{CUDA}/norm_backward.rs", "kernels/norm_backward.cuh")
ATTENTION = (*kernels("flash_attention", "flash_forward_sm90", "flash_backward_sm90", "attention", "sinks"), f"{CUDA}/flash/mod.rs",
             "kernels/flash_attention.cuh", "kernels/flash_sm90.cuh")
# The kernels of a step of Llama in any type.
STEP = (*ATTENTION, *kernels("rms_norm", "swiglu", "rotary", "qkv", "cross_entropy", "embedding", "adamw", "norm", "elementwise", "columns"), *NORM_BACKWARD)
