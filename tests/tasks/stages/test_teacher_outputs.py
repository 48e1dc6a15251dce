"""The stage teacher_outputs: its key, the blocks that are computed once, and the labels of its teacher."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tasks.cache import store
from tasks.cache.history import History
from tasks.cache.results import Artifact, Lock
from tasks.cache.stage import Work
from tasks.home import home as home_folder
from tasks.registry import pinned_versions
from tasks.registry.versions import CALIBRATION_TAG, TASK_TAG
from tasks.stages.preflight.teacher_cost import teacher_line
from tasks.stages.resolve import pin
from tasks.stages.teacher_outputs import require_labels, teacher_outputs
from tests.arrow import read_arrow, write_arrow
from tests.raised import raised_problems
from tests.tasks.forward_passes import Forwards, count_forwards, stored_blocks
from tests.training import tiny
from tests.training.tiny import LABELS
from training.evaluation.stored_calibration import Abstention, Calibration
from training.recipe import Recipe, parse

DATA = Artifact(stage="load_data", key="d", digest="rows", parts={"train.arrow": "of train", "labels.json": "labels"})
BLOCK = 16


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A world with a teacher in the folder `teacher`, whose labels are in another order than those of the rows."""
    world = tiny.make_world(tmp_path_factory.mktemp("base") / "world")
    tiny.export_untrained(world / "base", world / "teacher", labels=[LABELS[2], "other", LABELS[0], LABELS[1]])
    return world


@pytest.fixture
def forwards(home: Path, monkeypatch: pytest.MonkeyPatch) -> Forwards:
    """An empty home; programs of jobs run here, with small blocks."""
    home.mkdir(mode=0o700)
    return count_forwards(monkeypatch, "training.programs.teacher_outputs.ROWS_IN_BLOCK", BLOCK)


def recipe(base: Path, **changes: Any) -> Recipe:
    values = {
        "name": "small",
        "task": "sequence-classification",
        "data": {"source": "json", "path": "rows", "text": ["text"], "label": "label"},
        "model": {"source": "scratch", "config": tiny.CONFIG},
        "tokens": {"max_length": 64},
        "training": {"teacher": {"source": "folder", "path": str(base / "teacher")}},
    }
    return parse(values, changes)


def lock_of(base: Path) -> Lock:
    from tasks.stages.resolve import pin_model_folder

    return Lock(teacher_files=pin_model_folder(base / "teacher"))


def write_rows(base: Path, count: int, labels: list[str] = LABELS) -> None:
    rows = read_arrow(base / "data/train.arrow")
    DATA.path.mkdir(parents=True, exist_ok=True)
    write_arrow(DATA.path / "train.arrow", rows.slice(0, count).combine_chunks())
    (DATA.path / "labels.json").write_text(json.dumps(labels))


def make(key: str, base: Path, **changes: Any) -> dict[str, Any]:
    """The result of the stage. Its artifact and job have this key."""
    work = Work(key, home_folder() / "artifacts/teacher_outputs" / key, "run", (), "teacher_outputs")
    result: dict[str, Any] = teacher_outputs.make(work, recipe(base, **changes), lock_of(base), DATA)
    return result


def output(key: str) -> Path:
    return home_folder() / "artifacts/teacher_outputs" / key / "train.arrow"


def test_an_appended_row_computes_one_block_and_another_student_none(base: Path, forwards: Forwards) -> None:
    write_rows(base, 40)
    first = make("first", base)
    assert (first["rows"], first["computed"]) == (40, 40)
    assert forwards.blocks == [16, 16, 8]
    forwards.blocks.clear()
    write_rows(base, 41)
    assert make("appended", base)["computed"] == 9 and forwards.blocks == [9]
    student = {"training.seed": 9, "training.learning_rate": 1e-3, "model.config.hidden_size": 16}
    assert make("student", base, **student, **{"training.teacher.temperature": 5})["computed"] == 0
    shutil.rmtree(home_folder() / "blocks")
    assert make("without blocks", base)["computed"] == 41
    assert output("without blocks").read_bytes() == output("appended").read_bytes() == output("student").read_bytes()


def test_outputs_are_the_logits_in_the_order_of_the_rows_labels(base: Path, forwards: Forwards) -> None:
    import torch

    from training.models.loading import load_tokenizer, load_trained
    from training.task_types import load

    write_rows(base, 20)
    make("first", base)
    found = np.array(read_arrow(output("first"))["teacher"].to_pylist())
    texts = read_arrow(DATA.path / "train.arrow")["text"].to_pylist()
    network = load_trained(load("sequence-classification"), base / "teacher")
    with torch.no_grad():
        tokens = load_tokenizer(base / "teacher")(texts, return_tensors="pt", padding=True)
        logits = network(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])["logits"].numpy()
    assert np.allclose(found, logits[:, [2, 3, 0]], atol=1e-5), "animal, tool, food are its labels 2, 3 and 0"


def test_a_killed_program_keeps_its_finished_blocks_and_ends_with_the_same_bytes(
    base: Path, forwards: Forwards
) -> None:
    write_rows(base, 40)
    make("whole", base)
    shutil.rmtree(home_folder() / "blocks")
    forwards.blocks.clear()
    forwards.kill_after = 2
    with pytest.raises(KeyboardInterrupt):
        make("killed", base)
    shutil.rmtree(home_folder() / "blocks")  # a kill of the flow's process leaves those of the job alone
    forwards.kill_after = 1000
    assert make("killed", base)["computed"] == 8 and forwards.blocks == [16, 16, 8]
    assert output("killed").read_bytes() == output("whole").read_bytes()


def test_nothing_of_the_student_is_in_the_key(base: Path, forwards: Forwards) -> None:
    def key(**changes: Any) -> str:
        return teacher_outputs.key(teacher_outputs.flat_inputs(recipe(base, **changes), lock_of(base), DATA)[0])

    same = {
        "training.learning_rate": 1e-4,
        "training.per_device_eval_batch_size": 8,
        "training.teacher.weight": 0.9,
        "model.seed": 5,
    }
    assert {key(**{name: value}) for name, value in same.items()} == {key()}
    assert key(**{"tokens.max_length": 16}) != key()


def test_a_teacher_without_a_label_of_the_rows_is_refused_by_its_name(base: Path, forwards: Forwards) -> None:
    write_rows(base, 8, [*LABELS, "plant"])
    (problem,) = raised_problems(require_labels, recipe(base), lock_of(base), DATA)
    assert problem.where == "training.teacher.path" and "lacks labels of the rows ('plant')" in problem.message
    (problem,) = raised_problems(make, "first", base)
    assert problem.where == "training.teacher.path" and not forwards.blocks


def test_a_model_of_another_task_is_refused(base: Path, forwards: Forwards, tmp_path: Path) -> None:
    write_rows(base, 8)
    other = shutil.copytree(base / "teacher", tmp_path / "world/teacher")
    config = json.loads((other / "config.json").read_text())
    for change, message in (
        ({"problem_type": "multi_label_classification"}, "was trained for multi_label_classification, and a teacher"),
        ({"architectures": ["BertForMaskedLM"]}, "is BertForMaskedLM, and a teacher of sequence-classification must"),
    ):
        (other / "config.json").write_text(json.dumps(config | change))
        (problem,) = raised_problems(make, "first", tmp_path / "world")
        assert problem.where == "training.teacher.path" and message in problem.message


def test_a_teachers_file_that_changes_after_it_was_pinned_is_refused_by_name_and_nothing_is_stored(
    base: Path, forwards: Forwards, tmp_path: Path
) -> None:
    write_rows(base, 8)
    shutil.copytree(base / "teacher", tmp_path / "world/teacher")
    lock, file = lock_of(tmp_path / "world"), tmp_path / "world/teacher/model.safetensors"
    work = Work("first", home_folder() / "artifacts/teacher_outputs/first", "run", (), "teacher_outputs")
    for change in (lambda: file.write_bytes(file.read_bytes()[:-4] + bytes(4)), file.unlink):
        change()
        (problem,) = raised_problems(teacher_outputs.make, work, recipe(tmp_path / "world"), lock, DATA)
        assert problem.where.endswith("teacher/model.safetensors") and "has changed since" in problem.message
    assert not forwards.blocks and not stored_blocks() and not output("first").exists()


def test_problems_of_a_teachers_files_are_in_its_field(base: Path, forwards: Forwards, tmp_path: Path) -> None:
    write_rows(base, 8)
    file = shutil.copytree(base / "teacher", tmp_path / "world/teacher") / "model.safetensors"
    weights = load_file(file)
    del weights["classifier.weight"]
    save_file(weights, file, {"format": "pt"})
    (problem,) = raised_problems(make, "first", tmp_path / "world")
    assert problem.where == "training.teacher.path" and problem.kind == "training"
    assert problem.message.startswith(f"the teacher {tmp_path / 'world/teacher'}: ") and "lacks 1" in problem.message


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ({"rows": 300, "rows_per_second": 10.0, "computed": 9}, "time: ?"),
        ({"rows": 300, "rows_per_second": 10.0, "computed": 256}, "about 4 s at the 10 rows/s of the last run"),
        ({"rows": 300, "samples_per_second": 10.0}, "time: ?"),  # of another version of this project
    ],
)
def test_a_plan_estimates_by_runs_that_computed_enough_rows(
    result: dict[str, Any], expected: str, base: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    History("small").remember_key("teacher_outputs", "k")
    monkeypatch.setattr(store, "manifest_of", lambda stage, key: (SimpleNamespace(result=result),))
    data = Artifact(stage="load_data", key="d", digest="-", result=SimpleNamespace(train_rows=40, labels=3))
    assert expected in teacher_line("big", recipe(base), lock_of(base), data, None)


def test_a_folder_that_is_no_teacher_is_refused_in_the_field_that_names_it(home: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a", "label": "x"}\n')
    values = recipe(tmp_path, **{"data.path": str(tmp_path / "rows.jsonl")})
    (problem,) = raised_problems(pin, values)
    assert problem.where == "training.teacher.path" and str(tmp_path / "teacher") in problem.message


@pytest.mark.parametrize(
    ("changes", "where", "message"),
    [
        ({"task": "reranking"}, "training.teacher", "task reranking learns from no teacher: set it to null."),
        ({"training.collator": "mine:Mixed"}, "training.collator", "without the outputs of training.teacher"),
        (
            {"training.teacher.source": "registry", "training.teacher.path": "big"},
            "training.teacher.path",
            "'big' names no version",
        ),
        ({"training.teacher.revision": "v1"}, "training.teacher.revision", "is for `source: hub` only"),
        (
            {"training.teacher.unlabelled_min_confidence": "abstain", "data.unlabelled": "more.jsonl"},
            "training.teacher.unlabelled_min_confidence",
            "abstain is for a version of a registry, which has the thresholds",
        ),
    ],
)
def test_what_no_teacher_fits_is_refused(changes: dict[str, Any], where: str, message: str) -> None:
    problems = raised_problems(recipe, Path("x"), **changes)
    assert [problem.message for problem in problems if problem.where == where and message in problem.message]


def test_abstain_takes_the_thresholds_of_the_version_and_refuses_one_without(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"training.teacher.source": "registry", "training.teacher.path": "big/7", "data.unlabelled": "more.jsonl"}
    wanted = recipe(Path("x"), **own, **{"training.teacher.unlabelled_min_confidence": "abstain"})
    thresholds = Abstention(max_error=0.1, confidence=0.9, thresholds={}, others=0.8)
    calibration = Calibration(function="softmax", labels=LABELS, scale=[0.5], offset=[0.0])
    tags = {TASK_TAG: json.dumps({"task": "sequence-classification", "options": {}})}
    version = SimpleNamespace(name="big", version=7, creation_timestamp=0, tags=tags)
    monkeypatch.setattr(pinned_versions, "_find_named", lambda path, where: version)
    for given in (None, calibration):
        version.tags = tags | ({CALIBRATION_TAG: given.text()} if given else {})
        (problem,) = raised_problems(pinned_versions.find_teacher, wanted)
        assert problem.where == "training.teacher.unlabelled_min_confidence"
        assert problem.message.startswith("abstain needs the thresholds of the teacher, and big/7 has none")
    whole = calibration.model_copy(update={"abstain": thresholds})
    version.tags = tags | {CALIBRATION_TAG: whole.text()}
    assert Calibration.model_validate(pinned_versions.find_teacher(wanted).calibration) == whole
    assert pinned_versions.find_teacher(recipe(Path("x"), **own)).calibration is None
