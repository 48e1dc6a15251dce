"""Hardware of this machine, found without importing torch: GPUs, memory, and the meaning of `auto`."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

Value = TypeVar("Value")

assigned_gpus: ContextVar[Sequence[str] | None] = ContextVar("assigned_gpus", default=None)
"""The GPUs of this thread's jobs, if not all that are visible. It is to a thread what CUDA_VISIBLE_DEVICES is to a
process: all that counts GPUs or starts jobs agrees on it."""

# The first CPUs and NVIDIA GPUs with matrix instructions for bfloat16, and for float16.
CPU_BF16_FLAGS = {"avx512_bf16", "amx_bf16"}
BF16_COMPUTE_CAPABILITY = (8, 0)
FP16_COMPUTE_CAPABILITY = (7, 0)


def mixed_precision() -> Literal["no", "bf16", "fp16"]:
    """The fastest number format that every GPU supports; without a GPU, that the CPU supports."""
    capabilities = gpu_compute_capabilities()
    if capabilities:
        weakest = min(capabilities)
        if weakest >= BF16_COMPUTE_CAPABILITY:
            return "bf16"
        return "fp16" if weakest >= FP16_COMPUTE_CAPABILITY else "no"
    return "bf16" if cpu_flags() & CPU_BF16_FLAGS else "no"


def gpu_compute_capabilities() -> list[tuple[int, int]]:
    """(major, minor) of each visible NVIDIA GPU."""
    return _query_gpus(lambda nvml, gpu, name: tuple(nvml.nvmlDeviceGetCudaComputeCapability(gpu)))


def visible_gpus() -> list[str]:
    """The numbers or UUIDs of the visible NVIDIA GPUs, as in CUDA_VISIBLE_DEVICES."""
    return _query_gpus(lambda nvml, gpu, name: name)


def memory() -> list[str]:
    """Name and bytes of each visible GPU; without a GPU, the bytes of this machine's memory."""
    gpus = _query_gpus(
        lambda nvml, gpu, name: f"{nvml.nvmlDeviceGetName(gpu)} {nvml.nvmlDeviceGetMemoryInfo(gpu).total}"
    )
    return gpus or [str(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))]


class Gpu(NamedTuple):
    """A GPU, as its driver describes it."""

    name: str
    free_bytes: int
    total_bytes: int
    driver_version: str


def describe_gpus() -> list[Gpu]:
    """The visible NVIDIA GPUs; empty without a driver."""

    def describe(nvml: Any, gpu: Any, name: str) -> Gpu:
        memory = nvml.nvmlDeviceGetMemoryInfo(gpu)
        driver = str(nvml.nvmlSystemGetDriverVersion())
        return Gpu(str(nvml.nvmlDeviceGetName(gpu)), int(memory.free), int(memory.total), driver)

    return _query_gpus(describe)


def free_gpu_memory() -> list[int]:
    """The free bytes of each visible GPU."""
    return _query_gpus(lambda nvml, gpu, name: int(nvml.nvmlDeviceGetMemoryInfo(gpu).free))


def device() -> str:
    """The name of the first visible GPU; without a GPU, that of the processor. Other devices round differently."""
    if gpus := describe_gpus():
        return gpus[0].name
    with contextlib.suppress(OSError):
        if found := re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return found[1]
    return platform.machine()


def _query_gpus(query: Callable[[Any, Any, str], Value]) -> list[Value]:
    import pynvml as nvml

    with contextlib.suppress(nvml.NVMLError):
        nvml.nvmlInit()
        try:
            all_names = ",".join(map(str, range(nvml.nvmlDeviceGetCount())))
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", all_names).replace(" ", "").split(",")
            names = visible if (assigned := assigned_gpus.get()) is None else assigned
            return [query(nvml, _handle(nvml, name), name) for name in names if name not in ("", "-1")]
        finally:
            nvml.nvmlShutdown()
    return []


def _handle(nvml: Any, name: str) -> Any:
    return nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)


def cpu_flags() -> set[str]:
    """The processor's feature flags; empty if /proc/cpuinfo has none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return set(line.partition(":")[2].split())
    return set()
