"""A teacher whole: its outputs are shared by students, its version is pinned, and a new one is noticed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.flows.forked import finetune
from tests.flows.small import states
from tests.task_types import write_project

TAUGHT = ("name=small", "release.registry=small", "training.teacher={source: registry, path: big@champion}")


@pytest.mark.drill
def test_students_share_the_outputs_of_a_pinned_teacher_and_a_new_one_trains_them_again(
    server: dict[str, str], tmp_path: Path
) -> None:
    home, out = tmp_path / "home", tmp_path / "out.json"
    file = str(write_project("sequence-classification", tmp_path / "project"))

    def run(command: str, *settings: str) -> dict[str, str]:
        changes = [word for setting in settings for word in ("--set", setting)]
        done = finetune(home, command, file, *changes, "--json", str(out), **server)
        assert done.returncode == 0, done.stdout + done.stderr
        return states(out)

    run("run", "name=big", "release.registry=big")
    before = finetune(home, "plan", file, *[word for setting in TAUGHT for word in ("--set", setting)], **server)
    assert "teacher_outputs: by big/1, its weights take " in before.stdout and "12 bytes a row" in before.stdout
    first = run("run", *TAUGHT)
    assert first["teacher_outputs"] == first["fit"] == "ran"
    shown = finetune(home, "show", "small/1", **server).stdout
    assert "teacher       big version 1" in shown and "this model" in shown and "its teacher" in shown
    second = run("run", *TAUGHT, "model.config.hidden_size=16", "training.teacher.weight=0.9", "training.seed=3")
    assert (second["teacher_outputs"], second["fit"]) == ("cached", "ran")

    for setting in ("big/1", "big@champion"):  # pinned, the alias and its version are the same teacher
        plan = finetune(
            home,
            "plan",
            file,
            *[w for s in (*TAUGHT, f"training.teacher.path={setting}") for w in ("--set", s)],
            **server,
        )
        assert "teacher_outputs  cached" in plan.stdout, plan.stdout

    swapped = (
        "data.splits={train: validation.jsonl, validation: train.jsonl}",
        "data.checks.teacher_rows=error",
        "name=swapped",
    )
    refused = finetune(home, "run", file, *[w for s in (*TAUGHT, *swapped) for w in ("--set", s)], **server)
    said = " ".join((refused.stdout + refused.stderr).split())
    assert refused.returncode == 2 and "150 of 150 rows of validation are training rows of the teacher big/1" in said

    shutil.rmtree(home / "artifacts/teacher_outputs")  # as after an update, when they have another key
    reproduced = finetune(home, "reproduce", "small/1", **server)
    assert reproduced.returncode == 0 and "The same bytes: sha256" in reproduced.stdout, reproduced.stdout

    run("run", "name=big", "release.registry=big", "training.seed=7", "release.gate.margin=-1")
    plan = finetune(home, "plan", file, *[word for setting in TAUGHT for word in ("--set", setting)], **server)
    assert "the teacher is big/2, which is big@champion" in plan.stdout
    assert "the teacher big@champion changed" in plan.stdout, plan.stdout
