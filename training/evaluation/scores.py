"""The scores of a model, and its comparisons with another model and with its exports: as programs write them and gate,
reports and registry read them. Imports nothing heavy."""

from __future__ import annotations

import math
from typing import Annotated, Literal, NotRequired

from pydantic import BeforeValidator, Field, PlainSerializer
from typing_extensions import TypedDict

from training.jobs.protocol import Result

# JSON has no NaN: it is written as null.
Number = Annotated[
    float,
    BeforeValidator(lambda value: math.nan if value is None else value),
    PlainSerializer(lambda value: value if math.isfinite(value) else None, when_used="json"),
]


class Score(TypedDict):
    """The value of a metric on some rows, with its 95 % interval. Each number is null if it is undefined."""

    value: float | None
    low: NotRequired[float | None]
    high: NotRequired[float | None]
    baseline: NotRequired[float | None]
    """The value of the best rival, such as a constant prediction; only of all rows of a split, if the task type has a
    baseline."""


Scores = dict[str, Score]
"""By metric."""
SplitScores = dict[str, Scores]
"""By split."""


class SliceGroup(TypedDict):
    """A group of a slice."""

    group: str
    """Its name."""
    rows: int
    metrics: Scores


class AnswerMetric(Result):
    """A metric of the answers of a model and of its opponent to the same prompts."""

    metric: str
    opponent: str
    """`name/version`, or `the base model`."""
    value: Number
    champion_value: Number
    low: Number
    """Lower end of the 95 % interval of the difference, value minus champion_value."""
    high: Number
    rows: int
    """The prompts."""


class WrongRow(Result):
    """A row that a model must have right, and has wrong."""

    row: int
    text: str
    label: str
    prediction: str
    reason: str
    """Empty for a row without one."""


class HeldRows(Result):
    """The rows of release.gate.must_hold: those with a reason, and the others."""

    named: int
    named_wrong: int
    others: int
    others_wrong: int
    wrong: list[WrongRow]
    """Some that are wrong, those with a reason first."""


class ErrorShare(Result):
    """The share of listed rows that have a wrong label, with its 95 % interval."""

    low: float
    expected: float
    high: float


class SuspectRow(Result):
    """A row whose label is probably wrong, or is not the label of an equal row."""

    row: str
    """Its name in data.corrections."""
    text: str
    label: str
    suggestion: str
    """The label that is likelier, in the form of the column `decision`."""
    chance: float | None
    """That the label is wrong; None if it is unknown."""


class SuspectLabels(Result):
    """The rows of train whose labels deserve a look."""

    rows: int
    """Of train, without those that people have decided on."""
    decided: int
    """Rows of train that people have decided on."""
    suspects: int
    """Rows whose label is probably wrong; equal rows count once."""
    share: ErrorShare | None
    """Of the suspects; None for numbers, and without suspects."""
    noise: float | None
    """The expected share of wrong labels among all rows, of several labels a row among all labels, of tags among all
    words; None for numbers."""
    conflicts: int
    """Texts that have different labels in different rows."""
    differing: int | None
    """Rows that the other source labels otherwise; None without another source."""
    repeats: int
    """Rows with the same text and label as an earlier row."""
    known: int | None
    """Other rows whose label is certain to a model that has not seen them: they teach little. None for numbers."""
    first: list[SuspectRow]
    """The surest suspects."""


class FlippedRow(Result):
    """A row that the champion has right and the new model has wrong."""

    row: int
    text: str
    label: str
    prediction: str
    """Of the new model."""


class NegativeFlips(Result):
    """The rows that the champion has right and the new model has wrong (Yan et al., 2021)."""

    rows: int
    share: float
    at_most: float
    """Upper end of the share's one-sided interval at the comparison's confidence."""
    max_share: float
    needs: int
    """The rows on which a model without any flip has this bound; with groups, their number."""
    worst: list[FlippedRow] = Field(default_factory=list)
    """Some of them, those with the largest change first."""

    @property
    def few_enough(self) -> bool:
        """Whether a larger share than max_share is ruled out."""
        return self.at_most <= self.max_share


class Comparison(Result):
    """A model compared with the champion, or without one with the baseline, on the same rows."""

    champion: str
    """`name/version`, or a description of the baseline, such as a constant answer."""
    baseline: bool = False
    """Whether the comparison is with the baseline."""
    is_constant: bool = False
    """Whether the baseline is one prediction for every row; False in artifacts of before that was stored."""
    metric: str
    split: str
    rows: int
    unit: Literal["rows", "queries"] = "rows"
    """What `rows` counts: a query may have several rows of the data."""
    groups: int | None = None
    """The number of groups of the rows; None if each row is one of its own."""
    design_effect: float | None = None
    """How many times fewer rows would tell as much about the gain in accuracy if they had no groups (Kish, 1965); None
    without groups, by another metric, or if all rows gain alike."""
    value: Number
    """The new model's metric."""
    champion_value: Number
    gained: int
    """Rows that only the new model gets right."""
    lost: int
    """Rows that only the champion gets right."""
    gain: Number
    """How much better the new model is, in the metric's unit; for metrics of which less is better, how much less."""
    at_least: Number
    """Lower end of the gain's one-sided interval at the confidence."""
    margin: float
    confidence: float
    method: Literal["mcnemar", "permutation", "bootstrap", "sign", "gaffke"]
    """The test: training.evaluation.significance has them, and group_tests that of Gaffke. A permutation test also
    needs the bootstrap's interval above the margin."""
    p_value: Number
    """Probability of a gain like this by chance if the true gain is at most the margin."""
    least_p_value: float = 0.0
    """Smallest p-value that the test can give: it draws a limited number of permutations."""
    better: bool
    comparison: int | None = None
    """Its number among all comparisons on the same rows; None if the confidence covers each comparison by itself."""
    flips: NegativeFlips | None = None
    """None without a champion, or without a bound in the recipe."""
    warnings: list[str] = Field(default_factory=list)
    """Reasons why the two models are less comparable."""
    answers: list[AnswerMetric] = Field(default_factory=list)
    """Metrics of answers to prompts."""


class SizeAndSpeed(Result):
    """The size of a model, and its speed on one CPU."""

    parameters: int
    bytes: int
    """Of the weights on disk."""
    rows_per_second: float


class ComparedTeacher(Result):
    """A model beside the teacher that it has learned from, on the same rows."""

    student: SizeAndSpeed
    teacher: SizeAndSpeed
    figures: dict[str, tuple[Number, Number]]
    """The values of the model and of the teacher by metric."""
    comparison: Comparison
    """With the teacher in place of the champion."""


class VariantGain(Result):
    """The gain of a sweep's variant over the recipe, over several seeds, on the validation split."""

    variant: str
    metric: str
    values: list[Number]
    """Of the variant, by seed."""
    recipe_values: list[Number]
    """Of the recipe, by seed."""
    rows: int
    groups: int | None
    """The groups of the rows; None if they have none."""
    gain: Number
    """The mean over the seeds; positive if the variant is better."""
    low: Number
    """Lower end of the gain's 95 % interval, with seeds and rows as random."""
    high: Number
    other_seed: Number
    """How much two trainings of one setting usually differ by their seeds: the root of twice the variance."""
    answer: Literal["variant", "seed", "unknown"]
    """variant: its settings make it better or worse. seed: they change less than another seed does. unknown: the seeds
    or rows are too few to tell."""
    needed_seeds: int | None
    """The seeds that would tell a gain of this size; None if the rows are too few for that."""


class ComparedExport(Result):
    """An export compared with its model on the same rows."""

    bytes: int
    runtime: str = "ONNX Runtime"
    """The program that computed the predictions of the export."""
    rows_per_second: float | None
    """None if its weights were computed in torch, whose speed is not that of the program that will read the export."""
    torch_rows_per_second: float
    """Of the model, on the CPU and the same rows."""
    tokens_per_row: float | None = None
    """Of the rows that were timed; None if the model generates no texts."""
    torch_precision: str
    """no, bf16 or fp16."""
    released: bool
    """Whether the export is not inferior, and its tokenizer reads texts as the model's."""
    other_tokens: int | None = None
    """Rows that the runtime's tokenizer reads otherwise than the model's, of TIMED_ROWS; None if it has none."""
    metrics: dict[str, Number] = Field(default_factory=dict)
    """The export's metrics on the rows of the comparison, without those of generated answers."""
    model_metrics: dict[str, Number] = Field(default_factory=dict)
    """The same of the model."""
    comparison: Comparison
    """With the model in place of the champion."""
