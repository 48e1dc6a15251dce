"""The machine's load beside a run's figures: processor, memory, disk, network, GPU."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

SAMPLE_S = 10.0


def sample(tell: Callable[[dict[str, float]], None], ended: threading.Event) -> None:
    """Tells a sample every ten seconds until `ended` is set; the work of a thread."""
    # MLflow's own monitor asks the server at each sample, and ends for good when it is not answered.
    monitors: list[Any] = []
    while not ended.wait(SAMPLE_S):
        monitors = monitors or _monitors()
        figures: dict[str, float] = {}
        for monitor in monitors:
            monitor.collect_metrics()
            figures |= monitor.aggregate_metrics()
            monitor.clear_metrics()
        tell(figures)


def _monitors() -> list[Any]:
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

    monitors = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
    with contextlib.suppress(Exception):  # whatever a machine without an NVIDIA GPU or its library raises
        monitors.append(GPUMonitor())
    return monitors
