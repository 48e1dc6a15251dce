"""Values that stages pass to each other: small and frozen, never the data itself."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, cast

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, StringConstraints
from typing_extensions import TypeVar

from tasks.home import home
from training.data.ipc_files import read_labels
from training.evaluation.scores import ComparedExport as ComparedExport
from training.evaluation.scores import Comparison as Comparison
from training.evaluation.scores import HeldRows as HeldRows
from training.evaluation.scores import Number
from training.evaluation.stored_calibration import CalibrateResult as CalibrateResult

Result = TypeVar("Result", default=Any)

Name = Annotated[str, StringConstraints(pattern=r"^[0-9A-Za-z][0-9A-Za-z_-]*$")]
"""A key, the id of a run or the name of a recipe: it is a folder's name in the home. A registry may give any text."""
FileName = Annotated[str, StringConstraints(pattern=r"^[^/\\\x00-\x1f.][^/\\\x00-\x1f]*$")]
"""The name of a file in the folder of a model."""


class Artifact(BaseModel, Generic[Result]):
    """A finished artifact."""

    model_config = ConfigDict(frozen=True)

    stage: str
    key: str
    """Digest of the inputs: the artifact's name in the store."""
    digest: str
    """Digest of the content without `log/`: equal digests are equal bytes."""
    parts: dict[str, str] = Field(default_factory=dict)
    """Digest of each top-level file or folder of the content."""
    result: Result = Field(cast("Result", None), validation_alias=AliasChoices("result", "figures"))
    """The result of the stage's program or function: JSON values as stored, or what `Stage.open` has parsed. Earlier
    versions of this project stored it as `figures`."""

    @property
    def location(self) -> str:
        """The artifact's folder, relative to the home."""
        return f"artifacts/{self.stage}/{self.key}"

    @property
    def path(self) -> Path:
        """The artifact's folder, absolute."""
        return home() / self.location


def label_names(data: Artifact) -> list[str]:
    """Reads the names of the labels in an artifact of load_data, in the order of their indices."""
    return read_labels(data.path)


def by_stage(artifacts: Iterable[Artifact | None]) -> dict[str, Artifact]:
    """The artifacts by the stage that made them."""
    return {artifact.stage: artifact for artifact in artifacts if artifact is not None}


class PinnedFile(BaseModel):
    """A file, pinned by content."""

    model_config = ConfigDict(frozen=True)

    path: str
    """Absolute path or URL."""
    sha256: str
    size_bytes: int | None = None
    """None if the file system of a URL does not report it."""


class PinnedCommit(BaseModel):
    """A repository of the Hub, pinned to a commit."""

    model_config = ConfigDict(frozen=True)

    name: str
    """`owner/name@revision`"""
    commit: str


class PinnedVersion(BaseModel):
    """A registered version as a run uses it: the champion, the start of a training, or a model that predicts."""

    model_config = ConfigDict(frozen=True)

    name: str
    """The registered model."""
    version: str
    model: str
    """Digest of its folder: weights, configuration and tokenizer. For a version that this project did not register:
    registry, version and creation time."""
    key: Name | None = None
    """Its artifact of `fit`, which the store may still have."""
    max_length: int
    """Tokens after which a text is cut."""
    options: dict[str, Any] | None = None
    """The options of its task type; None if the version does not record them, or has another task type."""
    folder: Path | None = Field(default=None, exclude=True)
    """Its files, in a reproduction: the registry there lacks the version."""

    def __str__(self) -> str:
        return f"{self.name}/{self.version}"


class VersionOfTask(PinnedVersion):
    """A registered version that does other work than training starts with, such as a teacher, with its own task type
    and options."""

    task: str
    load_data: Name | None = None
    """Of a teacher: the artifact of load_data with the rows that it was trained on, which the store may still have."""
    calibration: dict[str, Any] | None = None
    """Of a teacher whose thresholds choose rows without labels: training.evaluation.stored_calibration.Calibration."""


class NumberedComparison(BaseModel):
    """The number of a comparison among all on the same test rows."""

    model_config = ConfigDict(frozen=True)

    comparison: int
    """From 1."""
    confidence: float
    """The confidence that this comparison needs, so that all of them together keep the recipe's."""


class PinnedRows(BaseModel):
    """One set of rows, pinned by content."""

    model_config = ConfigDict(frozen=True)

    hub: PinnedCommit | None = None
    files: dict[str, list[PinnedFile]] = Field(default_factory=dict)
    """By split, in reading order."""
    fingerprint: str | None = None
    """Returned by the `fingerprint()` of a Python callable."""
    images: PinnedFile | None = None
    """The folder from which paths of images start, with the digest of the images in it."""


class Lock(BaseModel):
    """The content behind the recipe's names when the run began."""

    model_config = ConfigDict(frozen=True)

    data_hub: PinnedCommit | None = None
    data_files: dict[str, list[PinnedFile]] = Field(default_factory=dict)
    """By split, in reading order."""
    data_fingerprint: str | None = None
    """Returned by the `fingerprint()` of a Python callable."""
    data_images: PinnedFile | None = None
    """The folder from which paths of images start."""
    data_sets: dict[str, PinnedRows] = Field(default_factory=dict)
    """The sets of a mixture by name; the four fields above are empty then."""
    corrections: PinnedFile | None = None
    """The file of data.corrections."""
    corpus: list[PinnedFile] = Field(default_factory=list)
    """The files of data.corpus."""
    rows: str | None = None
    """Digest of the training rows, and of the settings by which they are read."""
    model_hub: PinnedCommit | None = None
    model_files: dict[FileName, PinnedFile] = Field(default_factory=dict)
    """By name in the model folder: all files of a local model; for other models the files that replace theirs."""
    model_version: PinnedVersion | None = None
    """The registered version that is the base model, for `model.source: registry`."""
    started_from: PinnedVersion | None = None
    """The champion that training starts from in place of the base model; None if it starts from the base model."""
    negatives_version: VersionOfTask | None = None
    """The registered version that finds negatives, for `data.negatives.source: registry`."""
    unlabelled: list[PinnedFile] = Field(default_factory=list)
    """The files of data.unlabelled."""
    teacher_version: VersionOfTask | None = None
    """The registered version that is the teacher, for `training.teacher.source: registry`."""
    teacher_hub: PinnedCommit | None = None
    teacher_files: dict[FileName, PinnedFile] = Field(default_factory=dict)
    """The files of a teacher in a local folder, by name."""
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    num_processes: int = 1
    num_machines: int = 1
    must_hold: list[PinnedFile] = Field(default_factory=list)
    """The files of release.gate.must_hold."""
    notes: list[str] = Field(default_factory=list)
    """Messages for the user, such as an offline pin."""
    unreachable: list[str] = Field(default_factory=list)
    """Hub repositories that could not be looked up: the commit of the last run is used."""

    @property
    def start(self) -> PinnedVersion | None:
        """The registered version that training starts from; None if it starts from another model."""
        return self.started_from or self.model_version

    @property
    def teacher(self) -> dict[str, str]:
        """The content of the teacher: the digest of a version's model, a commit, or those of files; empty without
        one."""
        if self.teacher_version is not None:
            return {"champion": self.teacher_version.model}
        if self.teacher_hub is not None:
            return {"teacher": self.teacher_hub.commit}
        return {f"teacher/{name}": pin.sha256 for name, pin in self.teacher_files.items()}

    @property
    def start_field(self) -> str:
        """The recipe's field that names `start`."""
        return "model.start_from" if self.started_from else "model.path"

    @property
    def sets(self) -> list[PinnedRows]:
        """The sets of a mixture in order; without a mixture, the only one."""
        only = PinnedRows(
            hub=self.data_hub, files=self.data_files, fingerprint=self.data_fingerprint, images=self.data_images
        )
        return list(self.data_sets.values()) or [only]

    def by_section(self, data: dict[str, Any]) -> list[tuple[dict[str, Any], PinnedRows]]:
        """The sets with the sections that name them, of the field `data` of a recipe as JSON values. Without a lock, a
        mixture has none."""
        return list(zip(data.get("mix") or [data], self.sets, strict=False))

    @property
    def all_data_files(self) -> list[PinnedFile]:
        """The files of all sets and splits, further documents, and the corrections of labels."""
        files = [file for one in self.sets for files in one.files.values() for file in files] + self.corpus
        return [*files, self.corrections] if self.corrections is not None else files


class Check(BaseModel):
    """A figure and its bound."""

    model_config = ConfigDict(frozen=True)

    figure: str
    """`split.metric`, or `split.slice=group.metric` for a group of rows."""
    value: Number
    minimum: float | None = None
    maximum: float | None = None
    group: str | None = None
    """`slice=group` for a floor; None for all rows of the split."""
    rows: int | None = None
    """Rows of the group."""

    @property
    def passed(self) -> bool:
        """Whether the figure keeps its bounds. NaN keeps none."""
        least = -math.inf if self.minimum is None else self.minimum
        most = math.inf if self.maximum is None else self.maximum
        return least <= self.value <= most

    @property
    def inequality(self) -> str:
        """`0.71 < 0.75`"""
        sign, bound = ("≥", self.minimum) if self.minimum is not None else ("≤", self.maximum)
        if not self.passed:
            sign = {"≥": "<", "≤": ">"}[sign]
        return f"{self.value:.4g} {sign} {bound:g}"

    def __str__(self) -> str:
        return f"{self.figure} {self.inequality}"


class Selection(BaseModel):
    """How a sweep chose the settings of a model."""

    model_config = ConfigDict(frozen=True)

    study: str
    trial: int
    """The number of the chosen trial."""
    trials: int
    """All trials, those that were stopped early or failed among them."""
    completed: int
    metric: str
    direction: Literal["maximize", "minimize"]
    value: Number
    """The chosen trial's figure on the validation split."""
    sampler: str
    pruner: str
    settings: dict[str, Any]
    """The chosen values by recipe field."""
    similar: list[int] = Field(default_factory=list)
    """Trials whose models are not significantly worse on the same rows."""

    def __str__(self) -> str:
        return f"trial {self.trial} of {self.trials}, by {self.metric} on validation (sampler {self.sampler})"


class Verdict(BaseModel):
    """The decision of the gate, with the figures behind it."""

    model_config = ConfigDict(frozen=True)

    decision: Literal["promote", "keep", "reject"]
    """promote: registered, and the new champion. keep: registered as challenger, the champion stays. reject: nothing
    is registered."""
    reason: str
    """One sentence."""
    checks: list[Check] = Field(default_factory=list)
    comparison: Comparison | None = None
    must_hold: HeldRows | None = None
    """The rows that the model must have right; None if the recipe names none."""
    selection: Selection | None = None
    """How a sweep chose the model's settings."""
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
    """Description of how a person took the champion's alias from this version. Then no run publishes it or sets the
    alias again."""


class Promotion(BaseModel):
    """The alias that a version was given."""

    model_config = ConfigDict(frozen=True)

    name: str
    version: str
    alias: str
    previous: str | None = None
    """The version that had it before."""


class Publication(BaseModel):
    """The place of a model on the Hugging Face Hub."""

    model_config = ConfigDict(frozen=True)

    repo: str
    revision: str
    """The branch, or `refs/pr/N` of a pull request."""
    commit: str
    url: str
    """URL of the branch or the pull request."""
