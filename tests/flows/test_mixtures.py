"""Mixtures in the commands: check, plan, run, show, and runs after new rows."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.cli.main import main
from tests.flows.forked import finetune
from tests.flows.small import FinishedRun, command, environment, states, write_project, write_rows
from training.jobs.protocol import sha256
from training.recipe import load, parse


def mixed(folder: Path, **data: Any) -> Path:
    """The small project with a second set of rows, and a mixture of both as its recipe."""
    file = write_project(folder)
    (folder / "more").mkdir()
    write_rows(folder / "more" / "train.csv", 40, seed=3)
    write_rows(folder / "more" / "test.csv", 30, seed=4)
    document = yaml.safe_load(file.read_text())
    recipe = document["deployments"][0]["parameters"]["recipe"]
    sets = [
        {"source": "csv", "path": str(folder / place), "name": name}
        for place, name in ((".", "ours"), ("more", "theirs"))
    ]
    sets[0] |= {"splits": {"train": "train.csv", "validation": "validation.csv"}, "weight": 0.75}
    sets[1] |= {"weight": 0.25, "epochs": 2.0}
    recipe["data"] = {"text": ["text"], "label": "label", "mix": sets, "checks": {"duplicates": "ignore"}, **data}
    recipe["training"]["num_train_epochs"] = 4
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    return file


def test_check_shows_the_mixture_that_training_will_see(
    tmp_path: Path, home: Path, model_unchecked: None, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert main(["check", str(mixed(tmp_path / "project")), "--json", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("dataset"))
    columns = ["dataset", "train rows", "weight", "rows an epoch", "passes", "share", "of characters"]
    assert [word.strip() for word in lines[head].split("  ") if word] == [*columns, "validation", "test"]
    theirs = json.loads(out.read_text())["mixture"][1]
    count = 2 * theirs["rows"]
    assert lines[head + 1].split()[:6] == ["ours", "240", "0.75", f"{3 * count}", f"{3 * count / 240:.4g}", "75.0%"]
    shown = ["theirs", f"{theirs['rows']}", "0.25", f"{count}", f"{count / theirs['rows']:.4g}", "25.0%"]
    assert lines[head + 2].split()[:6] == shown
    assert theirs["rows"] + theirs["validation"] == 40
    assert json.loads(out.read_text())["rows"]["train"] == 4 * count


def test_check_and_plan_weight_a_mixture_by_the_tokens_of_the_model_that_training_starts_from(
    finished: FinishedRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model_unchecked: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FINETUNE_HOME", str(finished.home))
    words = ["data.weight_by=tokens", "data.mix[1].epochs=null", "model.path=small/1", "release.registry=mixed"]
    words += ["model.source=registry", "model.config=null", "name=mixed"]
    file, out = mixed(tmp_path / "project"), tmp_path / "out.json"
    changes = [word for one in words for word in ("--set", one)]
    assert main(["check", str(file), *changes, "--json", str(out)]) == 0
    assert "of tokens" in capsys.readouterr().out
    ours, theirs = json.loads(out.read_text())["mixture"]
    assert abs(ours["token_share"] - 0.75) < 0.02 and ours["tokens"] > 5 * theirs["tokens"]
    assert main(["plan", str(file), *changes]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    first = next(number for number, line in enumerate(lines) if line[:1] == ["load_model"])
    assert lines[first + 1][:3] == ["load_data", "will", "run"]


def test_plan_names_the_sets_before_they_are_read(
    tmp_path: Path, home: Path, model_unchecked: None, capsys: pytest.CaptureFixture[str]
) -> None:
    file = mixed(tmp_path / "project")
    assert main(["plan", str(file)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert f"  load_data: ours: csv {file.parent}, weight 0.75" in printed
    assert f"  load_data: theirs: csv {file.parent / 'more'}, weight 0.25, 2 epochs" in printed


def test_problems_of_the_files_of_all_sets_are_reported_together(
    tmp_path: Path, home: Path, model_unchecked: None, capsys: pytest.CaptureFixture[str]
) -> None:
    file = mixed(tmp_path / "project")
    wrong = ["data.mix[0].splits={train: trian.csv}", "data.mix[1].path=nowhere", "evaluation.splits=[validation]"]
    assert main(["check", str(file), *(word for one in wrong for word in ("--set", one))]) == 2
    printed = capsys.readouterr().out
    assert "error    data.mix[0].splits.train: no train file in" in printed and "Did you mean 'train.csv'?" in printed
    assert "Name it in data.mix[0].splits.train" in printed
    assert "error    data.mix[1].path: " in printed


@pytest.mark.drill
@pytest.mark.parametrize("processes", [1, 2])
def test_a_mixture_is_trained_killed_resumed_shown_and_made_anew_when_rows_arrive_in_one_set(
    tmp_path: Path, processes: int
) -> None:
    file = mixed(tmp_path / "project")
    both = ("--set", f"compute.num_processes={processes}", "--set", "training.num_train_epochs=40")
    whole = finetune(tmp_path / "whole", "run", str(file), *both, "--json", str(tmp_path / "whole.json"))
    assert whole.returncode == 0, whole.stdout + whole.stderr
    home, out = tmp_path / "killed", tmp_path / "killed.json"
    env = environment(home)
    killed = subprocess.Popen(
        command("run", str(file), *both), env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while killed.poll() is None and not list(home.glob("jobs/*/checkpoints/checkpoint-*")):
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    again = finetune(home, "run", str(file), *both, "--json", str(out))
    assert again.returncode == 0, again.stdout + again.stderr
    assert states(out)["fit"] == "resumed"
    weights = [
        sha256(next(place.glob("artifacts/fit/*/model/model.safetensors"))) for place in (tmp_path / "whole", home)
    ]
    assert weights[0] == weights[1]
    (slices,) = home.glob("artifacts/score/*/slices.json")
    groups = {group["group"]: group["rows"] for group in json.loads(slices.read_text())["validation"]["dataset"]}
    assert groups.keys() == {"ours", "theirs"}
    shown = finetune(home, "show", "small/1")
    assert (
        "  dataset       theirs: csv" in shown.stdout
        and "66 rows by 2 passes of 33, 25.0% of the mixture" in shown.stdout
    )
    planned = finetune(home, "plan", str(file), *both)
    assert "Nothing changed." in planned.stdout and "load_data: theirs" in planned.stdout
    with (file.parent / "more" / "train.csv").open("a") as rows:
        rows.write("the film was superb and I came back,pos,drama\n")
    changed = finetune(home, "plan", str(file), *both)
    assert f"theirs: {file.parent / 'more' / 'train.csv'} changed" in changed.stdout
    reproduced = finetune(tmp_path / "whole", "reproduce", "small/1")
    assert reproduced.returncode and f"{file.parent / 'more' / 'train.csv'}: has sha256" in reproduced.stderr
    assert json.loads(out.read_text())["model"]["registered"] == "small/1"


def test_the_record_of_a_mixture_pins_every_set_and_is_read_again(tmp_path: Path, home: Path) -> None:
    from tasks.registry.lineage import resolve_fields
    from tasks.stages.resolve import pin

    recipe = load(mixed(tmp_path / "project"))
    lock = pin(recipe)
    assert list(lock.data_sets) == ["ours", "theirs"] and lock.data_files == {}
    fields = resolve_fields(recipe, type(lock).model_validate_json(lock.model_dump_json()))
    ours, theirs = fields["data"]["mix"]
    assert theirs["splits"] == {s: [str(tmp_path / f"project/more/{s}.csv")] for s in ("train", "test")}
    again = pin(parse(fields))
    assert again.sets == lock.sets and len(again.all_data_files) == 4 and ours["weight"] == 0.75
