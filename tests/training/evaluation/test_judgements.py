"""A user's judge of two models' answers: random order, win rate with an interval, a sign test for the gate."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.stats import binomtest

from tasks.cache.results import Comparison, Verdict
from tasks.reports.model_reports import describe_verdict
from tests.arrow import write_arrow
from tests.training import programs_here
from tests.training.programs_here import COMPARE, folders
from tests.training.task_types.test_preference import predicted, record
from training.evaluation.judgements import PairedAnswers, judge_answers
from training.problems import UserError
from training.programs import compare

ROWS, PROMPTS = 60, 30
ANSWERED = np.arange(0, ROWS, 2)
SEEN: list[tuple[str, str, str]] = []


def longest(prompt: str, first: str, second: str) -> int | None:
    """The longer answer is better."""
    SEEN.append((prompt, first, second))
    return None if len(first) == len(second) else int(len(second) > len(first))


def fails(prompt: str, first: str, second: str) -> int:
    raise ValueError("no connection")


def undecided(prompt: str, first: str, second: str) -> str:
    return "A"


NAME = f"{__name__}:"


def with_answers(table: pa.Table, lengths: list[int], prefix: str = "") -> pa.Table:
    """Predictions with answers of these numbers of letters to every second row."""
    texts, tokens = np.full((2, ROWS), None, object)
    texts[ANSWERED], tokens[ANSWERED] = ["x" * length for length in lengths], lengths
    table = table.append_column(f"{prefix}generated_answer", pa.array(texts.tolist(), pa.string()))
    return table.append_column(f"{prefix}generated_tokens", pa.array(tokens.tolist(), pa.int64()))


NEW = [6] * 22 + [2] * 4 + [4] * 4  # 22 wins, 4 losses, 4 ties against answers of 4
OLD = [4] * PROMPTS


def run(home: Path, **settings: Any) -> tuple[Comparison, list[dict[str, str]]]:
    margins = np.linspace(-0.2, 1.0, ROWS).tolist()
    new = with_answers(with_answers(predicted(margins), NEW), OLD, "base_")
    old = with_answers(predicted(margins, reference=False), OLD)
    for folder, table in {"predictions": new, "champion": old}.items():
        (home / folder).mkdir(parents=True)
        pq.write_table(table, home / folder / "test.parquet")
    rows = [{"prompt": f"prompt {number}", "chosen": "c", "rejected": "d"} for number in range(ROWS)]
    data = pa.Table.from_batches([record(rows)])
    write_arrow(home / "data/test.arrow", data)
    (home / "data/labels.json").write_text("[]")
    tokens = pa.table({name: pa.array([1] * 5, pa.int32()) for name in ("chosen_tokens", "rejected_tokens")})
    write_arrow(home / "tokens/train.arrow", tokens)
    inputs = {**folders(home, "predictions", "champion", "data", "tokens"), "model": home}
    found = programs_here.run(compare, home / "job", inputs, task="preference", **COMPARE | settings)
    log = home / "job/output/log/judgements.csv"
    lines = list(csv.DictReader(log.open(newline=""))) if log.exists() else []
    return Comparison.model_validate(found), lines


@pytest.mark.parametrize("champion", ["small/1", None])
def test_the_win_rate_decides_by_a_sign_test_against_the_champion_or_the_base_model(
    champion: str | None, tmp_path: Path
) -> None:
    SEEN.clear()
    found, lines = run(tmp_path, champion=champion, figure="win_rate", metrics=[], judge=f"{NAME}longest", lengths=True)
    assert (found.metric, found.method, found.rows) == ("win_rate", "sign", PROMPTS)
    assert (found.gained, found.lost) == (22, 4) and found.value == pytest.approx(24 / 30)
    assert found.champion_value == pytest.approx(6 / 30) and found.gain == pytest.approx(18 / 30)
    assert found.p_value == pytest.approx(binomtest(22, 26, alternative="greater").pvalue) and found.better
    assert found.champion == (champion or "the base model") and found.baseline is (champion is None)
    length, rate = found.answers
    assert (length.metric, length.value, length.champion_value) == ("generated_length", np.mean(NEW), 4.0)
    assert length.low < np.mean(NEW) - 4 < length.high
    assert (rate.metric, rate.value, rate.opponent) == ("win_rate", found.value, champion or "the base model")
    assert 0 < rate.low < 18 / 30 < rate.high
    assert [line["better"] for line in lines] == ["model"] * 22 + ["opponent"] * 4 + ["neither"] * 4
    assert [int(line["row"]) for line in lines] == ANSWERED.tolist()
    assert len(SEEN) == 26  # not for equal answers
    first = [len(first) != 4 for _, first, _ in SEEN]
    assert 6 < sum(first) < 20  # the model's answer comes first about as often as second
    text = describe_verdict(Verdict(decision="promote", reason="it is.", comparison=found))
    assert "| win_rate | 0.8000 | 0.2000 | +0.6000 |" in text and "| generated_length | 5.2000 | 4.0000 |" in text


def test_lengths_and_the_win_rate_are_reported_with_a_comparison_by_another_metric(tmp_path: Path) -> None:
    found, _ = run(tmp_path, judge=f"{NAME}longest", lengths=True)
    assert found.metric == "accuracy" and found.rows == ROWS
    assert [one.metric for one in found.answers] == ["generated_length", "win_rate"]
    plain, lines = run(tmp_path / "plain")
    assert plain.answers == [] and lines == []
    assert plain.model_dump() == found.model_copy(update={"answers": []}).model_dump()


def test_the_order_of_answers_is_the_same_each_time() -> None:
    answers = PairedAnswers(np.arange(8), list("abcdefgh"), list("ijklmnop"), np.ones(8), np.ones(8))
    orders = []
    for _ in range(2):
        SEEN.clear()
        outcomes = judge_answers(f"{NAME}longest", [json.dumps("b")] * 8, answers, lambda done, total: None)
        orders.append([first for _, first, _ in SEEN])
        assert outcomes.tolist() == [0.5] * 8
    assert orders[0] == orders[1] != list("abcdefgh")


def test_a_prompt_of_messages_is_given_as_messages() -> None:
    messages = [{"role": "user", "content": "b"}]
    SEEN.clear()
    answers = PairedAnswers(np.array([3]), ["c"], ["dd"], np.ones(1), np.ones(1))
    assert judge_answers(f"{NAME}longest", [json.dumps(messages)], answers, lambda done, total: None).tolist() == [0.0]
    assert SEEN[0][0] == messages  # type: ignore[comparison-overlap]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fails", "failed for row 3: ValueError: no connection"),
        ("undecided", "returned 'A' for row 3: it must return 0 or 1, the place of the better answer, or None"),
        ("NAME", "is of type str: it must be a function of a prompt and two answers"),
        ("absent", "has no 'absent'"),
    ],
)
def test_a_judge_that_fails_is_named_with_the_row(name: str, message: str) -> None:
    answers = PairedAnswers(np.array([3]), ["c"], ["d"], np.ones(1), np.ones(1))
    with pytest.raises(UserError) as refused:
        judge_answers(f"{NAME}{name}", [json.dumps("b")], answers, lambda done, total: None)
    assert "evaluation.judge" in str(refused.value) and message in str(refused.value)
