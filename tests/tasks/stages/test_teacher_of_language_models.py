"""The stage teacher_outputs of language models: the likeliest tokens of each target, or texts that the teacher writes;
each is computed once for a block of rows."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from flows.cli.main import main
from tasks.cache.results import Artifact, Lock
from tasks.cache.stage import Work
from tasks.home import home as home_folder
from tasks.stages.resolve import pin_model_folder
from tasks.stages.teacher_outputs import teacher_outputs
from tests.arrow import read_arrow, write_arrow
from tests.raised import raised_problems
from tests.task_types import TINY, build_world, recipe_of, write_rows
from tests.tasks.forward_passes import Forwards, count_forwards, stored_blocks
from tests.training.tiny import export_untrained
from training import task_types
from training.batching.batches import IGNORED, TokenRows
from training.models.loading import load_tokenizer, load_trained
from training.recipe import Recipe, parse
from training.task_types.losses.token_distillation import IDS, LOGPS, top_tokens
from training.task_types.task_type import LearnsTokens

MODEL = Artifact(stage="load_model", key="m", digest="model", parts={"tokenizer": "tokenizer"})
BLOCK = 8
TOP_K = 5


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A world of each task type, with a teacher in the folder `teacher`, whose tokenizer is that of the rows."""
    made = {}
    for task in ("causal-lm", "sft", "seq2seq"):
        folder = tmp_path_factory.mktemp(task)
        write_rows(task, folder / "rows")
        made[task] = build_world(recipe_of(task, folder / "rows"), folder)
        export_untrained(folder / "base/output", folder / "teacher", task, [])
    return made


@pytest.fixture
def forwards(home: Path, monkeypatch: pytest.MonkeyPatch) -> Forwards:
    """An empty home; programs of jobs run here, with small blocks."""
    home.mkdir(mode=0o700)
    monkeypatch.setattr("training.programs.teacher_texts.ROWS_IN_BLOCK", BLOCK)
    return count_forwards(monkeypatch, "training.programs.teacher_tokens.ROWS_IN_BLOCK", BLOCK)


def recipe(task: str, world: Path, **changes: Any) -> Recipe:
    teacher = {"source": "folder", "path": str(world / "teacher"), "top_k": TOP_K}
    if changes.get("training.teacher.loss") == "sequence":
        del teacher["top_k"]
    return parse(recipe_of(task, world / "rows", teacher=teacher), changes)


def artifact_of(stage: str, rows: pa.Table) -> Artifact:
    """An artifact with these training rows, named by their number."""
    made = Artifact(stage=stage, key=f"{stage}{len(rows)}", digest="-", parts={"train.arrow": f"{len(rows)} rows"})
    made.path.mkdir(parents=True, exist_ok=True)
    write_arrow(made.path / "train.arrow", rows.combine_chunks())
    return made


def make(key: str, task: str, world: Path, rows: int, **changes: Any) -> dict[str, Any]:
    """The result of the stage for so many rows. Its artifact and job have this key."""
    if not MODEL.path.exists():
        shutil.copytree(world / "base/output", MODEL.path)
    wanted = recipe(task, world, **changes)
    data = artifact_of("load_data", read_arrow(world / "data/train.arrow").slice(0, rows))
    inputs: list[Any] = [wanted, Lock(teacher_files=pin_model_folder(world / "teacher")), data]
    if wanted.training.teacher and not wanted.training.teacher.writes_targets:
        inputs += [None, MODEL, artifact_of("tokenize", read_arrow(world / "tokens/train.arrow").slice(0, rows))]
    work = Work(key, home_folder() / "artifacts/teacher_outputs" / key, "run", (), "teacher_outputs")
    result: dict[str, Any] = teacher_outputs.make(work, *inputs)
    return result


def tokens_of(key: str) -> pa.Table:
    folder = home_folder() / "artifacts/teacher_outputs" / key / "train"
    return pa.concat_tables(map(read_arrow, sorted(folder.iterdir())))


@pytest.mark.slow
def test_an_appended_row_computes_one_block_and_another_loss_none(worlds: dict[str, Path], forwards: Forwards) -> None:
    world = worlds["causal-lm"]
    first = make("first", "causal-lm", world, 20)
    assert forwards.taken() == [8, 8, 4] and (first["rows"], first["computed"]) == (20, 20)
    assert 0 < first["rest"] < 1
    assert make("appended", "causal-lm", world, 21)["computed"] == 5 and forwards.taken() == [5]
    others = {"loss": "jsd", "beta": 0.2, "weight": 1.0}
    changes = {f"training.teacher.{name}": value for name, value in others.items()} | {"model.config.n_layer": 1}
    assert make("other", "causal-lm", world, 21, **changes, **{"training.seed": 9})["computed"] == 0
    for field, value in {"temperature": 2.0, "top_k": 3}.items():
        assert make(field, "causal-lm", world, 21, **{f"training.teacher.{field}": value})["computed"] == 21
    shutil.rmtree(home_folder() / "blocks")
    assert make("without blocks", "causal-lm", world, 21)["computed"] == 21
    assert tokens_of("without blocks").equals(tokens_of("appended")) and tokens_of("other").equals(
        tokens_of("appended")
    )


@pytest.mark.parametrize("task", ["causal-lm", "sft", "seq2seq"])
def test_the_stored_tokens_are_the_teachers_likeliest_ones_of_each_target(
    task: str, worlds: dict[str, Path], forwards: Forwards
) -> None:
    world, task_type = worlds[task], task_types.load(task, TINY[task].options)
    assert isinstance(task_type, LearnsTokens)
    make("first", task, world, 10)
    teacher, tokenizer = load_trained(task_type, world / "teacher"), load_tokenizer(world / "teacher")
    task_type.prepare(teacher, tokenizer)
    rows = TokenRows(read_arrow(world / "tokens/train.arrow").slice(0, 10))
    for number, stored in enumerate(tokens_of("first").to_pylist()):
        batch = task_type.collator(tokenizer, 1)([rows[number]])
        with torch.no_grad():
            logits = task_type.forward(teacher, batch)["logits"][task_type.target_ids(batch) != IGNORED]
        ids, logps = top_tokens(logits, TOP_K, 1.0, logits.shape[1])
        assert len(stored[IDS]) == int(rows.targets[number]) * TOP_K
        assert np.allclose(stored[LOGPS], logps.flatten(), atol=1e-5)
        assert np.array(stored[IDS]).tolist() == ids.flatten().tolist()


def test_a_killed_program_keeps_its_finished_blocks_and_ends_with_the_same_bytes(
    worlds: dict[str, Path], forwards: Forwards
) -> None:
    world = worlds["causal-lm"]
    make("whole", "causal-lm", world, 20)
    shutil.rmtree(home_folder() / "blocks")
    forwards.taken()
    forwards.kill_after = 2
    with pytest.raises(KeyboardInterrupt):
        make("killed", "causal-lm", world, 20)
    forwards.kill_after = 1000
    assert make("killed", "causal-lm", world, 20)["computed"] == 4 and forwards.taken() == [8, 8, 4]
    names = [path.name for path in stored_blocks()]
    assert len(names) == 3 and tokens_of("killed").equals(tokens_of("whole"))


def test_a_file_system_without_hard_links_has_copies_of_the_blocks(
    worlds: dict[str, Path], forwards: Forwards, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*paths: Any) -> None:
        raise OSError(errno.EPERM, "no hard links")

    make("linked", "causal-lm", worlds["causal-lm"], 10)
    monkeypatch.setattr(os, "link", no_links)
    make("copied", "causal-lm", worlds["causal-lm"], 10)
    assert tokens_of("copied").equals(tokens_of("linked"))


@pytest.mark.parametrize("loss", ["forward_kl", "sequence"])
def test_problems_of_a_teachers_files_are_in_its_field(
    loss: str, worlds: dict[str, Path], forwards: Forwards, tmp_path: Path
) -> None:
    world = shutil.copytree(worlds["sft"], tmp_path / "sft")
    (world / "teacher/generation_config.json").write_text("[]")
    (problem,) = raised_problems(make, "first", "sft", world, 8, **{"training.teacher.loss": loss})
    assert problem.where == "training.teacher.path" and problem.message.startswith(f"the teacher {world / 'teacher'}: ")


@pytest.mark.parametrize(("task", "can_write"), [("causal-lm", False), ("sft", True)])
def test_a_teacher_with_other_tokens_is_refused_with_the_way_out(
    task: str, can_write: bool, worlds: dict[str, Path], forwards: Forwards, tmp_path: Path
) -> None:
    world = shutil.copytree(worlds[task], tmp_path / task)
    file = world / "teacher/tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = [token for token in vocabulary if token.isalpha()][:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(content))
    (problem,) = raised_problems(make, "tokens", task, world, 8)
    assert problem.where == "training.teacher.path" and "has other tokens than the model: 2 of" in problem.message
    assert ("set training.teacher.loss to sequence" in problem.message) == can_write and not forwards.taken()
    if can_write:
        assert make("texts", task, world, 8, **{"training.teacher.loss": "sequence"})["computed"] == 8


@pytest.mark.parametrize("task", ["sft", "seq2seq"])
def test_a_teacher_writes_the_targets_of_each_block_once(
    task: str, worlds: dict[str, Path], forwards: Forwards
) -> None:
    world, sequence = worlds[task], {"training.teacher.loss": "sequence", "options.max_new_tokens": 6}
    first = make("first", task, world, 20, **sequence)
    assert (first["rows"], first["computed"], first["rest"]) == (20, 20, None)
    assert make("appended", task, world, 21, **sequence)["computed"] == 5
    assert make("seed", task, world, 21, **sequence, **{"training.seed": 9})["computed"] == 0
    assert make("longer", task, world, 21, **sequence | {"options.max_new_tokens": 4})["computed"] == 21
    given = read_arrow(world / "data/train.arrow").slice(0, 21).to_pylist()
    written = read_arrow(home_folder() / "artifacts/teacher_outputs/appended/train.arrow").to_pylist()
    target = {"sft": "completion", "seq2seq": "target"}[task]
    for before, after in zip(given, written, strict=True):
        assert before.keys() == after.keys() and before[target] != after[target]
        assert {**before, target: ""} == {**after, target: ""}
        assert task != "sft" or after[target][:1] == " ", "as the completion of the row begins"


def test_the_last_answer_of_a_conversation_is_replaced_and_earlier_ones_are_no_targets() -> None:
    task_type = task_types.load("sft")
    messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, "abcd", strict=True)]
    rows = pa.RecordBatch.from_pydict({"messages": [json.dumps(messages)]})
    (asked,) = task_type.unanswered(rows).to_pylist()  # type: ignore[attr-defined]
    assert json.loads(asked["messages"]) == [messages[0], {**messages[1], "weight": 0}, messages[2]]
    (answered,) = task_type.with_targets(rows, ["new"]).to_pylist()  # type: ignore[attr-defined]
    assert json.loads(answered["messages"])[-1] == {"role": "assistant", "content": "new"}
    tools = rows.append_column("tools", pa.array(["[]"]))
    (problem,) = raised_problems(task_type.unanswered, tools)  # type: ignore[attr-defined]
    assert problem.where == "training.teacher.loss" and "some rows have tools" in problem.message


@pytest.mark.parametrize(
    ("task", "changes", "where", "message"),
    [
        ("causal-lm", {"loss": "sequence"}, "loss", "task causal-lm has none: choose forward_kl"),
        ("causal-lm", {"beta": 0.5}, "beta", "0.5 does nothing with forward_kl"),
        ("sft", {"loss": "reverse_kl", "beta": 0.5}, "beta", "0.5 does nothing with `loss: reverse_kl`"),
        ("sft", {"loss": "sequence", "weight": 0.9}, "weight", "0.9 does nothing with `loss: sequence`"),
        ("regression", {"loss": "jsd"}, "loss", "jsd is for language models"),
        ("regression", {"top_k": 3}, "top_k", "3 does nothing with task regression"),
        ("masked-lm", {}, "", "task masked-lm learns from no teacher"),
        ("preference", {}, "", "task preference learns from no teacher"),
    ],
)
def test_fields_of_a_teacher_that_do_not_fit_the_task_type_are_refused(
    task: str, changes: dict[str, Any], where: str, message: str
) -> None:
    teacher = {"source": "folder", "path": "big", **changes}
    problems = raised_problems(parse, recipe_of(task, Path("rows"), teacher=teacher))
    field = "training.teacher" + (f".{where}" if where else "")
    assert [problem.message for problem in problems if problem.where == field and message in problem.message], problems


def test_a_teacher_that_may_write_nothing_is_refused() -> None:
    teacher = {"source": "folder", "path": "big", "loss": "sequence"}
    values = recipe_of("sft", Path("rows"), teacher=teacher) | {"options": {"max_new_tokens": 0}}
    (problem,) = raised_problems(parse, values)
    assert problem.where == "options.max_new_tokens" and "lets the teacher write nothing" in problem.message


@pytest.mark.parametrize(("task", "loss"), [("sft", "sequence"), ("causal-lm", "forward_kl")])
def test_a_plan_tells_the_cost_of_a_teacher_before_its_outputs_exist(
    task: str,
    loss: str,
    worlds: dict[str, Path],
    home: Path,
    tmp_path: Path,
    model_unchecked: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    teacher = {"source": "folder", "path": str(worlds[task] / "teacher"), "loss": loss}
    entry = {
        "name": "taught",
        "entrypoint": "flows.finetune:finetune",
        "parameters": {"recipe": recipe_of(task, worlds[task] / "rows", teacher=teacher)},
    }
    (tmp_path / "taught.yaml").write_text(json.dumps({"deployments": [entry]}))
    assert main(["plan", str(tmp_path / "taught.yaml")]) == 0
    assert f"teacher_outputs: by {worlds[task] / 'teacher'}, its weights take " in capsys.readouterr().out
