"""Which GPU the engine runs on, and why it can't run on one."""

from __future__ import annotations

import torch

# What the kernels are compiled for: tensor cores with bfloat16.
MIN_CAPABILITY = (8, 0)


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
        wanted, got = (".".join(map(str, each)) for each in (MIN_CAPABILITY, capability))
        return (
            f"{torch.cuda.get_device_name()} has compute capability {got} and the kernels need {wanted} or later; "
            "use --device cpu, or a GPU from Ampere on"
        )
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"Triton can't be imported ({error}); install triton, which comes with torch on Linux"
    return None
