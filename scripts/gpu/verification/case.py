"""What is verified, in the grain in which it is run, recorded and left out."""
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A case of a section. Its result holds while the files that `sources` name are the same."""
    section: str
    name: str
    seconds: float
    sources: tuple
    is_speed: bool = False

    @property
    def full(self):
        return f"{self.section}/{self.name}"


def kernels(*names):
    """The sources of CUDA kernels and of their launches."""
    return tuple(path for name in names for path in (f"kernels/{name}.cu", f"crates/kernels/src/cuda/{name}.rs"))


# What every launch goes through.
DEVICE = ("crates/kernels/src/cuda/device/**", "crates/kernels/src/cuda/driver.rs")
ATTENTION = kernels("flash_attention", "flash", "attention")
# The kernels of a step of Llama in any type.
STEP = (*ATTENTION, *kernels("rms_norm", "norm_backward", "swiglu", "rotary", "qkv", "cross_entropy", "embedding", "adamw", "norm", "elementwise", "columns"))
