"""Metrics of the Hub: the code of the commit that the recipe names, and no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.hub.server import Hub

ERRORS = """
import datasets
import evaluate


class Errors(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int32"), "references": datasets.Value("int32")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        return {"errors": FACTOR * sum(a != b for a, b in zip(predictions, references))}
"""
TRAP = "raise SystemExit('the code of the working directory was run')\n"
# What each line of input names is computed on four rows, of which one is wrong.
PROGRAM = """
import json, sys
import numpy as np
from training import metrics
from training.predicted import Predicted
from training.problems import UserError

rows = Predicted(np.array([0, 1, 1, 0]), np.array([0, 1, 0, 0]), np.eye(2)[[0, 1, 0, 0]], ["no", "yes"])
for line in sys.stdin:
    try:
        print(json.dumps(metrics.compute([line.strip()], rows)), flush=True)
    except UserError as error:
        print(json.dumps([[problem.kind, problem.message] for problem in error.problems]), flush=True)
"""


class Asking:
    """A process that computes metrics, started in a folder with files that are named like them."""

    def __init__(self, hub: Hub, folder: Path, **more: str) -> None:
        for trap in ("errors/errors.py", "me/errors/errors.py", "accuracy/accuracy.py"):
            (folder / trap).parent.mkdir(parents=True, exist_ok=True)
            (folder / trap).write_text(TRAP)
        env = {**os.environ, **hub.environment(folder / "hf"), **more}
        env["PYTHONPATH"] = str(Path(__file__).parents[2])
        argv = [sys.executable, "-c", PROGRAM]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(argv, cwd=folder, env=env, text=True, **pipes)  # type: ignore[call-overload]

    def __call__(self, name: str) -> Any:
        """What comes of the metric."""
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def end(self) -> None:
        self._process.stdin.close()
        assert self._process.wait(30) == 0


def test_a_metric_is_that_of_its_commit_also_where_the_branch_moved_and_the_hub_is_away(tmp_path: Path) -> None:
    with Hub() as hub:
        first = hub.repo("space", "me/errors", {"errors.py": b"FACTOR = 1\n" + ERRORS.encode(), "app.py": b"1 / 0"})
        second = hub.commit("space", "me/errors", {"errors.py": b"FACTOR = 10\n" + ERRORS.encode()})
        broken = hub.repo("space", "me/broken", {"broken.py": b"import a_module_that_is_not_here"})
        empty = hub.repo("space", "me/empty", {"app.py": b"1 / 0"})
        nothing = hub.repo("space", "me/nothing", {"nothing.py": b"import evaluate"})
        private = hub.repo("space", "you/secret", {"secret.py": b""}, private=True)

        ask = Asking(hub, tmp_path)
        assert ask("accuracy") == {"accuracy": 0.75}
        assert ask(f"hub:me/errors@{first}") == {"errors": 1.0}
        path = f"/spaces/me/errors/resolve/{first}/errors.py"
        assert hub.requests == [f"HEAD {path}", f"GET {path}"]
        assert ask(f"hub:me/errors@{second}") == {"errors": 10.0}

        refused = {
            f"hub:me/broken@{broken}": "running 'hub:me/broken@{}' failed: ModuleNotFoundError: No module named",
            f"hub:me/empty@{empty}": "'hub:me/empty@{}' has no empty.py",
            f"hub:me/nothing@{nothing}": "'hub:me/nothing@{}': its nothing.py defines no evaluate.Metric.",
            f"hub:you/secret@{private}": "the Hub has no Space 'you/secret', or it is private",
            f"hub:me/errors@{'f' * 40}": "'hub:me/errors@{}': there is no such commit of me/errors.",
        }
        for name, message in refused.items():
            ((kind, said),) = ask(name)
            assert kind == "metrics" and said.startswith(message.format(name.partition("@")[2])), said
        hub.stop()
        ((kind, said),) = ask(f"hub:me/broken@{first}")
        assert kind == "network" and said.endswith("check the network, then run the same command again.")
        ask.end()

        ask = Asking(hub, tmp_path, HF_HUB_OFFLINE="1")
        assert ask(f"hub:me/errors@{first}") == {"errors": 1.0}
        ((kind, said),) = ask(f"hub:me/errors@{'e' * 40}")
        assert kind == "network" and "unset HF_HUB_OFFLINE" in said
        ask.end()
