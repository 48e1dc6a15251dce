"""Whether a model has earned its promotion."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flows.reports.tables import verdict_lines
from tasks.cache.results import Artifact, Comparison, Verdict
from tasks.cache.stage import Work
from tasks.reports.model_reports import describe_verdict, tabulate_checks
from tasks.stages.gate import gate
from tasks.tracking.run_tracker import format_check_name
from tests.arrow import group
from tests.made import COMPARISON
from tests.raised import raised_problems
from training.evaluation.scores import FlippedRow, HeldRows, NegativeFlips, WrongRow
from training.recipe import parse

GENRES = [
    group("war", 300, accuracy=0.9, f1=0.8, log_loss=0.2, precision=None),
    group("noir", 60, accuracy=0.7, f1=0.6, log_loss=0.5, precision=None),
    group("horror", 120, accuracy=0.5, f1=0.5, log_loss=0.9, precision=None),
    group("essay", 9, accuracy=0.1, f1=0.1, log_loss=2.0, precision=None),
    group("a.b=c", 4, accuracy=0.2, f1=0.2, log_loss=2.0, precision=None),
]
VALUES = {"accuracy": 0.8, "f1": 0.7, "log_loss": 0.4, "precision": float("nan")}
BETTER = COMPARISON.model_copy(
    update={"warnings": ["small/1 does not know the label new: it gets no row of these right."]}
)


@pytest.fixture(autouse=True)
def _somewhere(home: Path) -> None:
    """A home for the scores."""


def judge(
    bounds: dict[str, Any],
    comparison: Comparison | None = None,
    groups: list[dict[str, Any]] = GENRES,
    slices: Sequence[str] = (),
    held: HeldRows | None = None,
) -> Verdict:
    """The verdict on a model with these groups of genre, and of whatever other slice."""
    recipe = parse(
        {
            "name": "test",
            "task": "sequence-classification",
            "data": {"source": "csv", "path": "rows", "text": ["text"], "label": "label"},
            "model": {"source": "hub", "path": "me/model"},
            "evaluation": {"metrics": ["accuracy", "f1", "log_loss", "precision"], "slices": ["genre", *slices]},
            "release": {"gate": bounds},
        }
    )
    figures = {"validation": {name: {"value": value, "low": None, "high": None} for name, value in VALUES.items()}}
    scores = Artifact(stage="score", key="k", digest="d", result=figures)
    scores.path.mkdir(parents=True, exist_ok=True)
    (scores.path / "slices.json").write_text(json.dumps({"validation": dict.fromkeys(["genre", *slices], groups)}))
    compared = Artifact(stage="compare", key="k", digest="d", result=comparison) if comparison else None
    found = Artifact(stage="must_hold", key="k", digest="d", result=held) if held else None
    verdict = gate.make(Work("k", Path(), "run"), recipe, scores, compared, None, found)
    assert isinstance(verdict, Verdict)
    return verdict


@pytest.mark.parametrize(
    ("bounds", "missed"),
    [
        ({}, []),
        ({"minimum": {"accuracy": 0.8}}, []),
        ({"minimum": {"accuracy": 0.81}}, ["accuracy 0.8 < 0.81"]),
        ({"minimum": {"accuracy": 0.5, "f1": 0.9}}, ["f1 0.7 < 0.9"]),
        ({"minimum": {"f1": 0.0}, "maximum": {"log_loss": 0.4}}, []),
        ({"maximum": {"log_loss": 0.39}}, ["log_loss 0.4 > 0.39"]),
    ],
)
def test_a_model_is_rejected_when_it_misses_a_bound_and_each_is_named(
    bounds: dict[str, Any], missed: list[str]
) -> None:
    verdict = judge(bounds)
    assert verdict.decision == ("reject" if missed else "promote")
    assert all(f"validation.{figure}" in verdict.reason for figure in missed)
    assert [str(check) for check in verdict.checks if not check.passed] == [f"validation.{figure}" for figure in missed]


FACTS = "accuracy 0.8710 against 0.8603 of small/1 on the same 1,872 rows of test: 52 rows better, 32 worse; "
MEANINGS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "promote", "that is better by at least 0.0021 at 95% confidence."),
    ({"better": False, "p_value": 0.3}, "keep", "that it is better may be chance (p = 0.3)."),
    ({"better": False, "gain": 0.0}, "keep", "that is not better."),
    ({"better": False, "margin": 0.01}, "keep", "that it is better by more than 0.01 may be chance (p = 0.019)."),
    ({"better": False, "margin": 0.02}, "keep", "that is not better by more than 0.02."),
    ({"margin": -0.01, "at_least": -0.004}, "promote", "that is worse by at most 0.0040 at 95% confidence."),
    ({"better": False, "margin": -0.01}, "keep", "it may be worse by more than 0.01 (p = 0.019)."),
    ({"better": False, "margin": -0.01, "gain": -0.02}, "keep", "that is worse by more than 0.01."),
    ({"better": False, "gain": float("nan")}, "keep", "one of these is no number, so nothing shows that it is better."),
]


@pytest.mark.parametrize(("found", "decision", "meaning"), MEANINGS)
def test_a_model_is_promoted_or_kept_for_a_reason_in_one_sentence(
    found: dict[str, Any], decision: str, meaning: str
) -> None:
    verdict = judge({}, BETTER.model_copy(update=found))
    assert (verdict.decision, verdict.reason) == (decision, FACTS + meaning)


def test_a_comparison_among_others_on_the_same_rows_is_named_with_what_it_takes() -> None:
    third = BETTER.model_copy(update={"comparison": 3, "confidence": 1 - 0.0038})
    assert judge({}, third).reason.endswith("at 99.62% confidence (comparison 3 on these rows).")
    found = judge({}, third.model_copy(update={"better": False}))
    assert found.reason.endswith(
        "that it is better may be chance (p = 0.019; comparison 3 on these rows takes 0.0038)."
    )


def test_a_comparison_that_no_gain_could_pass_is_reported() -> None:
    late = BETTER.model_copy(update={"better": False, "comparison": 46, "confidence": 1 - 4e-5, "p_value": 5e-5})
    stuck = late.model_copy(update={"least_p_value": 5e-5})
    assert judge({}, stuck).reason == (
        f"{FACTS}comparison 46 on these rows needs more permutations than are drawn: judge by rows of which none was "
        "judged before, or compare by accuracy if the task has it."
    )
    assert "may be chance" in judge({}, late.model_copy(update={"least_p_value": 3e-5})).reason


WORST = FlippedRow(row=7, text="'not bad'", label="'good'", prediction="'bad'")
FLIPS = NegativeFlips(rows=32, share=0.0171, at_most=0.023, max_share=0.02, needs=149, worst=[WORST])


def test_a_better_model_with_too_many_flips_is_kept_and_the_verdict_lists_the_worst() -> None:
    verdict = judge({}, BETTER.model_copy(update={"flips": FLIPS}))
    assert (verdict.decision, verdict.reason) == (
        "keep",
        f"{FACTS}that is better by at least 0.0021 at 95% confidence. But it has 32 rows wrong that small/1 has right, "
        "a share of 0.0171 that may be 0.0230 at 95% confidence, more than release.gate.flips.max_share, 0.02.",
    )
    assert "            7  'not bad'  'good'  'bad'" in verdict_lines(verdict)
    assert "not bad" in describe_verdict(verdict)
    few = FLIPS.model_copy(update={"at_most": 0.02})
    assert judge({}, BETTER.model_copy(update={"flips": few})).decision == "promote"
    chance = BETTER.model_copy(update={"flips": few, "better": False, "p_value": 0.3})
    assert judge({}, chance).decision == "keep"


def test_the_rows_that_a_bound_of_flips_takes_are_named_if_there_are_fewer() -> None:
    needy = FLIPS.model_copy(update={"needs": 2000})
    assert judge({}, BETTER.model_copy(update={"flips": needy})).reason.endswith(
        "0.02, which takes 2,000 rows without any flip: add 128 more to test."
    )


MUST_HOLD = {"must_hold": {"path": "must-hold.csv", "min_share": 0.98}}


def test_a_model_that_has_a_row_wrong_that_must_hold_is_rejected_with_its_text_and_reason() -> None:
    wrong = WrongRow(row=4, text="'not bad'", label="'good'", prediction="'bad'", reason="a court said so.")
    other = wrong.model_copy(update={"row": 9, "reason": ""})
    held = HeldRows(named=12, named_wrong=1, others=100, others_wrong=2, wrong=[wrong, other])
    verdict = judge(MUST_HOLD, BETTER, held=held)
    assert (verdict.decision, verdict.reason) == (
        "reject",
        "of 12 rows that must hold, it has 1 wrong: 'not bad' is 'bad' and must be 'good': a court said so.",
    )
    assert str(verdict.checks[-1]) == "must_hold.share 0.98 ≥ 0.98"
    assert "          4  'not bad'  'good'  'bad'       a court said so." in verdict_lines(verdict)
    assert format_check_name(verdict.checks[-1]) == "must_hold/share"
    many = held.model_copy(update={"named_wrong": 40, "wrong": [wrong] * 11})
    assert judge(MUST_HOLD, BETTER, held=many).reason.endswith("; and 30 more.")


def test_a_share_of_the_rows_without_a_reason_must_be_right() -> None:
    held = HeldRows(named=0, named_wrong=0, others=100, others_wrong=3, wrong=[])
    assert judge(MUST_HOLD, BETTER, held=held).reason == "it misses must_hold.share 0.97 < 0.98."
    assert judge(MUST_HOLD, BETTER, held=held.model_copy(update={"others_wrong": 2})).decision == "promote"
    assert judge(MUST_HOLD, BETTER, held=held.model_copy(update={"others": 0, "others_wrong": 0})).checks == []


def test_a_figure_without_a_value_on_most_draws_is_named() -> None:
    found = judge({}, BETTER.model_copy(update={"better": False, "p_value": 1.0, "at_least": float("nan")}))
    assert found.reason.endswith(
        "accuracy has no value on most draws of these rows, so nothing shows that it is better."
    )


def test_a_better_model_is_kept_where_rows_are_too_few_and_the_reason_names_how_many_more() -> None:
    few = BETTER.model_copy(update={"rows": 12})
    verdict = judge({}, few)
    assert verdict.decision == "keep" and verdict.reason.endswith(
        "at 95% confidence, on fewer rows than release.gate.min_rows, 20: add 8 more to test."
    )
    assert judge({"min_rows": 12}, few).decision == "promote"
    in_groups = BETTER.model_copy(update={"rows": 120, "groups": 12})
    assert judge({}, in_groups).reason.endswith("on fewer groups than release.gate.min_rows, 20: add 8 more to test.")


def test_a_first_model_that_may_be_no_better_than_the_baseline_is_kept_with_that_reason() -> None:
    rival = {"champion": "the constant answer 'bad'", "baseline": True, "is_constant": True}
    comparison = BETTER.model_copy(update=rival)
    assert judge({}, comparison).decision == "promote"
    chance = comparison.model_copy(update={"better": False, "p_value": 0.3})
    verdict = judge({}, chance)
    assert (verdict.decision, verdict.reason) == (
        "keep",
        "without a champion to be compared with, it must be better than one answer for every row: "
        "accuracy 0.8710 against 0.8603 of the constant answer 'bad' on the same 1,872 rows of test: "
        "52 rows better, 32 worse; that it is better may be chance (p = 0.3).",
    )
    unbeatable = judge({}, chance.model_copy(update={"metric": "recall", "champion_value": 1.0, "gain": -0.1}))
    assert unbeatable.reason.endswith(
        "No model can be better than that by recall: set release.gate.compare to another metric, or "
        "release.gate.baseline to false."
    )
    calibrated = judge({}, chance.model_copy(update={"metric": "calibration_error", "champion_value": 0.01}))
    assert calibrated.reason.endswith(
        "Hardly any model is better than that by calibration_error: set release.gate.compare to another metric, or "
        "release.gate.baseline to false."
    )
    assert judge({"baseline": False}).decision == "promote"


def test_a_first_model_that_is_kept_behind_bm25_is_told_so_and_queries_are_counted() -> None:
    figures = {"metric": "ndcg_at_10", "champion": "BM25", "baseline": True, "unit": "queries"}
    kept = judge({}, BETTER.model_copy(update={**figures, "better": False, "p_value": 0.3}))
    assert kept.reason.startswith(
        "without a champion to be compared with, it must be better than BM25: ndcg_at_10 0.8710"
    )
    assert "of BM25 on the same 1,872 queries of test: 52 queries better, 32 worse" in kept.reason
    few = judge({}, BETTER.model_copy(update={**figures, "rows": 12}))
    assert few.reason.endswith("on fewer queries than release.gate.min_rows, 20: add 8 more to test.")


def test_a_figure_without_a_value_reaches_no_bound_and_is_reported() -> None:
    verdict = judge({"minimum": {"precision": 0.0, "f1": 0.9}, **floors(war={"precision": 0.0})})
    assert verdict.decision == "reject" and verdict.reason == (
        "it misses validation.f1 0.7 < 0.9; "
        "validation.precision has no value: docs/reference/metrics.md says when it has none; "
        "precision has no value where genre=war, on 300 rows of validation: set a floor of another metric there."
    )
    assert [row["value"] for row in tabulate_checks(verdict)] == ["-", "0.7000", "-"]


def test_a_better_model_that_misses_a_bound_is_rejected_with_the_comparison_as_evidence() -> None:
    verdict = judge({"minimum": {"accuracy": 0.9}}, BETTER)
    assert (verdict.decision, verdict.comparison) == ("reject", BETTER)


def test_a_split_that_also_chose_the_checkpoint_is_warned_of() -> None:
    (warning,) = judge({}).warnings
    assert warning.startswith("validation also chose the checkpoint")


def test_the_verdict_counts_the_groups_of_the_compared_rows_and_those_that_a_bound_of_flips_takes() -> None:
    in_groups = BETTER.model_copy(update={"groups": 190, "method": "gaffke"})
    assert "on the same 1,872 rows of test in 190 groups: 52 rows better" in judge({}, in_groups).reason
    needy = FLIPS.model_copy(update={"needs": 200})
    assert judge({}, in_groups.model_copy(update={"flips": needy})).reason.endswith(
        "0.02, which takes 200 groups without any flip: add 10 more to test."
    )


def test_warnings_of_the_comparison_are_warnings_of_the_verdict() -> None:
    assert BETTER.warnings[0] in judge({}, BETTER).warnings


def floors(**limits: dict[str, float]) -> dict[str, Any]:
    """`genre` for each group, and one group by its name."""
    return {"floors": {name if name == "genre" else f"genre={name}": limit for name, limit in limits.items()}}


def test_a_group_below_its_floor_rejects_and_the_reason_has_its_name_its_distance_and_its_rows() -> None:
    verdict = judge({**floors(genre={"accuracy": 0.75}), "minimum": {"accuracy": 0.85}}, BETTER)
    assert verdict.decision == "reject"
    assert verdict.reason == (
        "it misses validation.accuracy 0.8 < 0.85; "
        "it is too poor where genre=horror: accuracy 0.5 < 0.75 on 120 rows of validation; "
        "it is too poor where genre=noir: accuracy 0.7 < 0.75 on 60 rows of validation."
    )
    found = {check.figure: (check.value, check.minimum, check.passed) for check in verdict.checks}
    assert found == {
        "validation.accuracy": (0.8, 0.85, False),
        "validation.genre=war.accuracy": (0.9, 0.75, True),
        "validation.genre=horror.accuracy": (0.5, 0.75, False),
        "validation.genre=noir.accuracy": (0.7, 0.75, False),
    }
    shown = [(row["figure"].split("=")[-1], row["held"]) for row in tabulate_checks(verdict)[1:]]
    assert shown == [("noir.accuracy", "no"), ("horror.accuracy", "no"), ("war.accuracy", "yes")]
    assert judge(floors(genre={"accuracy": 0.5})).decision == "promote"


def test_few_rows_are_judged_by_a_floor_of_their_own_alone_and_that_is_warned_of() -> None:
    each = judge(floors(genre={"f1": 0.3}))
    assert each.decision == "promote" and len(each.checks) == 3
    assert each.warnings[1:] == ["the floor for each genre does not judge groups of fewer than 10 rows: essay, a.b=c."]
    named = judge({"floors": {"genre=a.b=c": {"f1": 0.3}}})
    assert named.reason == "it is too poor where genre=a.b=c: f1 0.2 < 0.3 on 4 rows of validation."
    assert len(named.warnings) == 1
    (check,) = named.checks
    assert format_check_name(check) == "validation/genre:a.b_c_7128f345/f1"


def test_a_floor_of_one_group_stands_in_place_of_that_for_each() -> None:
    verdict = judge(floors(genre={"accuracy": 0.7, "f1": 0.5}, horror={"accuracy": 0.4}))
    assert verdict.decision == "promote" and len(verdict.checks) == 6
    limits = {check.figure: check.minimum for check in verdict.checks}
    assert limits["validation.genre=horror.accuracy"] == 0.4 and limits["validation.genre=horror.f1"] == 0.5


def test_a_floor_that_judges_nothing_rejects_with_that_reason() -> None:
    few = [group("essay", 9, accuracy=1.0), group("poem", 3, accuracy=1.0)]
    verdict = judge(floors(genre={"accuracy": 0.5}), BETTER, few)
    assert (verdict.decision, verdict.checks) == ("reject", [])
    assert verdict.reason == (
        "the floor for each genre judges nothing: no group has 10 rows or more in validation, so set floors for "
        "single groups, such as genre=essay, or remove this floor."
    )
    assert judge(floors(essay={"accuracy": 0.5}), BETTER, few).decision == "promote"


def test_a_slice_that_is_called_like_a_group_of_another_is_no_floor_of_that_group() -> None:
    verdict = judge({"floors": {"genre": {"accuracy": 0.3}, "genre=war": {"accuracy": 0.2}}}, slices=["genre=war"])
    assert {check.figure: check.minimum for check in verdict.checks} == {
        **{f"validation.genre={name}.accuracy": 0.3 for name in ("war", "noir", "horror")},
        **{f"validation.genre=war={name}.accuracy": 0.2 for name in ("war", "noir", "horror")},
    }


def test_a_group_that_does_not_exist_is_reported_with_those_that_do() -> None:
    (problem,) = raised_problems(judge, floors(horor={"accuracy": 0.5}, war={"accuracy": 0.5}))
    assert problem.where == "release.gate.floors.genre=horor"
    assert problem.message == (
        "genre has no group 'horor' in validation: choose from war, noir, horror, essay, a.b=c. Did you mean 'horror'?"
    )


def test_all_groups_with_rows_enough_are_judged_and_of_many_below_their_floor_the_others_are_counted() -> None:
    verdict = judge(
        floors(genre={"f1": 0.5, "accuracy": 0.4}),
        groups=[group(f"g{n}", 99 - n, f1=n / 100, accuracy=0.3) for n in range(60)],
    )
    assert verdict.reason.count("too poor where") == 10
    assert verdict.reason.endswith("; and 100 more figures of groups miss their floor.")
    assert "where genre=g0: f1 0 < 0.5 on 99 rows" in verdict.reason
    assert len(verdict.checks) == 120 and len(verdict.warnings) == 1
    shown = verdict_lines(verdict)
    assert len(shown) == 2 + 1 + 20 + 1 + 1 and shown[23] == "  … and 100 more"
