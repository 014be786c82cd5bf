"""Which GPU the engine runs on, and why it can't run on one."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

import torch

# What the kernels are compiled for: tensor cores with bfloat16.
MIN_CAPABILITY = (8, 0)
# From which on float8_e4m3fn is converted.
FP8_CAPABILITY = (8, 9)


def is_interpreted() -> bool:
    """Whether kernels run through Triton's interpreter, on the CPU."""
    from paceline_engine.kernels import common

    return common.is_interpreted()


def gpu_problem() -> str | None:
    """Why kernels can't run on a GPU here, and what to do about it; None if they can. Imports Triton only then."""
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) is built without CUDA; install one that is, or use --device cpu"
    if not torch.cuda.is_available():
        return (
            "torch sees no GPU; check nvidia-smi, that the driver knows CUDA "
            f"{torch.version.cuda}, and that the container asks for nvidia.com/gpu, or use --device cpu"
        )
    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        wanted, got = map(_version, (MIN_CAPABILITY, capability))
        return (
            f"{torch.cuda.get_device_name()} has compute capability {got} and the kernels need {wanted} or later; "
            "use --device cpu, or a GPU from Ampere on"
        )
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"Triton can't be imported ({error}); install triton, which comes with torch on Linux"
    return compiler_problem()


def compiler_problem() -> str | None:
    """Why Triton can't build what launches its kernels, and what to do about it; None if it can."""
    if "CC" not in os.environ and not any(map(shutil.which, ("gcc", "clang"))):
        return "Triton needs a C compiler to launch kernels, and there is none; install gcc, or name one in $CC"
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.exists():
        return f"Triton needs {header} to launch kernels; install Python's headers, such as python3-dev"
    return None


def fp8_problem() -> str | None:
    """Why the GPU, on which kernels run, can't have KV in fp8, and what to do about it; None if it can."""
    if is_interpreted() or torch.cuda.get_device_capability() >= FP8_CAPABILITY:
        return None
    wanted, got = map(_version, (FP8_CAPABILITY, torch.cuda.get_device_capability()))
    return f"{torch.cuda.get_device_name()} has compute capability {got} and fp8 needs {wanted} or later; use int8"


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
