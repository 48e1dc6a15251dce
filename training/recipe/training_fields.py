"""The section `training` of a recipe, with the adapters and the teacher of a training."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from training.jobs.protocol import NotInKey
from training.recipe.augment_fields import Augment
from training.recipe.field_types import (
    LIST,
    WORD,
    BalancedOrWeights,
    CodeName,
    Confidence,
    NameIn,
    RunsCode,
    Section,
    Text,
    Word,
)
from training.recipe.tables.adapters import ADAPTERS, LORA
from training.recipe.tables.optimizers import OPTIMIZERS
from training.recipe.tables.trackers import TRACKERS

MAX_COUNT = 1_000_000_000
"""The limit of steps and of seconds: far above any use, and small enough for all libraries."""

AllOrNames = Annotated[
    Annotated[Literal["all-linear"], Tag(WORD)] | Annotated[list[Text], Field(min_length=1), Tag(LIST)],
    Discriminator(lambda value: LIST if isinstance(value, list) else WORD),
]


class Lora(Section):
    """Adapters, trained instead of the model's own weights. Names, meanings and defaults are those of peft's
    LoraConfig, and of the configurations of its other kinds."""

    peft_type: Annotated[str, NameIn(ADAPTERS)] = LORA
    """The kind of the adapters, by peft's name: LORA (low-rank matrices), IA3 (factors of outputs), VERA (factors of
    shared random matrices), OFT (rotations), LOKR (Kronecker products) or LOHA (Hadamard products). Other kinds than
    LORA have `settings`, and only target_modules and modules_to_save of the other fields."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Of another kind than LORA: fields of its configuration in peft, such as `{r: 16}`; docs/how-to/adapters.md lists
    them."""
    r: int = Field(default=8, ge=1)
    """The rank: the inner dimension of the two matrices of an adapter."""
    lora_alpha: int = Field(default=8, ge=1)
    """The scale: an adapter's output is multiplied by lora_alpha / r."""
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of the adapters' input during training."""
    target_modules: AllOrNames | None = None
    """The linear layers that get adapters: ends of their names, such as [q_proj, v_proj], or all-linear (null: peft's
    choice for this type of model, and all layers for a type that it does not know)."""
    modules_to_save: list[Text] | None = Field(default=None, min_length=1)
    """Layers that are trained whole, by the ends of their names. Layers with new random weights, such as a classifier's
    head, always are."""
    use_rslora: bool = False
    """Whether an adapter's output is scaled by lora_alpha / √r instead, so that large ranks do not learn slowly."""
    use_dora: bool = False
    """Whether the length and the direction of weights are trained separately (DoRA): more computation, and often better
    results for small ranks."""
    init_lora_weights: Literal["pissa"] | None = None
    """pissa: adapters start as the principal components of their layer's weights, which the layer then holds without
    them (PiSSA). They learn faster; each start decomposes the layers (null: adapters start without effect)."""
    quantization: Literal["nf4"] | None = None
    """nf4: the model's linear layers are held in 4 bits during training (QLoRA), by bitsandbytes on an NVIDIA GPU. The
    exported model is the original one in float32 with the adapters."""


def packages_of(lora: Lora | None) -> list[str]:
    """The packages that the adapters need beyond those of this project."""
    if lora is None:
        return []
    return ["peft"] if lora.quantization is None else ["peft", "bitsandbytes"]


class Teacher(Section):
    """A trained model from whose outputs the model learns, besides the labels (distillation): docs/how-to/teachers.md.
    The stage teacher_outputs computes them once for all trainings on the same rows."""

    source: Annotated[Literal["registry", "hub", "folder"], NotInKey("the outputs are in the key")]
    """registry: a version in MLflow's registry, with its tokenizer. hub: a repository of the Hub. folder: a local
    folder in the same layout."""
    path: Annotated[Text, NotInKey("the outputs are in the key")]
    """For registry `NAME@alias` or `NAME/version`, such as `big@champion`, which is pinned to a version before files
    are read; else the repository's name, or the folder."""
    revision: Annotated[str | None, NotInKey("the outputs are in the key")] = None
    """Branch, tag or commit of a Hub model (null: main). It is pinned to a commit before files are read."""
    temperature: float | None = Field(default=None, gt=0, le=1000)
    """Divides the logits of both models in the teacher's part of the loss: higher ones weigh small probabilities more
    (Hinton et al., arXiv:1503.02531). Null: 2, of language models 1. Numbers and embeddings have none."""
    weight: float = Field(default=0.5, ge=0, le=1)
    """The teacher's part of the loss; the labels have the rest. 1 learns from the teacher alone."""
    unlabelled_min_confidence: Confidence | None = None
    """For sequence-classification: rows of data.unlabelled are left out if the teacher's highest probability is below
    this, such as 0.9; or, with abstain, those that its version would give to a person (null: all are used)."""
    loss: Literal["forward_kl", "reverse_kl", "jsd", "sequence"] | None = None
    """Of causal-lm, sft and seq2seq, which compare the probabilities of each token: the divergence from the teacher
    (null: forward_kl). With sequence there is none: the teacher answers the training rows, and its answers are the
    targets. Other task types have the loss of their outputs."""
    beta: float | None = Field(default=None, gt=0, lt=1)
    """Of jsd, the teacher's share of the mixture (null: 0.5): near 0 it is like forward_kl, near 1 like reverse_kl."""
    top_k: Annotated[int, NotInKey("the outputs are in the key")] = Field(default=64, ge=1)
    """Of language models, the likeliest tokens whose probabilities are stored for each token; all others are one."""

    @property
    def writes_targets(self) -> bool:
        """Whether the teacher's answers are the targets, so that training is an ordinary one."""
        return self.loss == "sequence"

    def temperature_of(self, outputs: str) -> float:
        """The temperature for a task type's `teacher_outputs`."""
        return self.temperature or (1.0 if outputs == "tokens" else 2.0)


class Training(Section):
    """Training. Names and meanings are those of transformers' TrainingArguments, except for the fields from `loss` on;
    docs/reference/training-arguments.md lists all of them."""

    num_train_epochs: float = Field(default=3.0, gt=0, le=1_000_000)
    """Passes over the training rows."""
    max_steps: int = Field(default=-1, ge=-1, le=MAX_COUNT)
    """Optimizer steps, which replace num_train_epochs; -1: as many as the epochs take."""
    learning_rate: float = Field(default=5e-5, gt=0)
    """The optimizer's highest learning rate."""
    per_device_train_batch_size: int = Field(default=32, ge=1, le=1_000_000)
    """Rows in one forward and backward pass of one process."""
    per_device_eval_batch_size: int = Field(default=64, ge=1, le=1_000_000)
    """Rows in one forward pass of one process during evaluation and prediction."""
    gradient_accumulation_steps: int = Field(default=1, ge=1, le=1_000_000)
    """Passes whose gradients make one optimizer step."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decay of the weights at each step; biases and norms have none."""
    warmup_steps: float = Field(default=0, ge=0, le=MAX_COUNT)
    """Steps over which the learning rate rises from zero; below 1, a share of all steps."""
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
    """The learning rate's schedule after the warm-up. Its settings are in `extra.lr_scheduler_kwargs`."""
    optim: Annotated[str, NameIn(OPTIMIZERS)] = "adamw_torch_fused"
    """The optimizer. The first six need only torch; docs/reference/optimizers.md lists the packages of the others."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """The largest norm of the gradients; longer ones are scaled down to it (0: no limit)."""
    label_smoothing_factor: float = Field(default=0.0, ge=0, lt=1)
    """Share of each target's weight that is spread over all labels, of several labels a row over yes and no."""
    use_liger_kernel: bool = False
    """Whether layers run on Liger's kernels (package liger-kernel), on NVIDIA GPUs. Causal language models with ddp
    then compute the loss without holding the logits of a batch in memory."""
    seed: int = Field(default=42, ge=0, lt=2**32)
    """The seed of the new head's weights, the order of rows, and dropout."""
    logging_steps: Annotated[int, NotInKey("how often the loss is recorded")] = Field(default=50, ge=1, le=MAX_COUNT)
    """Optimizer steps between two recorded training losses."""
    eval_strategy: Annotated[Literal["epoch", "steps", "no"], Word] = "epoch"
    """When the validation split is evaluated during training: after each epoch, every eval_steps, or never."""
    eval_steps: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Optimizer steps between two evaluations, for `eval_strategy: steps`."""
    metric_for_best_model: str | None = None
    """The metric that chooses the best checkpoint, one of evaluation.metrics (null: the loss on the validation
    split)."""
    greater_is_better: bool | None = None
    """Whether higher values of that metric are better (null: as docs/reference/metrics.md lists it; for a metric of
    your own yes, unless its name ends with loss)."""
    load_best_model_at_end: bool = True
    """Whether the best evaluated model is exported instead of the last one."""
    resume_from_checkpoint: Annotated[Text | None, NotInKey("the checkpoint's content is in the key")] = None
    """The checkpoint folder of another job, `…/checkpoint-40`, to start from with its weights, optimizer and position
    in the epochs (null: the base model). A run that was stopped resumes without this. To start from weights alone, set
    model.path to the model's folder."""
    report_to: Annotated[list[Annotated[str, NameIn(TRACKERS)]], NotInKey("trackers only listen")] = Field(
        default_factory=list
    )
    """Trackers of the run besides MLflow: tensorboard (files in `tensorboard/` of the home, or in
    TENSORBOARD_LOGGING_DIR) and wandb (set up by its WANDB_… variables). Each needs its package."""
    loss: CodeName = "cross_entropy"
    """The loss of each target, a row, label, tag, token or number: cross_entropy (of numbers the squared error), focal,
    or your function as `module:function`, called with logits and labels: docs/how-to/tune.md. Task types that have a
    loss of their own choose it in options."""
    focal_gamma: float | None = Field(default=None, ge=0)
    """For `loss: focal`: how much less confidently right targets weigh (null: 2; 0: as in cross entropy)."""
    class_weights: BalancedOrWeights | None = None
    """The weight of each label's rows, or tag's words, in the loss: balanced (all labels count the same), or weights by
    label name, 1 for labels that are left out. Only the ratios matter. With several labels a row they are pos_weight:
    rows with the label count so often, and balanced is rows without / rows with it (null: all rows count the same)."""
    lora: Lora | None = None
    """Trains adapters and keeps the model's weights as they are (null: trains all weights). Needs the extra
    `lora`; `{}` takes the defaults."""
    teacher: Teacher | None = None
    """A trained model from which this one also learns (null: from the labels alone), for classification, regression,
    tags, embeddings and language models."""
    engine: CodeName = "trainer"
    """The engine that trains: trainer (that of transformers), accelerate (a plain loop with fewer settings), or your
    function as `module:function`: docs/how-to/own-engine.md."""
    augment: Augment | None = None
    """Random changes of training images, with torchvision's names (null: none)."""
    collator: CodeName | None = None
    """Your collator as `module:name`: a function or class that is called with the tokenizer and the multiple to pad to,
    and returns a function from the features of a batch to tensors (null: the task type's collator)."""
    callbacks: list[CodeName] = Field(default_factory=list)
    """Your TrainerCallbacks as `module:Class`. Each process creates one of each, without arguments."""
    trainer: CodeName | None = None
    """Your subclass of ExactTrainer (training/engine/trainer.py) as `module:Class` (null: ExactTrainer)."""
    inexact_resume: Annotated[bool, NotInKey("the user chose to resume elsewhere")] = False
    """Whether a run may resume from a checkpoint of another machine, of other library versions, or with ddp of another
    number of processes. Its weights then differ from those of an uninterrupted run."""
    early_stopping_patience: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Evaluations without a better metric after which training stops (null: training never stops early)."""
    early_stopping_threshold: float = Field(default=0.0, ge=0)
    """The smallest gain that counts as better, in the metric's own unit."""
    checkpoint_interval_s: Annotated[float, NotInKey("how often checkpoints are written")] = Field(
        default=600.0, gt=0, le=MAX_COUNT
    )
    """Seconds between two checkpoints. Each evaluation writes one too."""
    extra: Annotated[
        dict[str, Any],
        NotInKey(
            "they choose what is logged",
            keys=frozenset({"logging_strategy", "logging_first_step", "log_level", "log_level_replica"}),
        ),
    ] = Field(default_factory=dict)
    """Other fields of TrainingArguments that the project does not set itself."""
    trust_checkpoint: Annotated[bool, RunsCode(), NotInKey("a checkpoint that it refuses ends the run")] = False
    """Whether the checkpoint in resume_from_checkpoint may run code. Checkpoints of FSDP, of DeepSpeed and of your own
    engine can. Without this, such a checkpoint is refused if this home did not write it, or if it was changed since."""
