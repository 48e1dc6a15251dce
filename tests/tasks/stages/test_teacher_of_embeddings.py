"""The stage teacher_outputs of embeddings: vectors of each text by the teacher's own prompts, once for a block."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.cache.results import Artifact, Lock
from tasks.cache.stage import Work
from tasks.home import home as home_folder
from tasks.stages.preflight.teacher_cost import teacher_line
from tasks.stages.resolve import pin_model_folder
from tasks.stages.teacher_outputs import require_dimensions, require_labels, teacher_outputs
from tests.arrow import read_arrow, write_arrow
from tests.raised import raised_problems
from tests.task_types import build_world, recipe_of, write_rows
from tests.tasks.forward_passes import Forwards, count_forwards, stored_blocks
from tests.training.tiny import export_untrained
from training.recipe import Recipe, parse

TASK, BLOCK = "embedding", 16
DATA = Artifact(stage="load_data", key="d", digest="rows", parts={"train.arrow": "of train"})
PROMPTS = {"query": "find: ", "document": ""}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A world with a teacher in the folder `teacher`, which has prompts of its own."""
    world = tmp_path_factory.mktemp("base")
    write_rows(TASK, world / "rows")
    build_world(recipe_of(TASK, world / "rows"), world)
    teacher = export_untrained(world / "base/output", world / "teacher", TASK, [])
    file = teacher / "config_sentence_transformers.json"
    file.write_text(json.dumps({"prompts": PROMPTS}))
    return world


@pytest.fixture
def forwards(home: Path, monkeypatch: pytest.MonkeyPatch) -> Forwards:
    """An empty home; programs of jobs run here, with small blocks."""
    home.mkdir(mode=0o700)
    return count_forwards(monkeypatch, "training.programs.teacher_outputs.ROWS_IN_BLOCK", BLOCK)


def recipe(base: Path, **changes: Any) -> Recipe:
    teacher = {"source": "folder", "path": str(base / "teacher")}
    return parse(recipe_of(TASK, base / "rows", teacher=teacher), changes)


def lock_of(base: Path) -> Lock:
    return Lock(teacher_files=pin_model_folder(base / "teacher"))


def write_train(base: Path, count: int) -> None:
    DATA.path.mkdir(parents=True, exist_ok=True)
    write_arrow(DATA.path / "train.arrow", read_arrow(base / "data/train.arrow").slice(0, count).combine_chunks())
    (DATA.path / "labels.json").write_text('["not", "of", "texts"]')


def make(key: str, base: Path, **changes: Any) -> dict[str, Any]:
    work = Work(key, home_folder() / "artifacts/teacher_outputs" / key, "run", (), "teacher_outputs")
    result: dict[str, Any] = teacher_outputs.make(work, recipe(base, **changes), lock_of(base), DATA)
    return result


def output(key: str) -> Path:
    return home_folder() / "artifacts/teacher_outputs" / key / "train.arrow"


def test_an_appended_row_computes_one_block_and_another_student_none(base: Path, forwards: Forwards) -> None:
    write_train(base, 40)
    assert make("first", base)["computed"] == 40 and forwards.taken() == [16, 16, 8]
    write_train(base, 41)
    assert make("appended", base)["computed"] == 9 and forwards.taken() == [9]
    student = {"training.seed": 9, "training.teacher.weight": 0.9, "options.prompts": {"anchor": "query: "}}
    assert make("student", base, **student, **{"options.scale": 30})["computed"] == 0 and not forwards.blocks
    shutil.rmtree(home_folder() / "blocks")
    assert make("without blocks", base)["computed"] == 41
    assert output("without blocks").read_bytes() == output("appended").read_bytes() == output("student").read_bytes()


def test_outputs_are_the_teachers_embeddings_of_each_text_with_its_own_prompts(base: Path, forwards: Forwards) -> None:

    write_train(base, 20)
    make("first", base)
    found = np.array(read_arrow(output("first"))["teacher"].to_pylist()).reshape(20, 2, -1)
    rows = read_arrow(DATA.path / "train.arrow").to_pylist()
    for place, (column, prompt) in enumerate((("anchor", PROMPTS["query"]), ("positive", ""))):
        assert np.allclose(found[:, place], embed(base, [prompt + row[column] for row in rows]), atol=1e-5), column


def embed(base: Path, texts: list[str]) -> Any:
    """The mean of the teacher's last hidden states."""
    import torch

    from training.models.loading import load_tokenizer, load_trained
    from training.task_types import load

    network, tokenizer = load_trained(load(TASK), base / "teacher"), load_tokenizer(base / "teacher")
    vectors = []
    with torch.no_grad():
        for text in texts:
            hidden = network(input_ids=torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state
            vectors.append(hidden[0].mean(dim=0).numpy())
    return np.array(vectors)


def test_a_killed_program_keeps_its_finished_blocks_and_ends_with_the_same_bytes(
    base: Path, forwards: Forwards
) -> None:
    write_train(base, 40)
    make("whole", base)
    shutil.rmtree(home_folder() / "blocks")
    forwards.taken()
    forwards.kill_after = 2
    with pytest.raises(KeyboardInterrupt):
        make("killed", base)
    shutil.rmtree(home_folder() / "blocks")
    forwards.kill_after = 1000
    assert make("killed", base)["computed"] == 8 and forwards.blocks == [16, 16, 8]
    assert output("killed").read_bytes() == output("whole").read_bytes() and stored_blocks()


def test_a_teacher_of_another_width_is_refused_before_it_computes_anything(base: Path, home: Path) -> None:
    model = Artifact(stage="load_model", key="m", digest="model")
    shutil.copytree(base / "base/output", model.path)
    require_dimensions(recipe(base), lock_of(base), model)
    config = model.path / "model/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"hidden_size": 16}))
    (problem,) = raised_problems(require_dimensions, recipe(base), lock_of(base), model)
    assert problem.where == "training.teacher.path"
    assert problem.message.endswith(
        "have 32 dimensions, and the model's embeddings 16: name a teacher with 16, or a model with 32 (its "
        "hidden_size)."
    )


def test_labels_of_texts_are_no_outputs_and_a_plan_counts_bytes_a_text(base: Path, home: Path) -> None:
    write_train(base, 8)
    require_labels(recipe(base), lock_of(base), DATA)
    data = DATA.model_copy(update={"result": type("Rows", (), {"train_rows": 8, "labels": 0})()})
    assert teacher_line("big", recipe(base), lock_of(base), data, None).endswith("128 bytes a text on disk")


@pytest.mark.parametrize(
    ("changes", "where", "message"),
    [
        ({"data.unlabelled": "more.jsonl"}, "data.unlabelled", "compares texts that belong together"),
        ({"training.teacher.temperature": 3}, "training.teacher.temperature", "does nothing with task embedding"),
        ({"training.teacher.loss": "jsd"}, "training.teacher.loss", "is for language models"),
    ],
)
def test_fields_of_other_teachers_are_refused(changes: dict[str, Any], where: str, message: str, base: Path) -> None:
    problems = raised_problems(recipe, base, **changes)
    assert [problem.where for problem in problems if message in problem.message] == [where]
