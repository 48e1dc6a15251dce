"""What `auto` means on this machine, found without importing torch."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Literal

# Native matrix instructions of the first CPUs and NVIDIA GPUs that compute in bfloat16, and in float16.
CPU_BF16_FLAGS = {"avx512_bf16", "amx_bf16"}
BF16_COMPUTE_CAPABILITY = (8, 0)
FP16_COMPUTE_CAPABILITY = (7, 0)


def mixed_precision() -> Literal["no", "bf16", "fp16"]:
    """The fastest number format that the hardware has: of its weakest GPU, or of the CPU where there is none."""
    capabilities = gpu_compute_capabilities()
    if capabilities:
        weakest = min(capabilities)
        if weakest >= BF16_COMPUTE_CAPABILITY:
            return "bf16"
        return "fp16" if weakest >= FP16_COMPUTE_CAPABILITY else "no"
    return "bf16" if cpu_flags() & CPU_BF16_FLAGS else "no"


def gpu_compute_capabilities() -> list[tuple[int, int]]:
    """(major, minor) of each NVIDIA GPU that the driver shows; empty without a driver."""
    try:
        import pynvml
    except ImportError:
        return []
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        try:
            handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
            return [tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)) for handle in handles]
        finally:
            pynvml.nvmlShutdown()
    return []


def cpu_flags() -> set[str]:
    """The processor's feature flags; empty where /proc/cpuinfo does not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return set(line.partition(":")[2].split())
    return set()
