"""The rows of batch predictions, evaluations and drift reports: which files they are."""

from __future__ import annotations

from pathlib import Path

from tasks.prediction.input_rows import list_files
from tests.raised import raised_problems
from training.recipe.reading_rules import ReadingRules


def test_urls_with_secrets_are_refused_before_they_are_read_because_prefect_stores_the_parameters_of_runs(
    tmp_path: Path,
) -> None:
    (tmp_path / "rows.csv").write_text("text\ngood\n")
    inputs = [str(tmp_path / "rows.csv"), "https://127.0.0.1:9/rows.csv?sig=hush"]
    problems = raised_problems(
        list_files, inputs, "s3://me:hush@bucket/out", field="inputs", rules=ReadingRules(), remarks=[]
    )
    assert [problem.where for problem in problems] == ["output", "inputs[1]"]
    assert all("parameters of runs are stored and shown" in problem.message for problem in problems)
    assert not any("hush" in problem.message for problem in problems)
