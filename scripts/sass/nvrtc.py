"""Compiles a CUDA source to machine code or PTX with NVRTC, as the build does, without a build."""
import ctypes
import os
import pathlib

from . import packages

# NVRTC has no C library; sources need no more of its headers than this.
HEADERS = {
    "float.h": "#define FLT_MAX 3.402823466e+38f\n#define FLT_MIN 1.175494351e-38f\n",
    "math.h": "#define INFINITY __int_as_float(0x7f800000)\n#define NAN __int_as_float(0x7fffffff)\n",
    "stddef.h": "",
    "stdint.h": "typedef signed char int8_t; typedef unsigned char uint8_t; typedef short int16_t;\n"
                "typedef unsigned short uint16_t; typedef int int32_t; typedef unsigned uint32_t; typedef long int64_t;\n"
                "typedef unsigned long uint64_t; typedef unsigned long uintptr_t;\n",
}


class NotCompiled(Exception):
    """The compiler refused a source."""


def toolkit():
    """The library and the folder of headers: those of CUDA_HOME if it has them, otherwise the pinned ones."""
    own = os.environ.get("CUDA_HOME")
    for folder in filter(None, [own]):
        try:
            return packages.find(folder, "libnvrtc.so.12"), packages.find(folder, "cuda_bf16.h").parent
        except packages.Missing:
            pass
    home = packages.installed(packages.COMPILER)
    return packages.find(home, "libnvrtc.so.12"), packages.find(home, "cuda_bf16.h").parent


def strings(texts):
    return (ctypes.c_char_p * len(texts))(*[text.encode() for text in texts])


def is_for(source, target):
    """Whether there is code of a source file for a compute capability: of some there is for Hopper alone, as in crates/nvrtc."""
    return target == 90 or not is_for_hopper_alone(source)


def is_for_hopper_alone(source):
    return pathlib.Path(source).stem.endswith("_sm90")


def architecture(source, target):
    return "90a" if is_for_hopper_alone(source) else str(target)


def compile(source, target):
    """The cubin of a source file for a compute capability such as 90."""
    return compiled(source, f"sm_{architecture(source, target)}", "CUBIN")


def compile_ptx(source, target=80):
    """The PTX of a source file for a compute capability: of 8.0 what a binary carries, for GPUs from there on."""
    return compiled(source, f"compute_{architecture(source, target)}", "PTX").rstrip(b"\0")


def compiled(source, architecture, result):
    library, include = toolkit()
    nvrtc, program, size = ctypes.CDLL(str(library)), ctypes.c_void_p(), ctypes.c_size_t()
    source = pathlib.Path(source)

    def fetch(kind):
        getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{kind}")(program, text)
        return text.raw

    options = strings(["--std=c++17", "-default-device", f"--gpu-architecture={architecture}", f"-I{source.parent}", f"-I{include}"])
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.read_bytes(), str(source).encode(), len(HEADERS),
                             strings(list(HEADERS.values())), strings(list(HEADERS)))
    try:
        if nvrtc.nvrtcCompileProgram(program, len(options), options) != 0:
            raise NotCompiled(f"{source} for {architecture}:\n{fetch('ProgramLog').decode()}")
        return fetch(result)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
