"""The values of `auto` on this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tasks
from tasks.jobs import hardware


@pytest.mark.parametrize(
    ("capabilities", "flags", "meant"),
    [
        ([], set(), "no"),
        ([], {"avx2", "avx512f"}, "no"),
        ([], {"avx512_bf16"}, "bf16"),
        ([], {"amx_bf16"}, "bf16"),
        ([(9, 0)], set(), "bf16"),
        ([(8, 0)], set(), "bf16"),
        ([(7, 5)], {"amx_bf16"}, "fp16"),
        ([(6, 1)], set(), "no"),
        ([(9, 0), (7, 0)], set(), "fp16"),
    ],
)
def test_auto_is_the_fastest_format_of_the_weakest_gpu_or_of_the_cpu(
    capabilities: list[tuple[int, int]], flags: set[str], meant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "gpu_compute_capabilities", lambda: capabilities)
    monkeypatch.setattr(hardware, "cpu_flags", lambda: flags)
    assert hardware.mixed_precision() == meant


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="only Linux tells the flags here")
def test_the_flags_of_this_processor_are_read() -> None:
    assert all(flag and " " not in flag for flag in hardware.cpu_flags())


def test_the_gpus_are_found_without_torch() -> None:
    code = (
        "import sys; from tasks.jobs.hardware import gpu_compute_capabilities, mixed_precision\n"
        "assert all(len(c) == 2 for c in gpu_compute_capabilities())\n"
        "assert mixed_precision() in ('no', 'bf16', 'fp16') and 'torch' not in sys.modules"
    )
    root = str(Path(tasks.__path__[0]).parent)
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, timeout=60)
