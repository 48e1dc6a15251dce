"""A tiny recipe for each task type, on rows that are made up: what `make matrix` tries with every strategy, and `make
drill` from the rows to a registered model that answers.

A task type more is an entry of TINY more, and so is another way to train one.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from tests.training import programs_here
from tests.training.tiny import CONFIG, LABELS, WORDS
from training.jobs.protocol import Events, Job

Row = dict[str, Any]
EVERY_WORD = sorted(word for words in WORDS.values() for word in words)
GERMAN = {"cat": "Katze", "dog": "Hund", "red": "rot", "tall": "groß", "runs": "rennt", "sleeps": "schläft"}
ROWS = {"train": 150, "validation": 60}
OF_TEXTS = {"text": ["text"], "label": "label"}
ANSWERED = {"columns": {"prompt": "prompt", "completion": "completion"}}
GPT2 = CONFIG | {"model_type": "gpt2"}
CORNERS = ["bottom", "left", "top"]
VIT = {"model_type": "vit", "image_size": 16, "patch_size": 4, "hidden_size": 32, "num_hidden_layers": 2}
VIT |= {"num_attention_heads": 2, "intermediate_size": 64}
T5 = {"model_type": "t5", "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 120}


@dataclass(frozen=True)
class Tiny:
    """In what a task type's recipe differs from that of another."""

    row: Callable[[random.Random], Row]
    """A row, as the draws have it."""
    data: dict[str, Any]
    """The fields of the recipe's data section that name columns."""
    metrics: list[str]
    config: dict[str, Any] = field(default_factory=lambda: CONFIG)
    """Of the model, which is made from nothing."""
    options: dict[str, Any] = field(default_factory=dict)
    epochs: int = 12
    task: str = ""
    """The task type; empty if the recipe has its name."""


def labelled(draw: random.Random) -> Row:
    """Words of the label's sort, and some of any."""
    label = draw.choice(LABELS)
    return {"text": " ".join([*draw.choices(WORDS[label], k=2), *_words(draw)]), "label": label}


def many_labels(draw: random.Random) -> Row:
    """Labelled by each sort that there is a word of, perhaps none."""
    words = draw.choices([*EVERY_WORD, *["thing"] * 6], k=draw.randrange(1, 6))
    return {"text": " ".join(words), "label": [sort for sort in LABELS if {*words} & {*WORDS[sort]}]}


def rated(draw: random.Random) -> Row:
    """By how many animals there are."""
    words = draw.choices(EVERY_WORD, k=draw.randrange(1, 6))
    return {"text": " ".join(words), "label": sum(word in WORDS["animal"] for word in words) / 2}


def tagged(draw: random.Random) -> Row:
    """Spans of animals and of tools, and food, which is none."""
    sorts = draw.choices(LABELS, k=draw.randrange(1, 10))
    tags = [
        "O" if sort == "food" else f"{'I' if sort == before else 'B'}-{sort.upper()}"
        for before, sort in pairwise([None, *sorts])
    ]
    return {"text": [draw.choice(WORDS[sort]) for sort in sorts], "label": tags}


def recited(draw: random.Random) -> Row:
    """Words in an order that never changes, from any of them on."""
    start = draw.randrange(len(EVERY_WORD))
    return {"text": " ".join((EVERY_WORD * 2)[start : start + draw.randrange(4, 17)])}


def translated(draw: random.Random) -> Row:
    """Word by word."""
    words = draw.choices(list(GERMAN), k=draw.randint(1, 6))
    return {"source": " ".join(words), "target": " ".join(map(GERMAN.__getitem__, words))}


def completed(draw: random.Random) -> Row:
    """The same, as prompt and completion."""
    row = translated(draw)
    return {"prompt": row["source"], "completion": f" {row['target']}"}


def preferred(draw: random.Random) -> Row:
    """The translation of the prompt, and that of other words."""
    row, other = translated(draw), translated(draw)
    rejected = other["target"] if other["target"] != row["target"] else "Maus"
    return {"prompt": row["source"], "chosen": f" {row['target']}", "rejected": f" {rejected}"}


def rated_translation(draw: random.Random) -> Row:
    """The translation of the prompt, which is desirable, or that of other words, which is not."""
    pair, is_right = preferred(draw), draw.random() < 0.5
    return {"prompt": pair["prompt"], "completion": pair["chosen" if is_right else "rejected"], "label": is_right}


def paired(draw: random.Random) -> Row:
    """Words and their translation."""
    row = translated(draw)
    return {"anchor": row["source"], "positive": row["target"]}


def scored_pair(draw: random.Random) -> Row:
    """Two texts, by the share of their words that are of one sort."""
    first, second = draw.choice(LABELS), draw.choice(LABELS)
    texts = [" ".join(draw.choices(WORDS[label], k=draw.randrange(1, 5))) for label in (first, second)]
    return {"sentence1": texts[0], "sentence2": texts[1], "score": 1.0 if first == second else 0.1}


def candidates(draw: random.Random) -> Row:
    """A sort, and texts of words of some sorts, one of which at least is that."""
    sorts = [wanted := draw.choice(LABELS), *draw.choices(LABELS, k=draw.randint(1, 3))]
    draw.shuffle(sorts)
    documents = [" ".join(draw.choices(WORDS[sort], k=3)) for sort in sorts]
    return {"query": f"some {wanted}", "documents": documents, "labels": [float(sort == wanted) for sort in sorts]}


def drawn_image(draw: random.Random) -> Row:
    """A bright square in one of the corners, in the dark."""
    from tests.training.pictures import data_url, square

    corner = draw.choice(CORNERS)
    return {"image": data_url(square(corner, draw)), "label": corner}


def choices(draw: random.Random) -> Row:
    """The name of a sort of words, and choices of two words each, one choice of that sort."""
    right, *others = draw.sample(LABELS, draw.randint(2, len(LABELS)))
    words = {sort: " ".join(draw.choices(WORDS[sort], k=2)) for sort in draw.sample([right, *others], 1 + len(others))}
    return {"context": f"some {right}", "choices": [*words.values()], "label": [*words].index(right)}


def asked(draw: random.Random) -> Row:
    """A text of words of different sorts, and a question for the word of one sort, which may be missing."""
    wanted, there = draw.choice(LABELS), draw.sample(LABELS, draw.randint(2, len(LABELS)))
    words = {sort: draw.choice(WORDS[sort]) for sort in there}
    context = " ".join(words.values())
    found = [words[wanted]] if wanted in words else []
    answers = {"text": found, "answer_start": [f" {context} ".index(f" {word} ") for word in found]}
    return {"question": f"some {wanted}", "context": context, "answers": answers}


def drawn_corners(draw: random.Random) -> Row:
    """Bright squares in some of the corners, perhaps in none."""
    from tests.training.pictures import data_url, squares

    corners = [corner for corner in CORNERS if draw.random() < 0.5]
    return {"image": data_url(squares(dict.fromkeys(corners, 220), draw)), "label": corners}


def drawn_brightness(draw: random.Random) -> Row:
    """A square, and how bright it is."""
    from tests.training.pictures import data_url, squares

    level = draw.randrange(60, 256)
    return {"image": data_url(squares({"left": level}, draw)), "label": level / 100}


def _words(draw: random.Random) -> list[str]:
    return draw.choices(EVERY_WORD, k=draw.randrange(12))


TINY: dict[str, Tiny] = {
    "sequence-classification": Tiny(labelled, OF_TEXTS, ["accuracy", "f1"]),
    "multi-label-classification": Tiny(many_labels, OF_TEXTS, ["roc_auc", "log_loss"]),
    "regression": Tiny(rated, OF_TEXTS, ["mse", "spearman"]),
    "token-classification": Tiny(tagged, OF_TEXTS, ["f1", "accuracy"]),
    "causal-lm": Tiny(recited, {"text": ["text"]}, ["perplexity", "token_accuracy"], GPT2, epochs=32),
    "masked-lm": Tiny(recited, {"text": ["text"]}, ["perplexity", "token_accuracy"]),
    "span-corruption": Tiny(recited, {"text": ["text"]}, ["perplexity", "token_accuracy"], T5, epochs=32),
    "seq2seq": Tiny(translated, {}, ["chrf", "exact_match"], T5, {"max_new_tokens": 12}),
    "sft": Tiny(completed, ANSWERED, ["perplexity", "token_accuracy"], GPT2, {"max_new_tokens": 12}, epochs=24),
    "preference": Tiny(preferred, {}, ["accuracy", "margin"], GPT2, {"max_new_tokens": 12}),
    "kto": Tiny(
        rated_translation,
        {"label": "label"},
        ["roc_auc", "margin"],
        GPT2,
        {"max_new_tokens": 12, "beta": 1.0},
        epochs=24,
    ),
    "embedding": Tiny(paired, {}, ["ndcg_at_10", "mrr_at_10"]),
    "sentence-similarity": Tiny(scored_pair, {}, ["spearman", "pearson"]),
    "reward-modeling": Tiny(preferred, {}, ["accuracy", "margin"], GPT2),
    "reranking": Tiny(
        candidates,
        {"columns": {"query": "query", "documents": "documents", "labels": "labels"}},
        ["ndcg_at_10", "mrr_at_1"],
        options={"loss": "lambda"},
    ),
    "image-classification": Tiny(drawn_image, {"label": "label"}, ["accuracy", "f1"], VIT),
    "multiple-choice": Tiny(choices, {"label": "label"}, ["accuracy", "log_loss"], epochs=24),
    "question-answering": Tiny(
        asked, {}, ["f1", "exact_match"], options={"stride": 2, "max_answer_tokens": 2, "no_answer": True}, epochs=24
    ),
    "image-multi-label-classification": Tiny(drawn_corners, {"label": "label"}, ["roc_auc", "log_loss"], VIT),
    "image-regression": Tiny(drawn_brightness, {"label": "label"}, ["mse", "spearman"], VIT),
    "few-labels": Tiny(
        labelled, OF_TEXTS, ["accuracy", "f1"], options={"contrastive": True}, task="sequence-classification"
    ),
    "labelled-texts": Tiny(
        labelled, OF_TEXTS, ["ndcg_at_10", "mrr_at_10"], options={"loss": "batch_all_triplet"}, task="embedding"
    ),
}
"""By the name of the recipe."""


def recipe_of(name: str, rows: Path, **training: Any) -> dict[str, Any]:
    """The recipe of this name for these rows, with additional settings of training."""
    tiny = TINY[name]
    usual = {"num_train_epochs": tiny.epochs, "learning_rate": 3e-3, "per_device_train_batch_size": 20}
    return {
        "name": name,
        "task": tiny.task or name,
        "options": tiny.options,
        "data": {
            "source": "json",
            "path": str(rows),
            "checks": dict.fromkeys(("duplicates", "conflicting_labels", "shared_rows"), "ignore"),
            **tiny.data,
        },
        "model": {"source": "scratch", "config": tiny.config},
        **({} if tiny.config is VIT else {"tokens": {"max_length": 32}}),
        "training": {**usual, **training},
        "evaluation": {"splits": ["validation"], "metrics": tiny.metrics},
        "release": {"registry": name},
    }


def write_rows(task: str, folder: Path, row: Callable[[random.Random], Row] | None = None) -> Path:
    """The files of the task type's rows, or of others, in this folder."""
    folder.mkdir(parents=True)
    draw, make = random.Random(7), row or TINY[task].row
    for split, count in ROWS.items():
        rows = [json.dumps(make(draw), ensure_ascii=False) for _ in range(count)]
        (folder / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def write_project(task: str, folder: Path) -> Path:
    """Rows and a deployment file in this folder; gives the file."""
    rows = write_rows(task, folder / "rows")
    entry = {"name": task, "entrypoint": "flows.finetune:finetune", "parameters": {"recipe": recipe_of(task, rows)}}
    (folder / "tiny.yaml").write_text(yaml.safe_dump({"deployments": [entry]}, sort_keys=False))
    return folder / "tiny.yaml"


def make_world(task: str, home: Path) -> Path:
    """The outputs of the stages before fit for the task type's rows."""
    return build_world(recipe_of(task, write_rows(task, home / "rows")), home)


def build_world(values: Row, home: Path) -> Path:
    """The output of the stages before fit for a recipe with a model from scratch and the rows in home/rows: data/,
    base/output/{model,tokenizer}/ and tokens/."""
    from training.data.load_rows import load
    from training.programs import create_image_model, create_model, process_images
    from training.recipe import parse
    from training.recipe.rules.column_rules import source_columns
    from training.tokenization.token_files import tokenize

    recipe, rows = parse(values), home / "rows"
    columns = source_columns(recipe)
    load(recipe.data, columns.task_type, {split: [str(rows / f"{split}.jsonl")] for split in ROWS}, home / "data")
    (home / "base/output").mkdir(parents=True)
    if columns.has_images:
        settings = {"config": recipe.model.config, "seed": recipe.model.seed}
        programs_here.run(create_image_model, home / "base", {}, **settings)
        inputs = {"data": home / "data", "tokenizer": home / "base/output/tokenizer"}
        programs_here.run(process_images, home / "processed", inputs, **recipe.task_and_options)
        (home / "processed/output").rename(home / "tokens")
        return home
    settings = {
        "config": recipe.model.config,
        "seed": recipe.model.seed,
        "texts": columns.texts,
        "writes": columns.task_type.generates_text,
        "sentinels": columns.task_type.sentinels,
    }
    job = Job(
        program="training.programs.create_model", key="base", settings=settings, inputs={"data": str(home / "data")}
    )
    create_model.main(home / "base", job, Events(home / "base/events.jsonl"))
    tokens = home / ("tokenized" if getattr(columns.task_type, "needs_reference", False) else "tokens")
    tokenize(columns.task_type, home / "data", home / "base/output/tokenizer", tokens, recipe.tokens.max_length)
    if getattr(columns.task_type, "needs_reference", False):
        add_reference(recipe, home)
    return home


def add_reference(recipe: Any, home: Path) -> None:
    """Writes tokens/: the rows of tokenized/ with the log-probabilities of the base model."""
    from training.programs import reference_logprobs

    settings = {**recipe.task_and_options, "batch_size": 16, "mixed_precision": "no"}
    folders = {"model": "base/output/model", "tokenizer": "base/output/tokenizer", "tokens": "tokenized"}
    inputs = {name: str(home / folder) for name, folder in folders.items()}
    job = Job(program=reference_logprobs.__name__, key="reference", settings=settings, inputs=inputs)
    (home / "reference/output").mkdir(parents=True)
    reference_logprobs.main(home / "reference", job, Events(home / "reference/events.jsonl"))
    (home / "reference/output").rename(home / "tokens")


def fit_job(task: str, world: Path, job_dir: Path, compute: dict[str, Any], **training: Any) -> Path:
    """A job of training.programs.fit on such a world; `compute` names strategy and num_processes."""
    values = recipe_of(task, world / "rows", **training) | {"compute": {**compute, "mixed_precision": "no"}}
    return write_fit_job(values, world, job_dir)


def write_fit_job(values: Row, world: Path, job_dir: Path, **settings: Any) -> Path:
    """The same for any recipe whose number of processes and precision are not `auto`; `settings` replace those of the
    program."""
    from training.recipe import parse

    recipe = parse(values)
    resolved = {name: getattr(recipe.compute, name) for name in ("num_processes", "mixed_precision")}
    settings = {
        **recipe.task_and_options,
        "labels": json.loads((world / "data/labels.json").read_text()),
        "max_length": recipe.tokens.max_length,
        "training": recipe.training.model_dump(mode="json"),
        "compute": recipe.compute.weight_settings() | resolved,
        "metrics": recipe.evaluation.metrics,
        "micro_batch_divisor": 1,
        **settings,
    }
    base = world / "base/output"
    inputs = {"model": base / "model", "tokenizer": base / "tokenizer", "tokens": world / "tokens"}
    paths = {name: str(path) for name, path in inputs.items()}
    Job(program="training.programs.fit", key=job_dir.name, settings=settings, inputs=paths).write(job_dir)
    return job_dir
