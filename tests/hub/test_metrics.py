"""Metrics of the Hub: the code of the commit that the recipe names, and no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants

from tasks.cache.stage import Work
from tasks.stages.resolve import resolve
from tests.hub.server import Hub
from tests.raised import raised_problems
from training.evaluation import hub_metrics, metrics
from training.evaluation.predictions import OneLabel
from training.recipe import parse

ERRORS = b"""
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
ENDPOINT = constants.ENDPOINT
# Four rows, of which one is wrong.
ROWS = OneLabel(np.array([0, 1, 1, 0]), np.array([0, 1, 0, 0]), np.eye(2)[[0, 1, 0, 0]], ["no", "yes"])


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The Hub, and a working directory with files that are named like its metrics."""
    for trap in ("errors/errors.py", "me/errors/errors.py", "accuracy/accuracy.py"):
        (tmp_path / trap).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / trap).write_text("raise SystemExit('the code of the working directory was run')\n")
    monkeypatch.chdir(tmp_path)
    with Hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(ENDPOINT)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("time.sleep", lambda seconds: None)  # before the clients ask again
        hub_metrics.load_hub_metric.cache_clear()
        yield hub


def refused(name: str) -> tuple[str, str]:
    (problem,) = raised_problems(metrics.compute, [name], ROWS)
    assert problem.where == "evaluation.metrics[0]"
    return problem.kind, problem.message


def test_a_metric_is_that_of_its_commit_and_of_no_other_file(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    first = hub.repo("space", "me/errors", {"errors.py": b"FACTOR = 1\n" + ERRORS, "app.py": b"1 / 0"})
    second = hub.commit("space", "me/errors", {"errors.py": b"FACTOR = 10\n" + ERRORS})
    assert metrics.compute(["accuracy", f"hub:me/errors@{first}"], ROWS) == {"accuracy": 0.75, "errors": 1.0}
    path = f"/spaces/me/errors/resolve/{first}/errors.py"
    assert hub.requests == [f"HEAD {path}", f"GET {path}"]
    assert metrics.compute([f"hub:me/errors@{second}"], ROWS) == {"errors": 10.0}

    hub.fault = lambda method, path: 500
    _, message = refused(f"hub:me/errors@{'e' * 40}")
    assert "500" in message and message.endswith("the fault is the Hub's. Run the same command again later.")
    hub.stop()
    hub_metrics.load_hub_metric.cache_clear()  # as another process would
    assert metrics.compute([f"hub:me/errors@{first}"], ROWS) == {"errors": 1.0}
    for offline, mend in ((False, "check the network"), (True, "unset HF_HUB_OFFLINE")):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        task, message = refused(f"hub:me/errors@{'f' * 40}")
        assert task == "network" and message.endswith(f"{mend}, then run the same command again.")


def test_a_name_that_is_no_metric_of_the_hub_is_reported(hub: Hub) -> None:
    broken = hub.repo("space", "me/broken", {"broken.py": b"import a_module_that_is_not_here"})
    empty = hub.repo("space", "me/empty", {"app.py": b"1 / 0"})
    nothing = hub.repo("space", "me/nothing", {"nothing.py": b"import evaluate"})
    private = hub.repo("space", "you/secret", {"secret.py": b""}, private=True)
    reasons = {
        f"me/broken@{broken}": "running 'hub:{}' failed: ModuleNotFoundError: No module named",
        f"me/empty@{empty}": "'hub:{}' has no empty.py",
        f"me/nothing@{nothing}": "'hub:{}': its nothing.py defines no evaluate.Metric.",
        f"you/secret@{private}": "the Hub has no Space 'you/secret', or it is private",
        f"me/empty@{'f' * 40}": "'hub:{}': there is no such commit of me/empty.",
    }
    for name, message in reasons.items():
        task, text = refused(f"hub:{name}")
        assert task == "metrics" and text.startswith(message.format(name)), text


def test_a_run_fetches_them_when_it_begins_for_its_jobs_have_no_network(
    hub: Hub, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"hub:me/errors@{hub.repo('space', 'me/errors', {'errors.py': ERRORS.replace(b'FACTOR', b'1')})}"
    (tmp_path / "train.csv").write_text("text,label\na,1\nb,0\n")
    recipe = {
        "name": "small",
        "task": "sequence-classification",
        "data": {"source": "csv", "path": str(tmp_path / "train.csv"), "text": ["text"], "label": "label"},
        "model": {"source": "scratch", "config": {"model_type": "bert", "vocab_size": 100}},
        "evaluation": {"metrics": [name, f"hub:me/none@{'a' * 40}"], "allow_remote_code": True},
    }
    problems = raised_problems(resolve.make, Work("key", tmp_path, "run"), parse(recipe))
    assert [problem.where for problem in problems] == ["evaluation.metrics[1]"]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert metrics.compute([name], ROWS) == {"errors": 1.0}
