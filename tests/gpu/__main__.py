"""`make gpu`: everything that only a GPU can show, on any machine with CUDA and the torch that is there.

    python -m tests.gpu [--list] [--only NAME ...] [--budget-s SECONDS] [--workers N] [--json FILE]

It needs no installation of the project: PYTHON may be any Python with PyTorch. A case whose package is missing, whose
GPU is too old, or that needs more GPUs is listed as not tried, with that reason. Each case is printed as it ends, and
one table comes last. Without a GPU nothing is tried. The exit status is 1 if a case does not hold.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING, Any

from tests.gpu.cases import BASE, CASES, ROOT, Case, Result, chosen
from tests.gpu.table import Row, markdown, write

if TYPE_CHECKING:
    from tests.gpu.ground import Ground

# Read when the libraries are imported, and passed on to the trainings.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "TOKENIZERS_PARALLELISM": "false",
}
JSON = ROOT / "build" / "gpu.json"
LONGEST_CASE_S = 60.0
"""No case is started when less than this is left of the budget."""


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description="Everything that only a GPU can show.")
    parser.add_argument("--list", action="store_true", help="list the cases, with the reason of those not to be tried")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="how names of cases begin, first to last")
    parser.add_argument("--budget-s", type=float, default=float("inf"), metavar="S", help="when to start no more cases")
    parser.add_argument("--workers", type=int, default=max(1, min(8, (os.cpu_count() or 1) // 2)), metavar="N")
    parser.add_argument("--json", type=Path, default=JSON, metavar="FILE", help="where to write the outcome")
    parser.add_argument("--on-cpu", action="store_true", help="try this tool itself, with cases that a CPU can run")
    options = parser.parse_args()
    if not (cases := chosen(options.only)):
        parser.error(f"there is no such case: choose from {', '.join(case.name for case in CASES)}.")
    os.environ.update(ENVIRONMENT)
    machine = describe_machine()
    reasons = {case.name: reason_against(case, machine, options.on_cpu) for case in cases}
    print(f"{machine['summary']}; {len(cases)} cases, {sum(not why for why in reasons.values())} to try.", flush=True)
    if options.list:
        for case in cases:
            print(f"{case.name}{f': not tried, {reasons[case.name]}' if reasons[case.name] else ''}")
        return 0
    rows = [Row(case.name, None, reasons[case.name]) for case in cases if reasons[case.name]]
    to_try = [case for case in cases if not reasons[case.name]]
    if to_try:
        rows = [*_try_all(to_try, options, machine, rows), *rows]
    write(options.json, machine, rows)
    print(f"\n{machine['summary']}.\n\n{markdown(rows)}\n\nWritten to {options.json}.", flush=True)
    return 1 if any(row.state == "no" for row in rows) else 0


def describe_machine() -> dict[str, Any]:
    """The GPUs and the versions of the libraries; `summary` is one line."""
    missing = [name for module, name in BASE.items() if importlib.util.find_spec(module) is None]
    found: dict[str, Any] = {"python": sys.version.split()[0], "missing": missing, "gpus": [], "capability": (0, 0)}
    if "torch" in missing:
        return {**found, "summary": "no PyTorch here"}
    import torch

    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        found["gpus"].append({"name": properties.name, "memory_mb": round(properties.total_memory / 1e6)})
        found["capability"] = max(found["capability"], (properties.major, properties.minor))
    found["libraries"] = {name: _version(name) for name in ("torch", "transformers", "accelerate", "deepspeed")}
    libraries = ", ".join(f"{name} {version}" for name, version in found["libraries"].items() if version)
    names = ", ".join(gpu["name"] for gpu in found["gpus"]) or "no GPU here"
    return {**found, "summary": f"{names}; Python {found['python']}, {libraries}"}


def _version(name: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def reason_against(case: Case, machine: dict[str, Any], on_cpu: bool) -> str:
    """Why a case cannot be tried on this machine; empty if it can."""
    gpus = len(machine["gpus"])
    if on_cpu and not case.on_cpu:
        return "it needs a GPU"
    if not on_cpu and not gpus:
        return "there is no GPU here" if "torch" not in machine["missing"] else "PyTorch is not installed"
    if not on_cpu and case.gpus > gpus:
        return f"it needs {case.gpus} GPUs, and there are {gpus}"
    if not on_cpu and machine["capability"] < case.capability:
        return f"it needs compute capability {'.'.join(map(str, case.capability))}"
    missing = [name for module, name in case.packages.items() if importlib.util.find_spec(module) is None]
    if missing := [*machine["missing"], *missing]:
        return f"not installed: pip install {' '.join(missing)}"
    return ""


def _try_all(cases: list[Case], options: argparse.Namespace, machine: dict[str, Any], untried: list[Row]) -> list[Row]:
    """The rows of all cases: of those that are cut off by the budget or by a signal too."""
    try:
        from tests.gpu.ground import Ground
    except ModuleNotFoundError as error:  # of a package that one of BASE needs
        return [Row(case.name, None, missing_package(str(error))) for case in cases]
    began, rows = time.monotonic(), dict[str, Row]()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="finetune-gpu-", ignore_cleanup_errors=True) as folder:
        os.environ["FINETUNE_HOME"] = f"{folder}/home"
        ground = Ground(Path(folder), on_cpu=options.on_cpu)
        reason = "the time budget was spent"
        try:
            for row in _rows(cases, ground, options.workers, began + options.budget_s):
                rows[row.case] = row
                print(row.line(), flush=True)
                write(options.json, machine, [*rows.values(), *untried])
        except KeyboardInterrupt:
            reason = "the run was stopped"
    return [rows.get(case.name, Row(case.name, None, reason)) for case in cases]


def _rows(cases: list[Case], ground: Ground, workers: int, ends: float) -> Iterator[Row]:
    """Tries the cases that measure one after another, then the others by several threads. The threads are daemons:
    when this process ends, the supervisors of their jobs end these."""

    def may_start() -> bool:
        return time.monotonic() < ends - LONGEST_CASE_S

    for case in cases:
        if case.alone and may_start():
            yield try_case(case, ground)
    waiting, done = deque(case for case in cases if not case.alone), Queue[Row | None]()

    def work() -> None:
        while waiting and may_start():
            done.put(try_case(waiting.popleft(), ground))
        done.put(None)

    for _ in range(workers):
        threading.Thread(target=work, daemon=True).start()
    for _ in range(workers):
        while (row := done.get()) is not None:
            yield row


def try_case(case: Case, ground: Ground) -> Row:
    """Tries one case. Any exception is a check that does not hold."""
    module, _, function = case.function.partition(":")
    began = time.monotonic()
    try:
        run = getattr(importlib.import_module(f"tests.gpu.{module}"), function)
        result = run(ground, ground.folder / case.name, **case.settings)
    except Exception as error:
        traceback.print_exc()
        first = (str(error).strip().splitlines() or [""])[0][:300]
        result = Result({"runs": f"no: {type(error).__name__}: {first}"})
    if reason := missing_package(" ".join(result.checks.values())):
        return Row(case.name, None, reason)
    return Row(case.name, result, seconds=time.monotonic() - began)


def missing_package(text: str) -> str:
    """The reason for a case in whose error a module is missing; empty if none is."""
    found = re.search(r"No module named '([\w.]+)'", text)
    return f"not installed: the module {found[1]}" if found else ""


if __name__ == "__main__":
    sys.exit(main())
