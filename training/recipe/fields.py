"""What a recipe says: its sections and their fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from training.recipe.lora import Lora
from training.recipe.section import (
    AutoOrCount,
    BalancedOrWeights,
    CodeName,
    ColumnType,
    NameIn,
    NameOrNames,
    NamesOrFile,
    PathOrMapping,
    RunsCode,
    Section,
    Split,
    Text,
    Word,
)
from training.recipe.tables.checks import Level
from training.recipe.tables.formats import SOURCES
from training.recipe.tables.optimizers import OPTIMIZERS
from training.recipe.tables.strategies import STRATEGIES

MOST = 1_000_000_000
"""Of steps, and of seconds: far above any use, and below what libraries can count."""


class Data(Section):
    """Where the rows come from and which columns count."""

    source: Annotated[str, NameIn(SOURCES)]
    """hub: a dataset of the Hugging Face Hub. csv (also tab-separated), json (one object a line, or one array of
    objects), parquet, arrow: files; csv and json also packed by gzip or zstd. python: a function or object that
    gives the rows."""
    path: CodeName
    """The dataset's name on the Hub; or a file, folder, glob or URL (`s3://…`, `https://…`); or `module:name`.
    A relative path counts from the working directory."""
    config: str | None = None
    """Which subset of a Hub dataset, such as `sst2` of `nyu-mll/glue`."""
    revision: str | None = None
    """Branch, tag or commit of a Hub dataset (null: main). Pinned to a commit before anything is read."""
    splits: dict[str, NameOrNames] | None = None
    """For train, and perhaps validation and test: the Hub split, or the file or files, that hold it
    (null: found by name; where no name tells, all files are train). Without validation, rows of train are held out."""
    validation_size: float = Field(default=0.1, gt=0, lt=1)
    """Share of the train rows held out for validation where there is no such split: by a hash of the text, so that
    equal texts stay together, and old rows stay where they are when rows are added."""
    test_size: float = Field(default=0.0, ge=0, lt=1)
    """Share of the train rows held out for test where there is no such split, in the same way."""
    delimiter: str | None = Field(default=None, min_length=1, max_length=1)
    """What separates the columns of a CSV file (null: what a first line such as `sep=;` names, else a tab in .tsv files
    and a comma in others)."""
    quoting: Literal["standard", "none"] = "standard"
    """Whether quotation marks of a CSV file have a meaning. standard: they enclose fields that hold delimiters, line
    breaks or doubled quotation marks, and are removed. none: they are text like any other, and each line is a row."""
    header: list[Text] | None = Field(default=None, min_length=1)
    """The names of the columns of a CSV file without a header row, in order (null: the first row names them). A row may
    end early, if it only lacks columns that the recipe does not use."""
    encoding: Text = "utf-8"
    """How text is written in CSV and JSON files: utf-8, utf-16, latin-1, cp1252, …"""
    rename: dict[Text, Text] = Field(default_factory=dict)
    """New names of columns by their old ones. All other fields use the new ones."""
    cast: dict[Text, ColumnType] = Field(default_factory=dict)
    """Types of columns that are to be other than they are stored: string, int64, float64 or bool."""
    filter: Text | None = None
    """Which rows count, such as `stars >= 4 and language in ("en", "de") and not text == ""`."""
    limit: int | None = Field(default=None, ge=1, le=10**15)
    """At most as many rows of each split, the first ones: for trials."""
    text: list[Text] | None = Field(default=None, min_length=1, max_length=2)
    """The text column, or the two columns of a pair of texts, in the model's order (null: the task type wants none)."""
    label: Text | None = None
    """The column of labels: names, or whole numbers; for some task types lists of them, or any numbers (null: the task
    type wants none)."""
    columns: dict[Text, Text] = Field(default_factory=dict)
    """The columns of the task types that want others than text and label, by what they are to the task type:
    `{source: en, target: de}` (where left out, a column of that name, if the task type cannot do without it)."""
    label_separator: Text | None = None
    """What separates several labels in one cell, such as the comma of `4,27` (null: such a cell is a JSON list)."""
    label_names: NamesOrFile | None = None
    """The labels in the order of the model's outputs; or a file that lists them, one a line, or as a JSON list if it is
    called .json (null: as the data names them, else sorted). Labels that are whole numbers count these from 0."""
    max_file_gb: float = Field(default=20.0, gt=0)
    """Gigabytes that one file may hold once it is unpacked: a small file may be packed from an endless one."""
    checks: dict[str, Level] = Field(default_factory=dict)
    """What becomes of what a check finds, by the check's name: error (nothing is stored), warning or ignore. Rows that
    cannot be used are left out unless they are an error. The checks: training/data/checks.py."""


class Model(Section):
    """The model that training starts from, and its tokenizer."""

    source: Literal["hub", "folder", "scratch"]
    """hub: a repository of the Hub. folder: a local one in the same layout.
    scratch: random weights, and a tokenizer trained on the training split: WordPiece, which knows neither case nor
    accents, and for task types whose models write texts BPE, which keeps them as they are."""
    path: Text | None = None
    """The repository's name or the folder; null for scratch."""
    revision: str | None = None
    """Branch, tag or commit of a Hub model (null: main). Pinned to a commit before anything is read."""
    config: dict[str, Any] | None = None
    """For scratch: the model's configuration, with at least `model_type` and `vocab_size` (tokens)."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Draws the weights of a scratch model."""
    chat_template: Text | None = None
    """A file of Jinja that writes conversations as texts, which the tokenizer has from then on (null: its own). A
    relative path counts from the working directory."""
    start_from: Literal["base", "champion"] = "base"
    """base: the model above. champion: the one of release.registry, with its tokenizer, as long as there is one; where
    it was trained on exactly these rows, what that training started from. Rows that stay in data that grows are learnt
    again by each champion; any other commit of the Hub counts as other rows."""


class Tokens(Section):
    """How texts become tokens."""

    max_length: int = Field(default=128, ge=8, le=10_000_000)
    """Tokens a row, special ones included; what is longer is cut and counted in the report."""


class Training(Section):
    """How the model is trained. Names and meanings are those of transformers' TrainingArguments, except for the fields
    from `loss` on; docs/reference/training-arguments.md lists all of them."""

    num_train_epochs: float = Field(default=3.0, gt=0, le=1_000_000)
    """Times that each training row is seen."""
    max_steps: int = Field(default=-1, ge=-1, le=MOST)
    """Optimizer steps, in place of num_train_epochs; -1: as many as the epochs take."""
    learning_rate: float = Field(default=5e-5, gt=0)
    """Of the optimizer, at its highest."""
    per_device_train_batch_size: int = Field(default=32, ge=1, le=1_000_000)
    """Rows in one forward and backward pass of one process."""
    per_device_eval_batch_size: int = Field(default=64, ge=1, le=1_000_000)
    """Rows in one forward pass of one process when evaluating and predicting."""
    gradient_accumulation_steps: int = Field(default=1, ge=1, le=1_000_000)
    """Passes whose gradients make one optimizer step."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Pull of the weights towards zero at each step; biases and norms are spared."""
    warmup_steps: float = Field(default=0, ge=0, le=MOST)
    """Steps over which the learning rate climbs from zero; below 1, the share of all steps."""
    lr_scheduler_type: Literal[
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
        "constant",
        "constant_with_warmup",
        "inverse_sqrt",
        "reduce_lr_on_plateau",
        "cosine_with_min_lr",
        "cosine_warmup_with_min_lr",
        "warmup_stable_decay",
        "greedy",
    ] = "linear"
    """How the learning rate changes after the warm-up; its own settings: `extra.lr_scheduler_kwargs`."""
    optim: Annotated[str, NameIn(OPTIMIZERS)] = "adamw_torch_fused"
    """The optimizer. The first six need no package beyond torch; for the others, their package is named where it is
    missing."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Longer gradients are scaled down to this norm; 0: never."""
    label_smoothing_factor: float = Field(default=0.0, ge=0, lt=1)
    """Share of each target's weight that is spread over all labels."""
    seed: int = Field(default=42, ge=0, lt=2**32)
    """Draws the new head's weights, the order of rows and dropout."""
    logging_steps: int = Field(default=50, ge=1, le=MOST)
    """Optimizer steps between two recorded training losses."""
    eval_strategy: Annotated[Literal["epoch", "steps", "no"], Word] = "epoch"
    """When the validation split is evaluated while training: each epoch, each eval_steps, or never."""
    eval_steps: int | None = Field(default=None, ge=1, le=MOST)
    """Optimizer steps between two evaluations, for `eval_strategy: steps`."""
    metric_for_best_model: str | None = None
    """Chooses the best model: one of evaluation.metrics (null: the loss on the validation split)."""
    greater_is_better: bool | None = None
    """Whether more of that metric is better (null: as docs/reference/metrics.md has it; for one of your own, yes unless
    its name ends with loss)."""
    load_best_model_at_end: bool = True
    """Whether the best evaluated model is exported, rather than the last one."""
    resume_from_checkpoint: Text | None = None
    """The folder of a checkpoint of another job, `…/checkpoint-40`, to begin with: its weights, optimizer and place in
    the epochs (null: the base model). A run that was stopped goes on by itself. To begin with weights alone, name the
    model's folder in model.path."""
    report_to: list[Literal["tensorboard", "wandb"]] = Field(default_factory=list)
    """Where training's figures go beside MLflow: tensorboard (files in `tensorboard/` of the home, or in
    TENSORBOARD_LOGGING_DIR), wandb (as its WANDB_… variables say); each needs its package."""
    loss: CodeName = "cross_entropy"
    """What training makes small, for task sequence-classification: cross_entropy (the model's own), focal, or a
    function of yours as `module:function`, called with logits (B, L) and labels (B,): training/task_types/losses."""
    focal_gamma: float | None = Field(default=None, ge=0)
    """For `loss: focal`: how much less the rows count that are right already (null: 2; 0: cross entropy)."""
    class_weights: BalancedOrWeights | None = None
    """How much the rows of each label count in the loss: balanced (all labels alike), or weights by the labels'
    names, 1 where a label is not named. Only the ratios matter (null: all rows count alike)."""
    lora: Lora | None = None
    """Trains small matrices beside the weights, and leaves the weights as they are (null: trains all of them). It needs
    the extra `lora`; `{}` takes the defaults."""
    engine: CodeName = "trainer"
    """What trains: trainer (that of transformers), accelerate (a plain loop with fewer settings:
    training/engine/loop.py), or a function of yours as `module:function`: training/engine/training_task.py."""
    collator: CodeName | None = None
    """What makes rows into the batches of training: a function or class of yours as `module:name`, called with the
    tokenizer and the multiple to pad to, that gives a function of a batch's features (null: the task type's own)."""
    callbacks: list[CodeName] = Field(default_factory=list)
    """TrainerCallbacks of yours as `module:Class`, made without arguments, one of each on every process."""
    trainer: CodeName | None = None
    """A subclass of yours of ExactTrainer (training/engine/trainer.py), as `module:Class` (null: that one itself)."""
    inexact_resume: bool = False
    """Whether a run may go on from a checkpoint of another machine, of other library versions, or with ddp of another
    number of processes, although it then ends with other bytes."""
    early_stopping_patience: int | None = Field(default=None, ge=1, le=MOST)
    """Evaluations without a better metric after which training stops (null: never)."""
    early_stopping_threshold: float = Field(default=0.0, ge=0)
    """How much the metric must gain to count as better, in its own unit."""
    checkpoint_interval_s: float = Field(default=600.0, gt=0, le=MOST)
    """Seconds between two checkpoints; each evaluation makes one as well."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Any other field of TrainingArguments that the project does not set itself."""
    trust_checkpoint: Annotated[bool, RunsCode()] = False
    """Whether the checkpoint that resume_from_checkpoint names may execute code. Those of FSDP, of DeepSpeed and of an
    engine of yours can, so one that this home did not write, or that was changed since, is refused without this."""


class Compute(Section):
    """On what the model is trained."""

    strategy: Annotated[str, NameIn(STRATEGIES)] = "ddp"
    """How several processes share the work. ddp: each holds the whole model. fsdp: each holds a share of it (FSDP2).
    deepspeed-zero2: each holds the model, and a share of gradients and optimizer state; deepspeed-zero3: a share of
    the model, too."""
    offload: Annotated[Literal["no", "optimizer", "all"], Word] = "no"
    """What waits in the CPU's memory while it is not needed on the GPU: the optimizer state, or the model as well."""
    fsdp_reshard_after_forward: bool = True
    """For fsdp, whether a layer put together for the forward pass is taken apart again until the backward pass: less
    memory and more traffic. true is known as FULL_SHARD, false as SHARD_GRAD_OP."""
    fsdp_wrap: list[Text] | None = Field(default=None, min_length=1)
    """For fsdp, the classes of the layers that are put together one at a time, such as `BertLayer` (null: those that
    the model says are never to be split)."""
    deepspeed: PathOrMapping = Field(default_factory=dict)
    """For DeepSpeed, more of its configuration under its own names, such as
    `{zero_optimization: {overlap_comm: false}}`, or the path of its JSON file. What follows from other fields of the
    recipe is set there."""
    accelerate: Text | None = None
    """The path of a file that `accelerate config` wrote: each of its fields becomes the field of the recipe that says
    the same, and contradicts none that is written there: docs/how-to/several-processes.md."""
    num_processes: AutoOrCount = "auto"
    """Processes that train and predict, on all machines together, each on a GPU of its own or all on the CPU; auto: all
    GPUs, and where there is none, 1 a machine."""
    num_machines: AutoOrCount = 1
    """Machines that train together, each started by the same `finetune run` with the same home; auto: as many as NNODES
    or SLURM_NNODES says, else 1."""
    machine_rank: int | None = Field(default=None, ge=0)
    """Which of several machines this one is: 0 runs all stages, the others help it train (null: what NODE_RANK or
    SLURM_NODEID says)."""
    rendezvous: str | None = Field(default=None, pattern=r"^\S+:\d{1,5}$")
    """Where several machines meet: `host:port` of machine 0, with a port that is free (null: what MASTER_ADDR and
    MASTER_PORT say)."""
    mixed_precision: Annotated[Literal["auto", "no", "bf16", "fp16"], Word] = "auto"
    """Number format of the forward and backward pass; auto: bf16 where the hardware computes in it."""
    stall_timeout_s: float = Field(default=1800.0, gt=0, le=MOST)
    """Seconds without a sign of life after which training is stopped and tried again."""

    def learnt_by(self) -> dict[str, Any]:
        """How the work is shared: what of this section can change the weights, beside what `auto` came to."""
        auto = {"num_processes", "num_machines", "mixed_precision"}
        where = {"accelerate", "machine_rank", "rendezvous", "stall_timeout_s"}
        return self.model_dump(mode="json", exclude=auto | where)


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


class Evaluation(Section):
    """How the trained model is judged."""

    splits: list[Split] = Field(default=["validation"], min_length=1)
    """The splits that are predicted and scored."""
    metrics: list[CodeName] = Field(default=["accuracy"], min_length=1)
    """What is computed from the predictions: accuracy, f1, roc_auc, log_loss, … (docs/reference/metrics.md has all), a
    class of yours as `module:Class`, or one of the Hub as `hub:owner/name@COMMIT`. Where it is left out and accuracy
    does not fit the task type, the first that does."""
    slices: list[Text] = Field(default_factory=list)
    """By what each split is also judged in groups: columns of the rows (text, whole numbers or truths, of at most 1,000
    different values), `label` (where a row has one), or `length_bucket` (quarters of the rows by their number of
    tokens). Rows without a value are the group `none`, with those that say so themselves."""
    allow_remote_code: Annotated[bool, RunsCode()] = False
    """Whether the code of metrics of the Hub may be run here."""


class Gate(Section):
    """What a model must show to be registered, and to be promoted."""

    split: Split | None = None
    """The evaluated split whose figures count (null: test where it is evaluated, else validation)."""
    minimum: dict[Text, float] = Field(default_factory=dict)
    """The least figure, by metric, with which a model is registered."""
    maximum: dict[Text, float] = Field(default_factory=dict)
    """The same for metrics of which less is better, such as log_loss."""
    floors: dict[Text, dict[Text, float]] = Field(default_factory=dict)
    """The least figure of groups of rows, by slice and metric: `{genre: {accuracy: 0.6}}` for each group of a slice in
    evaluation.slices that has 10 rows or more, however many there are (none: the model is rejected),
    `{"genre=fiction": {f1: 0.7}}` for one, in place of that for each, and however few rows it has. On the groups of
    `label` accuracy is the metric to choose: most others mean nothing there."""
    compare: Text | None = None
    """The metric by which a model must be better than the champion, on the same rows (null: the first of
    evaluation.metrics). Of one of yours, more is better, unless it has a maximum or its name ends with `loss`."""
    margin: float = 0.0
    """By how much, in the metric's own unit; below zero, how much worse is still taken. Accuracy without a margin is
    compared by McNemar's exact test, everything else by a permutation test and a bootstrap interval."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """How sure that must be: at 0.95, at most one of twenty models that are no better is promoted by chance."""
    control: Literal["each", "all"] = "each"
    """What the confidence is of. `each`: of each comparison, so models that are no better are promoted again and again
    on the same test rows, one in twenty. `all`: of all comparisons on the same rows together, as many as the registry
    remembers. Each later comparison must be surer; new rows begin anew."""
    min_rows: int = Field(default=20, ge=1)
    """The fewest rows on which a comparison may promote a model."""
    baseline: bool = True
    """Whether a model without a champion to be compared with must be better than the best constant answer: by the same
    test on the same rows, never by a margin below zero. One that may be no better is kept, not promoted (false: it is
    promoted if it keeps to the bounds)."""


class Hub(Section):
    """Where promoted models are published."""

    repo: str = Field(pattern=r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
    """The repository on the Hugging Face Hub, `owner/name`; made where there is none."""
    license: Text
    """The licence that the model card names, such as apache-2.0: the Hub's identifiers."""
    private: bool = True
    """Whether a repository that is made is private."""
    revision: Text = "main"
    """The branch that is written to, README.md included; made where there is none."""
    pull_request: bool = False
    """Whether a pull request is opened in place of a commit."""
    tags: list[Text] = Field(default_factory=list)
    """Tags of the model card."""
    checkpoints: Annotated[Literal["no", "checkpoint", "every_save", "all_checkpoints"], Word] = "no"
    """What of a training goes there while it goes on, much as in TrainingArguments.hub_strategy. checkpoint: the newest
    checkpoint in `last-checkpoint/`; the best so far, if the newest needs it, in `best-checkpoint/`. every_save: the
    newest weights and the tokenizer alone, in `last-weights/`, which from_pretrained takes as `subfolder`.
    all_checkpoints: each as `checkpoint-N/`; unsent ones wait on the disk as long as a tenth of it is free. They lie on
    the branch whatever the gate says of the model later; checkpoints, downloaded, are what
    training.resume_from_checkpoint takes."""


class Retrain(Section):
    """How the flow `retrain` treats a Hub that does not answer."""

    max_unreachable: int = Field(default=3, ge=0)
    """Runs in a row that may end well although the Hub did not say whether its data set or model changed. The next run
    fails; a Hub that answers sets the count back to 0."""


class Release(Section):
    """What becomes of a model that is good enough."""

    registry: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The model's name in MLflow's registry (null: not registered). Recipes and homes may share one: its champion is
    compared by what it makes of this recipe's rows, whoever trained it."""
    gate: Gate = Gate()
    """What it must show."""
    hub: Hub | None = None
    """Where promoted models are published (null: nowhere)."""
    retrain: Retrain = Retrain()
    """Of the flow `retrain` alone."""
    champion: str = Field(default="champion", pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")
    """The registry's alias that a promoted version takes over. Recipes that share a registry call it alike: one knows
    no champion by another alias."""
    challenger: str = Field(default="challenger", pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")
    """The alias of the newest version that was registered and not promoted."""


class Recipe(Section):
    """All that makes a model: data, model, training, evaluation, release."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    """Names the runs of this recipe: lower-case letters, digits and `-`."""
    task: CodeName
    """What the model learns to do: sequence-classification (one of the labels), multi-label-classification (any number
    of them), regression (a number), token-classification (a tag a word), causal-lm, masked-lm, seq2seq (a text),
    sft (an answer in a conversation). Or a task type of yours, a class as `module:Class`:
    training/task_types/task_type.py."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the task type, declared with their defaults by its class in training/task_types."""
    data: Data
    """Where the rows come from and which columns count."""
    model: Model
    """The model that training starts from."""
    tokens: Tokens = Tokens()
    """How texts become tokens."""
    training: Training = Training()
    """How the model is trained."""
    compute: Compute = Compute()
    """On what the model is trained."""
    evaluation: Evaluation = Evaluation()
    """How the trained model is judged."""
    release: Release = Release()
    """What becomes of a model that is good enough."""

    @property
    def task_and_options(self) -> dict[str, Any]:
        """The task type and its options, as `task_types.load` takes them."""
        return {"task": self.task, "options": self.options}

    @property
    def judged_split(self) -> Split:
        """The split whose figures the gate looks at."""
        evaluated = self.evaluation.splits
        usual: list[Split] = [split for split in ("test", "validation") if split in evaluated]
        return self.release.gate.split or [*usual, *evaluated][0]

    @property
    def compared_by(self) -> str:
        """The metric by which a model is compared with the champion."""
        return self.release.gate.compare or self.evaluation.metrics[0]
