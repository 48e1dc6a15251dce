"""`finetune init owner/name`: a recipe for a data set of the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.flows.forked import finetune
from tests.hub.server import Hub
from tests.hub.sst2 import ROWS, sst2_files


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A Hub with a data set of two subsets; the working directory is empty."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with Hub() as hub:
        hub.repo("dataset", ROWS, sst2_files())
        yield hub


@pytest.mark.slow
def test_a_data_set_of_the_hub_gets_a_recipe_with_its_splits_and_labels(hub: Hub, tmp_path: Path) -> None:
    home, env = tmp_path / "home", hub.environment(tmp_path)
    made = finetune(home, "init", ROWS, "--config", "sst2", "--yes", "--model", "scratch", **env)
    assert made.returncode == 0, made.stderr
    recipe = yaml.safe_load(Path("deployments/glue.yaml").read_text())["deployments"][0]["parameters"]["recipe"]
    assert recipe["task"] == "sequence-classification"
    data = recipe["data"]
    assert (data["source"], data["path"], data["config"]) == ("hub", ROWS, "sst2")
    assert (data["text"], data["label"]) == (["sentence"], "label")
    assert data["splits"] == {"train": "train", "validation": "validation"}
    checked = finetune(home, "check", "deployments/glue.yaml", **env)
    assert checked.returncode == 0, checked.stderr + checked.stdout


def test_what_the_hub_lacks_is_one_message(hub: Hub, tmp_path: Path) -> None:
    home, env = tmp_path / "home", hub.environment(tmp_path)
    several = finetune(home, "init", ROWS, "--yes", **env)
    assert several.returncode == 2 and "cola" in several.stderr and "--config" in several.stderr
    absent = finetune(home, "init", "nobody/nothing", "--yes", **env)
    assert absent.returncode == 2 and "nobody/nothing" in absent.stderr and "Traceback" not in absent.stderr
