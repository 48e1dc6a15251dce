"""What stages hand to each other: small frozen values, never the data itself."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from tasks.cache import settings

# What is not a number is null in JSON.
Number = Annotated[
    float,
    BeforeValidator(lambda value: math.nan if value is None else value),
    PlainSerializer(lambda value: value if math.isfinite(value) else None, when_used="json"),
]


class Ref(BaseModel):
    """A finished artifact."""

    model_config = ConfigDict(frozen=True)

    stage: str
    """The stage that made it."""
    key: str
    """Digest of the inputs: its name in the store."""
    digest: str
    """Digest of the content, files under `log/` apart: equal digests are equal bytes."""
    parts: dict[str, str] = Field(default_factory=dict)
    """Digest of each top-level file or folder of the content."""
    figures: dict[str, Any] = Field(default_factory=dict)
    """A few numbers worth showing."""

    @property
    def location(self) -> str:
        """The artifact's folder, relative to the home."""
        return f"artifacts/{self.stage}/{self.key}"

    @property
    def path(self) -> Path:
        """The artifact's folder, absolute."""
        return settings.home() / self.location


def baseline_upstream(splits: Iterable[str], data: Ref, tokens: Ref, trained: Ref) -> dict[str, str | None]:
    """Digests of all that a kind may make the baseline of these splits from."""
    return {
        "load_data/train": data.parts.get("train.arrow"),
        **{f"tokenize/{split}": tokens.parts.get(f"{split}.arrow") for split in ("train", *splits)},
        "fit": trained.parts.get("model"),
    }


class PinnedFile(BaseModel):
    """A file, pinned by content."""

    model_config = ConfigDict(frozen=True)

    path: str
    """Its path, absolute, or its URL."""
    sha256: str
    size_bytes: int | None = None
    """None where the file system of a URL does not tell."""


class PinnedCommit(BaseModel):
    """A repository of the Hub, pinned to a commit."""

    model_config = ConfigDict(frozen=True)

    name: str
    """What the commit is the commit of: `owner/name@revision`."""
    commit: str


class Champion(BaseModel):
    """The version that a new model is compared with, or that its training starts from."""

    model_config = ConfigDict(frozen=True)

    name: str
    """Of the registered model."""
    version: str
    model: str
    """Digest of its folder: weights, configuration and tokenizer; of one that was registered by other means, which
    version of which registry it is, and since when."""
    key: str | None = None
    """The artifact of `fit` that it came from, which may still be in the store."""
    max_length: int
    """Tokens after which it cuts a text."""
    options: dict[str, Any] | None = None
    """Its kind's, as its recipe set them; None where its version does not tell, or is of another kind."""

    def __str__(self) -> str:
        return f"{self.name}/{self.version}"


class Counted(BaseModel):
    """A comparison among all on the same test rows."""

    model_config = ConfigDict(frozen=True)

    comparison: int
    """Its number, from 1."""
    confidence: float
    """The confidence that it takes, so that all of them together keep that of the recipe."""


class Lock(BaseModel):
    """What the recipe's names meant when the run began."""

    model_config = ConfigDict(frozen=True)

    data_hub: PinnedCommit | None = None
    data_files: dict[str, list[PinnedFile]] = Field(default_factory=dict)
    """Split to its files, in reading order."""
    data_fingerprint: str | None = None
    """What a Python callable's own `fingerprint()` said."""
    rows: str | None = None
    """Digest of the rows that a model learns from, and of how they are read."""
    model_hub: PinnedCommit | None = None
    model_files: dict[str, PinnedFile] = Field(default_factory=dict)
    """Name inside the model folder to its file; of a model that is not in a folder here, what is laid over it."""
    started_from: Champion | None = None
    """The registered version that training starts from; None: the base model."""
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    num_processes: int = 1
    num_machines: int = 1
    notes: list[str] = Field(default_factory=list)
    """What the user should know of how the names were resolved, such as an offline pin."""
    unreachable: list[str] = Field(default_factory=list)
    """Repositories of the Hub that could not be looked up: the commit of the last run stands in."""


class Check(BaseModel):
    """One figure held against what it must reach, or must not pass."""

    model_config = ConfigDict(frozen=True)

    figure: str
    """`split.metric`, and of a group of rows `split.slice=group.metric`."""
    value: Number
    minimum: float | None = None
    maximum: float | None = None
    group: str | None = None
    """`slice=group`, for a floor; None where all rows of the split are judged."""
    rows: int | None = None
    """Of the group."""

    @property
    def held(self) -> bool:
        """Whether the figure keeps to its bounds; what is not a number keeps to none."""
        least = -math.inf if self.minimum is None else self.minimum
        most = math.inf if self.maximum is None else self.maximum
        return least <= self.value <= most

    @property
    def told(self) -> str:
        """`0.71 < 0.75`"""
        sign, bound = ("≥", self.minimum) if self.minimum is not None else ("≤", self.maximum)
        if not self.held:
            sign = {"≥": "<", "≤": ">"}[sign]
        return f"{self.value:.4g} {sign} {bound:g}"

    def __str__(self) -> str:
        return f"{self.figure} {self.told}"


class Comparison(BaseModel):
    """A model beside the champion, on the same rows; beside the baseline where there is no champion."""

    model_config = ConfigDict(frozen=True)

    champion: str
    """`name/version`, or the constant answer in words."""
    baseline: bool = False
    """Whether the model is compared with the best constant answer."""
    metric: str
    split: str
    rows: int
    value: Number
    """The new model's figure."""
    champion_value: Number
    gained: int
    """Rows that only the new model gets right."""
    lost: int
    """Rows that only the champion gets right."""
    gain: Number
    """How much better the new model is, in the metric's unit; for metrics of which less is better, how much less."""
    at_least: Number
    """The gain that it has at the confidence asked for: the lower end of a one-sided interval."""
    margin: float
    confidence: float
    method: Literal["mcnemar", "permutation", "bootstrap"]
    """The test: training.evaluation.significance has them. A permutation test also needs the bootstrap's interval
    above the margin."""
    p_value: Number
    """How likely a gain like this would be by chance, were the true one no more than the margin."""
    least_p_value: float = 0.0
    """Smallest p-value that the test can give: it draws a limited number of permutations."""
    better: bool
    comparison: int | None = None
    """Its number among all comparisons on the same rows; None where each comparison stands alone."""
    warnings: list[str] = Field(default_factory=list)
    """What makes the two less comparable."""


class Verdict(BaseModel):
    """The decision of the gate, with the figures behind it."""

    model_config = ConfigDict(frozen=True)

    decision: Literal["promote", "keep", "reject"]
    """promote: registered, and the new champion. keep: registered as challenger, the champion stays. reject: nothing
    is registered."""
    reason: str
    """One sentence for whoever decides."""
    checks: list[Check] = Field(default_factory=list)
    comparison: Comparison | None = None
    warnings: list[str] = Field(default_factory=list)

    @property
    def own_warnings(self) -> list[str]:
        """The warnings about the model itself: those of the comparison change with the champion."""
        compared = self.comparison.warnings if self.comparison else []
        return [warning for warning in self.warnings if warning not in compared]


class Version(BaseModel):
    """A version in the model registry."""

    model_config = ConfigDict(frozen=True)

    name: str
    version: str
    taken: str | None = None
    """How a person took the champion's alias from it: then no run publishes it or gives the alias back."""


class Promotion(BaseModel):
    """The alias that a version has got."""

    model_config = ConfigDict(frozen=True)

    name: str
    version: str
    alias: str
    previous: str | None = None
    """The version that had it before."""


class Publication(BaseModel):
    """Where a model lies on the Hugging Face Hub."""

    model_config = ConfigDict(frozen=True)

    repo: str
    revision: str
    """The branch, or `refs/pr/N` of a pull request."""
    commit: str
    url: str
    """Of the branch or the pull request."""
