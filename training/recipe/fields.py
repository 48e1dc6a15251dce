"""The sections of a recipe and their fields; those of `data` are in data_fields.py, of `training` in
training_fields.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from training.recipe.data_fields import Data
from training.recipe.field_types import (
    AutoOrCount,
    CodeName,
    NameIn,
    PathOrMapping,
    RunsCode,
    Section,
    Split,
    Text,
    Word,
)
from training.recipe.tables.exports import EXPORTS
from training.recipe.tables.kernels import ATTENTION
from training.recipe.tables.metrics import METRICS, WIN_RATE
from training.recipe.tables.strategies import STRATEGIES
from training.recipe.task_specification import specification
from training.recipe.training_fields import MAX_COUNT, Training


class Model(Section):
    """The model that training starts from, and its tokenizer."""

    source: Literal["hub", "folder", "registry", "scratch"]
    """hub: a repository of the Hub. folder: a local folder in the same layout. registry: a version in MLflow's
    registry, with its tokenizer; usually one that another recipe has registered. scratch: random weights, and a
    tokenizer trained on the training split: a WordPiece tokenizer that ignores case and accents, or for task types that
    generate text a BPE tokenizer that keeps both."""
    path: Text | None = None
    """The repository's name; the folder; for registry `NAME@alias` or `NAME/version`, such as `support-sft@champion` or
    `support-sft/7`, which is pinned to a version before files are read; null for scratch."""
    revision: str | None = None
    """Branch, tag or commit of a Hub model (null: main). It is pinned to a commit before files are read."""
    config: dict[str, Any] | None = None
    """For scratch: the model's configuration, with at least `model_type` and `vocab_size` (tokens), or for images
    `image_size` (pixels a side)."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """The seed of a scratch model's weights."""
    chat_template: Text | None = None
    """A Jinja file that turns conversations into texts; it replaces the tokenizer's own chat template (null: keeps the
    tokenizer's). Relative paths start from the working directory."""
    attn_implementation: Annotated[str, NameIn(ATTENTION)] | None = None
    """The kernels of attention during training: flash_attention_2 (package flash-attn) or flash_attention_3 (package
    flash-attn-3), on NVIDIA GPUs, in bf16 or fp16 (null: those of torch). Packed rows keep their documents apart."""
    start_from: Literal["base", "champion"] = "base"
    """base: the model above. champion: the champion of release.registry with its tokenizer, if there is one; if the
    champion was trained on exactly these rows, training starts from the model that the champion started from. When rows
    are added, each new champion trains on the old ones again. Another commit of a Hub dataset counts as other rows."""


class Tokens(Section):
    """Tokenization."""

    max_length: int = Field(default=128, ge=8, le=10_000_000)
    """Tokens a row, special tokens included. Longer rows are cut and counted in the report."""


class Compute(Section):
    """The machines and processes that train the model."""

    strategy: Annotated[str, NameIn(STRATEGIES)] = "ddp"
    """The strategy of several processes. ddp: each holds the whole model. fsdp: each holds a share of the model
    (FSDP2). deepspeed-zero1: each holds the model, and a share of the optimizer state; deepspeed-zero2: of the
    gradients too; deepspeed-zero3: a share of the model as well."""
    offload: Annotated[Literal["no", "optimizer", "all"], Word] = "no"
    """The state kept in CPU memory while the GPU does not need it: none, the optimizer state, or the model as well."""
    fsdp_reshard_after_forward: bool = True
    """For fsdp: whether a layer's weights are released between the forward and the backward pass, for less memory and
    more traffic. true is also known as FULL_SHARD, false as SHARD_GRAD_OP."""
    fsdp_wrap: list[Text] | None = Field(default=None, min_length=1)
    """For fsdp: the layer classes that are gathered one at a time, such as `BertLayer` (null: the classes that the
    model lists in `_no_split_modules`)."""
    deepspeed: PathOrMapping = Field(default_factory=dict)
    """For DeepSpeed: more of its configuration under its own names, such as `{zero_optimization: {overlap_comm:
    false}}`, or the path of its JSON file. Values that follow from other fields of the recipe are set there."""
    accelerate: Text | None = None
    """The path of a file that `accelerate config` wrote. Each of its fields becomes a field of the recipe; a
    contradiction is an error: docs/how-to/several-processes.md."""
    num_processes: AutoOrCount = "auto"
    """Processes that train and predict, on all machines together, each on its own GPU or all on the CPU (auto: one for
    each GPU, and without GPUs one for each machine)."""
    num_machines: int = Field(default=1, ge=1, le=MAX_COUNT)
    """Machines that train together, each with as many of the processes. More than one needs a cluster."""
    cluster: Literal["ray"] | None = None
    """Where training runs: on a Ray cluster, or on this machine (null)."""
    cluster_address: str | None = Field(default=None, pattern=r"^\S+:\d{1,5}$")
    """`host:port` of the cluster (null: RAY_ADDRESS, and without it a cluster of this machine alone)."""
    mixed_precision: Annotated[Literal["auto", "no", "bf16", "fp16"], Word] = "auto"
    """Number format of the forward and backward pass (auto: bf16 where the hardware computes in it, else
    fp16 on GPUs of compute capability 7.0 or newer, else no)."""
    stall_timeout_s: float = Field(default=1800.0, gt=0, le=MAX_COUNT)
    """Seconds without progress after which training is stopped and started again."""

    def weight_settings(self) -> dict[str, Any]:
        """Returns the fields that can change the weights, without fields that may be `auto`."""
        may_be_auto = {"num_processes", "num_machines", "mixed_precision"}
        machine_fields = {"accelerate", "cluster", "cluster_address", "stall_timeout_s"}
        return self.model_dump(mode="json", exclude=may_be_auto | machine_fields)


class ResolvedCompute(Compute):
    """The compute section of a run: the stage resolve has replaced each `auto`."""

    num_processes: int = Field(ge=1)
    """Processes on all machines together."""
    num_machines: int = Field(default=1, ge=1)
    """Machines that train together."""
    mixed_precision: Literal["no", "bf16", "fp16"]
    """Number format of the forward and backward pass."""
    deepspeed: dict[str, Any] = Field(default_factory=dict)
    """DeepSpeed's own configuration; a file has been read."""


class Drift(Section):
    """The differences between new rows and the version's validation rows that matter to drift reports."""

    cohens_w: float = Field(default=0.1, ge=0, lt=1)
    """For categories, such as predicted labels: Cohen's w. For two equally frequent labels it is the difference of
    their shares."""
    distance: float = Field(default=0.1, ge=0, lt=1)
    """For numbers, such as confidences and lengths: the Kolmogorov-Smirnov distance, the largest difference of the
    shares of rows below any number."""
    auc: float = Field(default=0.55, ge=0.5, lt=1)
    """For words and embeddings: the held-out AUC of a classifier that tells new rows from validation rows. If a share s
    of the new rows can be told from all others, it is 0.5 + s / 2."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """Confidence of all reports on a version together: at 0.95, the chance that any of them is not steady without a
    shift is at most 5 %. Each later look at new rows needs stronger evidence."""
    min_rows: int = Field(default=100, ge=20)
    """With fewer rows on either side, nothing is compared."""
    max_rows: int = Field(default=2000, ge=20)
    """Rows that are observed on either side; of more rows, so many are drawn at random."""


class Evaluation(Section):
    """The evaluation of the trained model."""

    splits: list[Split] = Field(default=["validation"], min_length=1)
    """The splits that are predicted and scored."""
    metrics: list[CodeName] = Field(default=["accuracy"], min_length=1)
    """Metrics of the predictions: accuracy, f1, roc_auc, log_loss, … (docs/reference/metrics.md lists all), your class
    as `module:Class`, or one of the Hub as `hub:owner/name@COMMIT`. If the field is left out and accuracy does not fit
    the task type, its first metric is used."""
    slices: list[Text] = Field(default_factory=list)
    """Groups in which each split is also scored: columns of the rows (text, whole numbers or booleans with at most
    1,000 different values), `label` (for task types with one label a row), or `length_bucket` (quarters of the rows by
    number of tokens). Rows without a value form the group `none`, with rows whose value is the text none."""
    folds: int | None = Field(default=None, ge=2, le=100)
    """Also trains this many models, each without the rows of one fold of train, and predicts these rows by it:
    out-of-fold predictions for every training row, with metrics (null: none). A hash of a row's text is its fold, or of
    its group with `data.split.by: group`: docs/how-to/folds.md."""
    parallel_folds: int = Field(default=1, ge=1, le=100)
    """Trainings of folds that run at once, each with GPUs of its own; compute.num_processes is of each. Their number
    changes no weights."""
    judge: CodeName | None = None
    """Your function as `module:function` that compares two answers to a prompt, for task types that answer prompts
    (preference, kto): called with the prompt and two answers in random order, it returns 0 or 1, the better one, or
    null for neither. It gives the win rate against the champion, and without one against the base model (null: no win
    rate)."""
    allow_remote_code: Annotated[bool, RunsCode()] = False
    """Whether the code of metrics of the Hub may run here."""


class FlipLimit(Section):
    """The rows that the champion has right and the new model has wrong."""

    max_share: float = Field(gt=0, lt=1)
    """The largest share of all rows, such as 0.01. A model is promoted only if a larger share is ruled out at
    release.gate.confidence, by Clopper and Pearson's exact bound: without any flip that takes 299 rows for 0.01, or
    299 groups of equal size if rows are held out by group."""


class MustHold(Section):
    """Rows that a model must have right to be registered."""

    path: Text
    """A file of rows with their labels, or a folder or glob of such files, read as the rows of data are. Relative
    paths start from the working directory."""
    reason: Text = "reason"
    """The column with the reason why a row must be right, a text of at most 256 bytes. A row with a reason that the
    model has wrong rejects the model; the verdict lists row and reason."""
    min_share: float = Field(default=1.0, gt=0, le=1)
    """The smallest share of the rows without a reason that must be right, such as 0.98 of the rows of past nights that
    must not be forgotten."""


class Gate(Section):
    """Conditions for a model to be registered and promoted."""

    split: Split | None = None
    """The evaluated split whose metrics decide (null: test if it is evaluated, else validation)."""
    minimum: dict[Text, float] = Field(default_factory=dict)
    """The lowest value of each metric with which a model is registered."""
    maximum: dict[Text, float] = Field(default_factory=dict)
    """The highest value of each metric that is better when lower, such as log_loss."""
    floors: dict[Text, dict[Text, float]] = Field(default_factory=dict)
    """The lowest value of each metric in groups of rows, by slice: `{genre: {accuracy: 0.6}}` applies to every group of
    a slice in evaluation.slices with 10 rows or more (a slice without such a group rejects the model),
    `{"genre=fiction": {f1: 0.7}}` to one group in place of that, however few rows it has. On the groups of `label`,
    choose accuracy: most other metrics have no meaning there."""
    compare: Text | None = None
    """The metric by which a model must be better than the champion, on the same rows (null: the first of
    evaluation.metrics), or win_rate with an evaluation.judge. For a metric of your own higher is better, unless it has
    a maximum or its name ends with `loss`."""
    margin: float = 0.0
    """The smallest gain over the champion, in the metric's own unit; a negative value accepts a loss of that size.
    Accuracy without a margin is compared by McNemar's exact test, everything else by a permutation test and a bootstrap
    interval; rows that data.split holds out by group, by whole groups."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """Confidence of the comparison: at 0.95, a model that is no better is promoted by chance in at most one of twenty
    cases."""
    control: Literal["each", "all"] = "each"
    """The comparisons that the confidence covers. `each`: every comparison by itself; at 0.95, one in twenty models
    that are no better is promoted. `all`: all comparisons on the same test rows together; each later one needs stronger
    evidence. Rows that are added or removed do not end the count; test rows that are all new begin another."""
    min_rows: int = Field(default=20, ge=1)
    """The smallest number of rows on which a comparison may promote a model; of groups if rows are held out by
    group."""
    flips: FlipLimit | None = None
    """The bound of flips: rows that the champion has right and the new model has wrong (null: any number). For task
    types whose predictions are right or wrong."""
    must_hold: MustHold | None = None
    """Rows of a file that a model must have right to be registered (null: none), for classification and tags."""
    baseline: bool = True
    """Whether a model without a champion must be better than predictions that need no training, such as the best
    constant one, or BM25 for rankings, by the same test on the same rows and never by a negative margin. Otherwise it
    is registered and not promoted (false: it is promoted if it meets the other conditions)."""


class Hub(Section):
    """Publication of promoted models."""

    repo: str = Field(pattern=r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
    """The repository on the Hugging Face Hub, `owner/name`; created if it does not exist."""
    license: Text
    """The licence on the model card, such as apache-2.0: one of the Hub's identifiers."""
    private: bool = True
    """Whether a repository that is created is private."""
    revision: Text = "main"
    """The branch for all files, README.md included; created if it does not exist."""
    pull_request: bool = False
    """Whether a pull request is opened instead of a commit."""
    tags: list[Text] = Field(default_factory=list)
    """Tags on the model card."""
    checkpoints: Annotated[Literal["no", "checkpoint", "every_save", "all_checkpoints"], Word] = "no"
    """The checkpoints to upload during training, as in TrainingArguments.hub_strategy. `no` uploads nothing.
    `checkpoint` uploads the newest checkpoint to `last-checkpoint/`, and the best one to `best-checkpoint/` if the
    newest refers to it. `every_save` uploads the newest weights and the tokenizer to `last-weights/`, a `subfolder` for
    from_pretrained. `all_checkpoints` uploads each checkpoint to `checkpoint-N/`, and keeps it on the disk until then
    while a tenth of the disk is free. Uploads stay on the branch even if the gate rejects the model.
    training.resume_from_checkpoint accepts a downloaded checkpoint."""


class Retrain(Section):
    """Behaviour of the flow `retrain` if the Hub does not respond."""

    max_unreachable: int = Field(default=3, ge=0)
    """Consecutive runs that may succeed although the Hub did not respond to requests about its dataset or model. The
    next run fails. A response of the Hub sets the count back to 0."""


class Abstain(Section):
    """A bound on the errors of a model that leaves some rows to a person."""

    max_error: float = Field(gt=0, lt=0.5)
    """The largest share of errors among answered rows."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """Confidence of the bound: at 0.95, the chance that a model errs more often on future rows like those of test is at
    most 5 %."""


class Release(Section):
    """Registration, promotion and publication."""

    registry: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The model's name in MLflow's registry (null: not registered). Several recipes and homes may share one: its
    champion is compared on this recipe's rows, also if it was trained on others."""
    gate: Gate = Gate()
    """Conditions for registration and promotion."""
    hub: Hub | None = None
    """Publication of promoted models (null: not published)."""
    exports: list[Annotated[str, NameIn(EXPORTS)]] = Field(default_factory=list)
    """Other formats in which the model is released. Of encoders: onnx, ONNX with 32-bit floats; onnx-int8, with weights
    in 8 bits, for CPUs. Of language models: gguf-f16, gguf-q8_0, gguf-q4_0 and gguf-q4_k_m, for llama.cpp; int8 and
    int4, safetensors with weights of so many bits. Each export predicts the rows of the judged split, and is released
    with the model if it is not inferior by export_margin: docs/how-to/export.md."""
    export_margin: float = Field(default=0.01, gt=0)
    """The largest loss of an export against the model, in the unit of the metric that the gate compares by: an export
    is released if a larger loss is ruled out at release.gate.confidence, by a paired test on the same rows."""
    calibrate: bool = False
    """Whether the version's probabilities are calibrated by the rows of validation, so that of predictions with a
    probability of 0.9 about 90 % are right: docs/how-to/ask-a-person.md. For classification with one or any number of
    labels. No prediction changes; metrics and the gate use the model's own probabilities."""
    abstain: Abstain | None = None
    """Calibrates, and marks predictions that a person should look at with `review: true`: all others err at most so
    often, by a bound that the rows of test give (null: no prediction is marked)."""
    prediction_sets: float | None = Field(default=None, ge=0.5, lt=1)
    """Calibrates, and adds a set of labels to each prediction of one label, `label_set`: it has the true label with
    this chance, such as 0.95 (null: no sets)."""
    retrain: Retrain = Retrain()
    """Settings of the flow `retrain`."""
    drift: Drift = Drift()
    """Differences of new rows that matter to `finetune drift` and to the drift reports of batch predictions."""
    champion: str = Field(default="champion", pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")
    """The registry's alias for the promoted version. Recipes that share a registry need the same alias, because a
    champion under another alias is not found."""
    challenger: str = Field(default="challenger", pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")
    """The alias for the version that a run registered last without promoting it. It stays there when a later version is
    promoted."""

    @property
    def calibrates(self) -> bool:
        """Whether the version's probabilities are calibrated."""
        return self.calibrate or self.abstain is not None or self.prediction_sets is not None


class Recipe(Section):
    """All settings of a model: data, base model, training, evaluation, release."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    """The name of this recipe's runs: lower-case letters, digits and `-`."""
    task: CodeName
    """The task type: sequence-classification (one label), multi-label-classification (any number of labels), regression
    (a number), token-classification (a tag for each word), causal-lm, masked-lm, span-corruption (the missing spans of
    a text, as T5), seq2seq (text to text), sft (a reply in a conversation), preference (the better of two replies), kto
    (replies that are rated good or bad), reward-modeling (a reward for a reply), embedding and sentence-similarity
    (embeddings of texts, from pairs), reranking (a score of a document for a query), multiple-choice (the best of a
    row's choices), question-answering (a part of a text), image-classification, image-multi-label-classification and
    image-regression (one label, several labels, a number for an image), or your class as `module:Class`:
    docs/how-to/own-task-type.md."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the task type: docs/reference/task-types.md lists them with their defaults."""
    data: Data
    """The source of the rows, and the columns to use."""
    model: Model
    """The model that training starts from."""
    tokens: Tokens = Tokens()
    """Tokenization."""
    training: Training = Training()
    """Training."""
    compute: Compute = Compute()
    """The machines and processes that train the model."""
    evaluation: Evaluation = Evaluation()
    """The evaluation of the trained model."""
    release: Release = Release()
    """Registration, promotion and publication."""

    @property
    def task_and_options(self) -> dict[str, Any]:
        """The task type and its options, as arguments of `task_types.load`."""
        return {"task": self.task, "options": self.options}

    @property
    def judged_split(self) -> Split:
        """The split whose metrics the gate checks."""
        evaluated = self.evaluation.splits
        usual: list[Split] = [split for split in ("test", "validation") if split in evaluated]
        return self.release.gate.split or [*usual, *evaluated][0]

    @property
    def compared_by(self) -> str:
        """The metric by which a model is compared with the champion."""
        return self.release.gate.compare or self.evaluation.metrics[0]

    @property
    def compared_metrics(self) -> list[str]:
        """The metric compared by; all metrics if it is a figure of user code, because any of them may return it. None
        for the win rate, which needs no metric."""
        if self.compared_by == WIN_RATE:
            return []
        return [self.compared_by] if self.compared_by in METRICS else list(self.evaluation.metrics)

    @property
    def export_metrics(self) -> list[str]:
        """The metrics of exports, which generate no answers; the first is the one that they are compared by."""
        names = dict.fromkeys([self.compared_by, *self.evaluation.metrics])
        answers = specification(**self.task_and_options).answer_metrics
        return [name for name in names if name != WIN_RATE and name not in answers]

    @property
    def less_is_better(self) -> list[str]:
        """Figures computed by user code for which lower is better: those with a maximum in the gate."""
        return [] if self.compared_by in (*METRICS, WIN_RATE) else sorted(self.release.gate.maximum)


def answered_prompts(recipe: Recipe) -> int:
    """The number of rows of each evaluated split for which the trained model and the champion, and the base model where
    task types compare with it, generate answers; 0 if nothing reads the answers."""
    task_type = specification(**recipe.task_and_options)
    if recipe.evaluation.judge is None and not {*recipe.evaluation.metrics} & {*task_type.answer_metrics}:
        return 0
    return int(task_type.options.answered_prompts)  # type: ignore[attr-defined]
