"""The recipe that `finetune init` writes: the value of each field, the reason of each guess, and the file as YAML."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import yaml

from tasks.cache.history import History
from tasks.hub.client import explain_read_errors, look_up
from tasks.reports.formatting import format_count
from tasks.starting_model import StartingModel, memory_here
from training.data.infer_reading import SAMPLE_ROWS, Choice, FirstRows, is_on_hub, sample_hub, sample_rows
from training.data.split_signs import SplitSigns
from training.jobs.resources import as_text
from training.problems import UserError, nearest, on_one_line, visible
from training.recipe.fields import Gate
from training.recipe.infer_task import NO_INPUTS, TaskGuess, guess_tasks
from training.recipe.tables.base_models import IMAGE_TASKS, SIZES, Size, base_models
from training.recipe.tables.metrics import RANKINGS, TOOL_METRICS, metrics_for
from training.recipe.tables.row_checks import LEVELS

SCRATCH = "scratch"
"""The name that stands for random weights."""
MODELS: Sequence[str] = (*SIZES, SCRATCH)
"""Names of models to start from; others are folders, or names of the Hub."""
_CHARACTERS_OF_TOKEN = {True: 4.0, False: 2.5}
"""Characters of a token by whether a text is English, rather too few, where no tokenizer counts them."""
_TOKENS_ABOUT_TOOLS = 200
"""Tokens that chat templates write before the declarations of tools."""
_LENGTHS = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096)
_TOKENS_OF_BATCH = 4096
_TOKENS_ABOUT_MESSAGES = 32
"""Tokens that chat templates write around some messages."""
_SHARE_OF_MEMORY = 0.8
_FEW_PROBLEMS = 0.05
"""The share of rows with a problem that may be left out without asking."""
MOST_NAMES = 10
_EPOCHS = 3
_STEPS: Mapping[bool, tuple[int, int]] = {False: (150, 10), True: (600, 20)}
"""Optimizer steps to reach on small data sets, and the epochs at most, by whether the model has random weights. Three
epochs are too few steps for some hundred rows (Zhang et al., arXiv 2006.05987)."""
_ENGLISH_WORDS = (
    *("the", "a", "an", "and", "of", "to", "in", "is", "are", "was", "for", "on", "with", "that", "this", "it"),
    *("you", "i", "not", "be", "have", "has", "at", "as", "by", "from", "or"),
)

_METRICS: Mapping[str, Sequence[str]] = {
    "sequence-classification": ("accuracy", "f1_macro"),
    "multi-label-classification": ("f1_macro", "f1_micro", "hamming_loss"),
    "regression": ("spearman", "pearson", "rmse"),
    "token-classification": ("f1", "precision", "recall"),
    "seq2seq": ("chrf", "exact_match"),
    "preference": ("accuracy", "margin"),
    "reward-modeling": ("accuracy",),
    "kto": ("roc_auc", "margin"),
    "image-classification": ("accuracy", "f1_macro"),
    "image-multi-label-classification": ("f1_macro", "f1_micro", "hamming_loss"),
    "image-regression": ("spearman", "pearson", "rmse"),
    **dict.fromkeys(("embedding", "reranking"), ("ndcg_at_10", "mrr_at_10")),
    "sentence-similarity": ("spearman", "pearson"),
    "multiple-choice": ("accuracy", "log_loss"),
    "question-answering": ("f1", "exact_match"),
    **dict.fromkeys(("causal-lm", "masked-lm", "span-corruption", "sft"), ("perplexity", "token_accuracy")),
}
_OTHER_METRICS = ("f1", "exact_match")
_CHOOSE_BY_LOSS = (
    *("causal-lm", "masked-lm", "span-corruption", "seq2seq", "sft"),
    *("preference", "reward-modeling", "kto"),
)
"""Task types whose best checkpoint is chosen by the loss: their metrics are slow, or follow it."""
_ANSWERING = ("sft", "preference", "reward-modeling", "kto")
_WRITING = (*_ANSWERING, "causal-lm", "masked-lm", "span-corruption", "seq2seq")
"""Task types with an output for each word of the vocabulary."""
_CHAT_TEMPLATE = "deployments/examples/chat.jinja"
_LEARNING_RATES = {"seq2seq": 3e-4, "causal-lm": 1e-4, "sft": 1e-4, "preference": 1e-6, "kto": 1e-6}
_SMALL = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
_SMALL_VIT = {"model_type": "vit", "image_size": 64, "patch_size": 8, **_SMALL}
_ROWS_OF_IMAGES = 16
_OF_SCRATCH: Mapping[str, Mapping[str, Any]] = {
    "seq2seq": {"model_type": "t5", "d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 2, "num_heads": 4},
    **{task: {"model_type": "llama", **_SMALL} for task in ("causal-lm", *_ANSWERING)},
    # A reference is the base model without a head that only training would add.
    **{task: {"model_type": "llama", "tie_word_embeddings": True, **_SMALL} for task in ("preference", "kto")},
}
Fields = dict[str, Choice]
"""The fields of a recipe by their dotted names, in order."""


@dataclass(frozen=True)
class RowsFound:
    """The rows of a source, and the task types that fit them."""

    sample: FirstRows
    guesses: Sequence[TaskGuess]
    """The likeliest first."""

    @property
    def described_rows(self) -> str:
        """The number of rows that were read, in words."""
        rows = _rows_in_words(self.sample)
        unreadable = self.sample.unreadable
        return f"{rows}, {unreadable:,} of them with problems that check lists" if unreadable else rows

    def recipe(self, name: str, task: str | None = None, model: str = MODELS[0]) -> Fields:
        """The fields of a recipe for the rows.

        Args:
            name: of the recipe.
            task: one of the task types that fit (None: the likeliest).
            model: to start from: a size of the table of base models, `scratch`, a folder, or a name of the Hub.

        Raises UserError if the task type does not fit the rows.
        """
        chosen = self._choose(task)
        sample, guess = _with_names(self.sample, chosen)
        other = next((other for other in self.guesses if other is not chosen), None)
        second = "" if other is None else f"{other.task}: {_with_names(self.sample, other)[1].reason}"
        fields: Fields = {"name": Choice(name), "task": Choice(guess.task, guess.reason, second)}
        fields |= {f"options.{field}": Choice(value) for field, value in guess.options.items()}
        fields |= {f"data.{field}": choice for field, choice in sample.fields.items()}
        fields |= _columns(sample, guess)
        fields |= _held_out(sample, guess)
        fields |= _checks(sample, guess)
        english = is_english(_texts_of(sample, guess))
        fields |= _model(guess.task, model, english=english, writes_tools=guess.has_tools)
        evaluation = _evaluation(sample, guess)
        fields |= _training(sample, guess, fields, evaluation["evaluation.metrics"].value[0], english=english)
        fields |= evaluation
        fields["release.registry"] = Choice(name)
        return fields | _gate(evaluation, self.few_rows)

    @property
    def few_rows(self) -> str:
        """Why no version can be promoted if the rows are too few; else empty."""
        rows, needed = self.test_rows, Gate().min_rows
        if rows is None or rows >= needed:
            return ""
        return f"about {rows} rows are held out for the test, and no version is promoted by fewer than {needed}"

    @property
    def test_rows(self) -> int | None:
        """About the number of rows that are held out for the test; None if none are, or if there are more rows than
        were looked at."""
        if "validation" in self.sample.splits or "test" in self.sample.splits or self.sample.rows >= SAMPLE_ROWS:
            return None
        return round(self.sample.rows * _share_held_out(self.sample))

    def _choose(self, task: str | None) -> TaskGuess:
        columns, tasks = _listed([*self.sample.columns]), [guess.task for guess in self.guesses]
        if not self.guesses:
            nested = [
                name for name, values in self.sample.columns.items() if any(isinstance(one, dict) for one in values)
            ]
            advice = "rows need a column of texts, and for most tasks one of labels"
            if nested:
                advice = f"{_listed(nested)} hold objects: give each value a column, as pandas.json_normalize does"
            message = (
                f"no task type fits rows with the columns {columns}: {advice}. Or write the recipe as in README.md."
            )
            raise UserError.of("option", "PATH", message)
        if task is not None and task not in tasks:
            message = f"{task!r} does not fit rows with the columns {columns}: choose from {', '.join(tasks)}."
            raise UserError.of("option", "--task", f"{message}{nearest(task, tasks)}")
        guess = self.guesses[0 if task is None else tasks.index(task)]
        label, refused = guess.data.get("label", ""), ""
        if guess.task == "sequence-classification" and len(guess.labels) == 1 and self.sample.rows < SAMPLE_ROWS:
            refused = f"has the value {guess.labels[0]!r} in all rows, and a classifier needs rows of another one"
        if guess.task == "regression" and any("," in str(value) for value in self.sample.columns[label]):
            refused = "has numbers with commas, which are not read: write 3.5 for 3,5 and 1234 for 1,234"
        if refused:
            others = ", ".join(other for other in tasks if other != guess.task)
            message = f"column {label!r} {refused}. Or choose another task by --task: {others}."
            raise UserError.of("option", "PATH", message)
        return guess


def find_rows(path: str, config: str | None = None) -> RowsFound:
    """Reads the first rows of a file, folder, glob, URL, data set of the Hub, or object.

    Args:
        path: of the rows, or `owner/name` of a data set.
        config: of the data set, if it has several.

    Raises UserError if there is nothing to read.
    """
    if is_on_hub(path):
        with explain_read_errors("dataset", path, "main"):
            found = look_up("dataset", path, None, History(path.rpartition("/")[2]))
            sample = sample_hub(path, found.pin.commit, config)
    else:
        sample = sample_rows(path)
    if sample.rows < 2 or sample.unreadable > sample.rows:
        message = (
            f"{path} has {_rows_in_words(sample)} that can be read; the columns are {_listed([*sample.columns])}. "
        )
        if sample.problems:
            message += (
                f"Problems: {', '.join(f'{check} in {count:,} rows' for check, count in sample.problems.items())}. "
            )
        raise UserError.of("option", "PATH", f"{message}A row is a line in CSV, and an object in JSON.")
    return RowsFound(sample, guess_tasks(sample.columns))


def _with_names(sample: FirstRows, guess: TaskGuess) -> tuple[FirstRows, TaskGuess]:
    """Names the columns of a file without a header by their roles."""
    if sample.has_names or "header" not in sample.fields:
        return sample, guess
    roles = dict(zip(guess.data.get("text", ()), ("text", "text_pair"), strict=False))
    roles |= {guess.data["label"]: "label"} if "label" in guess.data else {}
    roles |= {name: role for role, name in guess.data.get("columns", {}).items()}

    def renamed(value: object) -> object:
        if isinstance(value, list):
            return [roles.get(one, one) for one in value]
        if isinstance(value, dict):
            return {key: roles.get(one, one) for key, one in value.items()}
        return roles.get(value, value) if isinstance(value, str) else value

    header = sample.fields["header"]
    fields = {**sample.fields, "header": replace(header, value=renamed(header.value))}
    columns = {roles.get(name, name): values for name, values in sample.columns.items()}
    data = {key: renamed(value) for key, value in guess.data.items()}
    texts = [roles.get(name, name) for name in guess.texts]
    reason = guess.reason
    for name, role in roles.items():
        reason = reason.replace(repr(name), repr(role))
    return replace(sample, fields=fields, columns=columns), replace(guess, data=data, texts=texts, reason=reason)


def is_english(texts: Sequence[str]) -> bool:
    """Whether texts are English: in Latin letters without accents, with some of its commonest words."""
    text = " ".join(texts)
    letters = [one for one in text if one.isalpha()]
    words = re.findall(r"[a-z']+", text.lower())
    if not letters or not words or sum(not one.isascii() for one in letters) > len(letters) / 100:
        return not letters
    return sum(word in _ENGLISH_WORDS for word in words) >= len(words) / 25


def values_of(fields: Fields) -> dict[str, Any]:
    """The recipe with these fields, as nested mappings."""
    recipe: dict[str, Any] = {}
    for path, choice in fields.items():
        *sections, field = path.split(".")
        inner = recipe
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[field] = choice.value
    return recipe


def as_yaml(fields: Fields, header: Sequence[str]) -> str:
    """The deployment file with these fields; a guess has a comment with its reason and the second-best value.

    Names of files and columns, labels and values may be anybody's: in comments they are visible, on one line.
    """
    lines = [
        *(f"# {on_one_line(line)}" for line in header),
        "deployments:",
        f"- name: {_in_flow(fields['name'].value)}",
    ]
    lines += ["  entrypoint: flows.finetune:finetune", "  work_pool: {name: finetune}", "  parameters:", "    recipe:"]
    shown: list[str] = []
    for path, choice in fields.items():
        *sections, field = path.split(".")
        for depth, section in enumerate(sections):
            if shown[: depth + 1] != sections[: depth + 1]:
                lines.append(f"{' ' * (6 + 2 * depth)}{section}:")
                shown = sections[: depth + 1]
        shown = sections
        indent = " " * (6 + 2 * len(sections))
        if choice.reason:
            lines += _comment(f"{choice.reason}{f'; else {choice.second}' if choice.second else ''}", indent)
        lines.append(f"{indent}{field}: {_in_flow(choice.value)}")
    return "\n".join(lines) + "\n"


def _comment(text: str, indent: str) -> list[str]:
    words, lines = visible(text).split(), [f"{indent}#"]
    for word in words:
        if len(lines[-1]) + len(word) + 1 > 120:
            lines.append(f"{indent}#")
        lines[-1] += f" {word}"
    return lines


class _Dumper(yaml.SafeDumper):
    """Writes texts as PyYAML does, also after Prefect's commands were imported: those change all dumpers to write texts
    of several lines as blocks, which end a value in flow style."""


_Dumper.add_representer(str, yaml.representer.SafeRepresenter.represent_str)


def _in_flow(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1e}" if value < 1e-3 else repr(value)
    options: Any = {"Dumper": _Dumper, "default_flow_style": True, "width": 10**9, "sort_keys": False}
    written = yaml.dump(value, allow_unicode=True, **options)
    if yaml.safe_load(written) != value:  # of some line ends YAML makes others
        written = yaml.dump(value, allow_unicode=False, **options)
    return written.removesuffix("\n").removesuffix("\n...")


def _texts_of(sample: FirstRows, guess: TaskGuess) -> list[str]:
    return [text for name in guess.texts for value in sample.columns.get(name, ())[:1000] for text in _texts_in(value)]


def _texts_in(value: Any) -> list[str]:
    """The texts in a value: those of words are joined, those of messages are their contents."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return [" ".join(value)]
    if isinstance(value, list):
        return [str(one.get("content") or one.get("value") or "") for one in value if isinstance(one, Mapping)]
    return []


def _columns(sample: FirstRows, guess: TaskGuess) -> Fields:
    """The fields of `data` that name columns, with the labels found in them."""
    named = {name for value in guess.data.values() for name in _names_in(value)}
    others = [name for name in sample.columns if name not in named and not NO_INPUTS.search(name.lower())]
    second = f"another of {_listed(others)}" if others else ""
    reason = "chosen by the names and values of the columns" if others else ""
    fields = {
        f"data.{field}": Choice(value) if field == "checks" else Choice(value, reason, second)
        for field, value in guess.data.items()
    }
    if guess.labels and "label" in guess.data:
        there = "" if sample.rows < SAMPLE_ROWS else f" in the {_rows_in_words(sample)}"
        reason = f"{len(guess.labels):,} labels{there}, the most frequent first: {_listed(guess.labels)}"
        if len(guess.labels) == 1:
            reason = f"the {_rows_in_words(sample)} all have the label {guess.labels[0]}, as if sorted by it"
        fields["data.label"] = Choice(guess.data["label"], reason, second)
    return fields


def _names_in(value: Any) -> list[str]:
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else [value]
    return [one for one in values if isinstance(one, str)]


def _checks(sample: FirstRows, guess: TaskGuess) -> Fields:
    """Checks that would end the run and that few of the first rows fail: these rows are left out."""
    found = Counter({check: count for check, count in sample.problems.items() if LEVELS.get(check) == "error"})
    found += Counter(blank_text=_blanks(sample, guess.data.get("text") or ()))
    found += Counter(missing_label=_blanks(sample, [guess.data["label"]] if "label" in guess.data else []))
    few = {
        check: count
        for check, count in found.items()
        if check == "missing_label" or count <= sample.rows * _FEW_PROBLEMS  # rows often are labelled in part
    }
    levels = dict(guess.data.get("checks") or {}) | dict.fromkeys(few, "warning")
    if not few:
        return {}
    counts = " and ".join(f"{count:,} have {check}" for check, count in few.items())
    reason = f"of the {_rows_in_words(sample)}, {counts}: they are left out"
    return {"data.checks": Choice(levels, reason, "error, which ends the run")}


def _blanks(sample: FirstRows, names: Sequence[str]) -> int:
    """The rows without a value in one of these columns."""
    columns = [sample.columns[name] for name in names if name in sample.columns]
    return sum(any(value is None or not str(value).strip() for value in row) for row in zip(*columns, strict=True))


def _rows_in_words(sample: FirstRows) -> str:
    return f"{'first ' if sample.rows >= SAMPLE_ROWS else ''}{format_count(sample.rows, 'row')}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:MOST_NAMES]) + (f", … ({len(names):,})" if len(names) > MOST_NAMES else "")


def _share_held_out(sample: FirstRows) -> float:
    return min(0.2, max(0.1, round(100 / max(sample.rows, 1), 2)))


def _held_out(sample: FirstRows, guess: TaskGuess) -> Fields:
    """Shares of the train rows for the splits that have no files of their own, and the choice of these rows."""
    if "validation" in sample.splits:
        return {}
    size = _share_held_out(sample)
    split = _split(sample, guess)
    by, column = (split.value["by"], split.value["column"]) if split else ("rows", "")
    hashed = f"chosen by a hash of {column or ('their pixels' if guess.task in IMAGE_TASKS else 'their texts')}"
    reason = f"there is no file for {{}}: {size:.0%} of the rows, {'the newest' if by == 'time' else hashed}"
    fields = {"data.validation_size": Choice(size, reason.format("validation"), f"{size / 2:g}")}
    if "test" not in sample.splits:
        fields["data.test_size"] = Choice(size, reason.format("test"), f"{size / 2:g}")
    return fields | ({"data.split": split} if split else {})


def _split(sample: FirstRows, guess: TaskGuess) -> Choice | None:
    """Rows are held out by a column that looks like a group, or by a time with which labels change."""
    if guess.group:
        reason = f"the rows of one {guess.group} are its candidates, which are ranked together"
        return Choice({"by": "group", "column": guess.group}, reason, "null, which divides them")
    named = {name for value in guess.data.values() for name in _names_in(value)}
    others = {name: values for name, values in sample.columns.items() if name not in named}
    labels = sample.columns[guess.data["label"]] if guess.labels and isinstance(guess.data.get("label"), str) else None
    texts = sample.columns[guess.texts[0]] if guess.texts else None
    signs = SplitSigns()
    signs.add(
        {name: pa.array(map(_plain_text, values), pa.string()) for name, values in others.items()},
        None if labels is None else pa.array([str(label) for label in labels], pa.string()),
        None if texts is None else pa.array([" ".join(_texts_in(text)) for text in texts], pa.string()),
        np.random.default_rng(0).random(sample.rows) < 0.2,
    )
    if group := signs.groups():
        reason = f"rows with one {group.column} share {group.agreement:.0%} of their {group.of}, and any two rows "
        reason += f"{group.chance:.0%}, so one of them in train would give away the others"
        return Choice({"by": "group", "column": group.column}, reason, "null, if the model meets the same ones again")
    if time := signs.times():
        reason = f"labels change with {time.column}: {time.label!r} is {time.newest:.0%} of the newest rows and "
        reason += f"{time.before:.0%} of those before"
        return Choice({"by": "time", "column": time.column}, reason, "null, which holds out rows of all times")
    return None


def _plain_text(value: Any) -> str | None:
    """A single value as text; None for lists and objects."""
    if isinstance(value, date):
        return value.isoformat()
    return str(value) if isinstance(value, str | int | float) else None


def _model(task: str, model: str, *, english: bool, writes_tools: bool) -> Fields:
    if model == SCRATCH:
        config = {**_OF_SCRATCH.get(task, {"model_type": "bert", **_SMALL}), "vocab_size": 8000}
        config = _SMALL_VIT if task in IMAGE_TASKS else config
        pretrained = base_models(task, english=english and not writes_tools)["small"]
        second = f"source: hub, path: {pretrained.path}, a pretrained model ({pretrained.memory_gb:.1f} GB of memory)"
        reason = "random weights, to try the recipe without a network"
        template = {"model.chat_template": Choice(_CHAT_TEMPLATE)} if task in _ANSWERING else {}
        return {"model.source": Choice("scratch", reason, second), "model.config": Choice(config), **template}
    if Path(model).expanduser().is_dir():
        return {"model.source": Choice("folder"), "model.path": Choice(model)}
    if model not in SIZES:
        return {"model.source": Choice("hub"), "model.path": Choice(model)}
    offered = base_models(task, english=english and not writes_tools)
    size: Size = next(one for one in SIZES if one == model)
    chosen = offered[size]
    language = "the texts are English" if english else "the texts are not English, or not only"
    language = "its chat template writes tools" if writes_tools else language
    language = "" if task in IMAGE_TASKS else f"{language}; "
    about = f"{language}{chosen.parameters / 1e6:,.0f} M parameters, {chosen.license}, "
    about += f"{chosen.memory_gb:.1f} GB of memory and more for the batch"
    second = "; ".join(
        f"{other} {offered[other].path} ({offered[other].memory_gb:.1f} GB)" for other in SIZES if other != size
    )
    return {"model.source": Choice("hub"), "model.path": Choice(chosen.path, about, second)}


def _training(sample: FirstRows, guess: TaskGuess, fields: Fields, metric: str, *, english: bool) -> Fields:
    model = StartingModel.of(
        {name: fields[f"model.{name}"].value for name in ("source", "path", "config") if f"model.{name}" in fields}
    )
    found: Fields = {}
    if guess.task in IMAGE_TASKS:
        rows, second = _ROWS_OF_IMAGES, str(2 * _ROWS_OF_IMAGES)
        batch = Choice(rows, "usual for images; a run that lacks memory halves the batch", second)
    else:
        length = _length(sample, guess, fields, model, english=english)
        rows, batch = _batch(guess, fields, model, length.value * guess.candidates)
        found["tokens.max_length"] = length
    is_scratch = fields["model.source"].value == SCRATCH
    steps, most = _STEPS[is_scratch]
    few = sample.rows < SAMPLE_ROWS
    epochs = min(most, max(_EPOCHS, math.ceil(steps * rows / max(1, sample.rows)))) if few else _EPOCHS
    reason, second = "two to five passes over the rows are usual, and the best checkpoint is kept", "2"
    if epochs > _EPOCHS:
        passes = f"few rows need more passes: {epochs} are about {epochs * sample.rows // rows:,} steps"
        reason, second = f"{passes}, and the best checkpoint is kept", str(_EPOCHS)
    found["training.num_train_epochs"] = Choice(epochs, reason, second)
    rate = 1e-3 if is_scratch else _LEARNING_RATES.get(guess.task, 5e-5)
    reason = "high, since nothing learnt before is at stake" if is_scratch else "the usual rate of full fine-tuning"
    found["training.learning_rate"] = Choice(rate, reason, _in_flow(rate / 2))
    found["training.per_device_train_batch_size"] = batch
    found["training.warmup_steps"] = Choice(0.06, "the learning rate rises in the first 6% of the steps", "0")
    if guess.task not in _CHOOSE_BY_LOSS:
        reason = "the checkpoint of the epoch with the best value on validation is kept"
        found["training.metric_for_best_model"] = Choice(metric, reason, "null, which keeps that with the lowest loss")
    return found


def _length(sample: FirstRows, guess: TaskGuess, fields: Fields, model: StartingModel, *, english: bool) -> Choice:
    """The longest text in tokens, from the tokens of the rows, or else their characters."""
    texts = [
        [_as_text(value, guess) for value in values]
        for values in zip(*(sample.columns[name] for name in guess.texts), strict=True)
    ]
    writes = guess.task in _ANSWERING
    around = (_TOKENS_ABOUT_TOOLS if guess.has_tools else 0) + (_TOKENS_ABOUT_MESSAGES if writes else 0)
    lengths = model.tokens(texts, special=not writes)
    counted_by = "by the model's tokenizer"
    if lengths is None:
        counted_by = "guessed from their characters, because the model's tokenizer is not on this machine"
        if model.folder is None and model.config:
            counted_by = "guessed from their characters, because the run makes the tokenizer"
        each = _CHARACTERS_OF_TOKEN[english]
        lengths = [math.ceil(sum(map(len, row)) / each) + 4 * len(row) for row in texts]
    lengths = sorted(length + around for length in lengths) or [128]
    longest = lengths[min(len(lengths) - 1, len(lengths) * 99 // 100)]
    length = next((one for one in _LENGTHS if one >= longest), _LENGTHS[-1])
    offered = [
        one
        for one in base_models(guess.task, english=english).values()
        if one.path == fields.get("model.path", Choice("")).value
    ]
    limit = min([one for one in (model.max_length, *(one.max_length for one in offered)) if one], default=None)
    reason = f"99 of 100 rows have at most {longest:,} tokens, {counted_by}"
    if limit is not None and limit < length:
        length = limit
        reason += f"; the model reads {length:,} at most, and longer texts are cut"
    shorter = max((one for one in _LENGTHS if one < length), default=length // 2)
    cut = sum(one > shorter for one in lengths) / len(lengths)
    second = f"{shorter}, which is faster and cuts {cut:.0%} of the rows"
    longer = next((one for one in _LENGTHS if one > length), 2 * length)
    if cut > 0.5 and (limit is None or longer <= limit):
        second = f"{longer}, if further rows are longer"
    return Choice(length, reason, second)


def _as_text(value: Any, guess: TaskGuess) -> str:
    """A value whose tokens are counted; of a list of candidates the longest."""
    if isinstance(value, str):
        return value
    if guess.task == "reranking" and isinstance(value, list):
        return max(map(str, value), key=len, default="")
    return " ".join(_texts_in(value)) or json.dumps(value, default=str)


def _batch(guess: TaskGuess, fields: Fields, model: StartingModel, length: int) -> tuple[int, Choice]:
    """The rows of a batch, by its tokens and by the memory."""
    rows = 2 ** max(0, min(5, int(math.log2(max(1, _TOKENS_OF_BATCH / length)))))
    reason = f"at most {_TOKENS_OF_BATCH:,} tokens a batch"
    here, parameters = memory_here(), model.parameters or 0
    writes = guess.task in _WRITING
    needed = model.memory_bytes(parameters, rows, length, writes=writes)
    if needed is None or here is None:
        reason += "; a run that lacks memory halves the batch"
    else:
        while rows > 1 and needed is not None and needed > here * _SHARE_OF_MEMORY:
            rows //= 2
            needed = model.memory_bytes(parameters, rows, length, writes=writes)
            reason = f"larger ones need more than {_SHARE_OF_MEMORY:.0%} of the {as_text(here)} of memory here"
        reason += f", about {as_text(needed or 0)} of memory; a run that lacks memory halves the batch"
    return rows, Choice(rows, reason, str(max(1, rows // 2)))


def _evaluation(sample: FirstRows, guess: TaskGuess) -> Fields:
    splits = [split for split in ("validation", "test") if split in sample.splits]
    if "validation" not in sample.splits:
        splits = ["validation", "test"]
    metrics = [*_METRICS.get(guess.task, _OTHER_METRICS)]
    reason, second = "the usual ones of the task type", f"[{', '.join(reversed(metrics))}]"
    if guess.task == "sequence-classification" and len(guess.labels) > 1:
        counts = [sum(str(one) == label for one in sample.columns[guess.data["label"]]) for label in guess.labels[:1]]
        share = counts[0] / max(1, sample.rows)
        if share > 0.8:
            metrics.reverse()
            reason = f"{share:.0%} of the rows are {guess.labels[0]!r}, so accuracy says little"
            second = "[accuracy, f1_macro]"
    if guess.task == "sft" and "tools" in guess.texts and sum(map(bool, sample.columns["tools"])) > sample.rows / 2:
        reason += f"; {TOOL_METRICS[0]} is of the calls that the trained model makes, and answers take time"
        second = f"[{TOOL_METRICS[0]}, {', '.join(metrics)}]"
        metrics.append(TOOL_METRICS[0])
    about = "the last one judges the model: validation has chosen the checkpoint" if "test" in splits else ""
    return {
        "evaluation.splits": Choice(splits, about, "[test]" if about else ""),
        "evaluation.metrics": Choice(metrics, reason, second),
    }


def _gate(evaluation: Fields, few_rows: str) -> Fields:
    """A version is promoted if it is better than the champion, or at first than the baseline."""
    metric, splits = evaluation["evaluation.metrics"].value[0], evaluation["evaluation.splits"].value
    first = "BM25" if metric in metrics_for(RANKINGS) else "the best constant answer"
    reason = f"a version becomes the champion if it beats the present one, or at first {first}, by "
    reason += f"{metric} on {splits[-1]} with 95% confidence"
    reason += f". But {few_rows}" if few_rows else ""
    others = evaluation["evaluation.metrics"].value[1:]
    minimum = "the first run shows what can be reached; a version below a bound is not registered"
    return {
        "release.gate.compare": Choice(metric, reason, others[0] if others else "another metric"),
        "release.gate.minimum": Choice({}, minimum, f"a bound, such as {{{metric}: 0.8}}"),
    }
