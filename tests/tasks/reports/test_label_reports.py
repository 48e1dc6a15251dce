"""The suspects of `finetune labels`, as tables and sentences."""

from __future__ import annotations

from tasks.cache.results import Artifact
from tasks.cache.stage import Row
from tasks.prefect.prefect_artifacts import Table, build_result_artifacts
from tasks.reports.label_reports import describe_suspects
from training.evaluation.scores import ErrorShare, SuspectLabels, SuspectRow

FIRST = SuspectRow(row="r0123456789abcdef", text="a|b " * 40, label="neg", suggestion="pos", chance=0.981)
FOUND = SuspectLabels(
    rows=2000, decided=1, suspects=2, share=ErrorShare(low=0.0, expected=0.4, high=1.0), noise=0.001, conflicts=1,
    differing=None, repeats=3, known=1200, first=[FIRST, FIRST.model_copy(update={"chance": None})],
)  # fmt: skip


def test_prefect_has_a_table_of_the_surest_suspects_below_their_share() -> None:
    artifact = Artifact(stage="list_labels", key="k", digest="d", result=FOUND)
    (table,) = build_result_artifacts(Row("list_labels", "k", "ran", 1.0), artifact).values()
    assert isinstance(table, Table) and table.description.startswith(
        "2 of 2,000 labels are suspects, 40% of them wrong"
    )
    assert [row["wrong"] for row in table.rows] == ["98%", ""] and len(table.rows[0]["text"]) == 60
    assert table.cells()[0]["text"].startswith("a\\|b")


def test_a_list_that_may_hold_no_error_says_so() -> None:
    lines = list(describe_suspects({"recipe": "mine", **FOUND.model_dump()}))
    assert lines[0] == "mine: 2 of 2,000 labels are suspects, 40% of them wrong (0% to 100%)."
    assert lines[1].startswith("The list may hold no error") and "1 row of train is decided already." in lines
    numbers = FOUND.model_copy(update={"share": None, "known": None, "differing": 4})
    assert [*describe_suspects({"recipe": "mine", **numbers.model_dump()})][1:] == [
        "How many of them are wrong is unknown: the right numbers have outliers, too.",
        "4 rows with another label in the other source.",
        "1 text with different labels in different rows.",
        "Rows that teach little: 3 repeat a text with its label.",
        "1 row of train is decided already.",
    ]
