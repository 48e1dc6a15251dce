"""The programs of teachers: two ranks write the bytes of one."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.task_types import TINY, make_world
from tests.training.forks import finish, run_main
from tests.training.tiny import LABELS, export_untrained
from training.jobs.protocol import OUTPUT, Job
from training.programs import teacher_outputs, teacher_texts, teacher_tokens

TOKENS = {"temperature": 1.0, "top_k": 5}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "program", "more"),
    [
        ("sequence-classification", teacher_outputs, {}),
        ("embedding", teacher_outputs, {}),
        ("causal-lm", teacher_tokens, TOKENS),
        ("sft", teacher_texts, {}),
    ],
)
def test_two_ranks_of_a_teacher_write_the_bytes_of_one(
    task: str, program: ModuleType, more: dict[str, Any], tmp_path: Path
) -> None:
    world = make_world(task, tmp_path / "world")
    labels = LABELS if task == "sequence-classification" else []
    teacher = export_untrained(world / "base/output", world / "teacher", task, labels)
    folders = {"model": teacher, "tokenizer": teacher, "student": teacher, "data": world / "data"}
    inputs = {name: str(folder) for name, folder in {**folders, "tokens": world / "tokens"}.items()}
    settings: dict[str, Any] = {"task": task, "options": TINY[task].options, "teacher": "big", "max_length": 32}
    settings |= {"batch_size": 8, "mixed_precision": "no", **more}
    written = []
    for ranks in (1, 2):
        job_dir = tmp_path / f"ranks-{ranks}"
        (job_dir / OUTPUT).mkdir(parents=True)
        Job(program=program.__name__, key=job_dir.name, settings=settings, inputs=inputs).write(job_dir)
        outcome = finish(job_dir, ranks, run_main(program))
        assert outcome.state == "finished", outcome
        files = sorted(path for path in (job_dir / OUTPUT).rglob("*") if path.is_file())
        written.append({str(path.relative_to(job_dir)): path.read_bytes() for path in files})
    assert written[0] == written[1] and written[0]
