"""Memory that the examples of popular models need, by the estimate of `finetune plan`.

Each model has the published sizes and random weights, and its rows fill `tokens.max_length`, the worst case. The
estimate tries a quarter and half of a batch on this machine; the memory of a whole one follows. Without a GPU,
activations are those of the CPU's kernels, and the memory of libraries is not that of CUDA.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.jobs.commands import python_argv
from tasks.jobs.hardware import mixed_precision
from tests.benchmarks.subject import Subject, run, write_job
from tests.benchmarks.table import ROOT, Row
from training import task_types
from training.data.load_rows import load
from training.recipe import Compute, Recipe
from training.recipe.validation import load as load_recipe
from training.tokenization.token_files import tokenize

ROWS = 64
WORDS = 200
GPUS_GB = (24, 80)
DECODER = {"max_position_embeddings": 8192, "tie_word_embeddings": True}
# From the config.json of each model.
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {
        **DECODER,
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151_936,
    },
    "llama": {
        **DECODER,
        "model_type": "llama",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
        "vocab_size": 128_256,
    },
    "modernbert": {
        "model_type": "modernbert",
        "hidden_size": 768,
        "num_hidden_layers": 22,
        "num_attention_heads": 12,
        "intermediate_size": 1152,
        "max_position_embeddings": 8192,
        "vocab_size": 50_368,
    },
    "xlm-roberta": {
        "model_type": "xlm-roberta",
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "max_position_embeddings": 514,
        "type_vocab_size": 1,
        "vocab_size": 250_002,
    },
}


def measure(subject: Subject) -> list[Row]:
    """The memory of each example, within 24 GB, and the rows that would fit."""
    return [_measure(subject.folder / "examples" / name, name) for name in CONFIGS]


def _measure(folder: Path, name: str) -> Row:
    recipe = load_recipe(ROOT / "deployments" / "examples" / f"{name}.yaml")
    task_type = task_types.load(recipe.task, recipe.options)
    folder.mkdir(parents=True)
    file = str(folder / "rows.parquet")
    pq.write_table(_rows(recipe), file)
    fields = {"source": "parquet", "path": file, "config": None, "limit": None, "holdout": None}
    load(recipe.data.model_copy(update=fields), task_type, {"train": [file], "validation": [file]}, folder / "data")
    _create(name, recipe, folder)
    tokenize(task_type, folder / "data", folder / "tokenizer", folder / "tokens", recipe.tokens.max_length)
    settings = {
        **recipe.task_and_options,
        "labels": ["O", "B-X"] if recipe.task == "token-classification" else ["a", "b"] if recipe.data.label else [],
        "max_length": recipe.tokens.max_length,
        "compute": {**Compute().weight_settings(), "num_processes": 1, "mixed_precision": mixed_precision()},
        "metrics": recipe.evaluation.metrics,
    }
    batch, tried = recipe.training.per_device_train_batch_size, []
    few = max(1, batch // 4)
    for rows in (few, 2 * few):
        training = recipe.training.model_copy(update={"per_device_train_batch_size": rows})
        job = folder / f"job-{rows}"
        inputs = {part: folder / part for part in ("model", "tokenizer", "tokens")}
        values = settings | {"training": training.model_dump(mode="json")}
        write_job(job, "training.programs.estimate", values, inputs)
        tried.append(run(job, python_argv("training.programs.estimate")))
    found, (fewer, more) = tried[0], (figures["memory_mb"] / 1e3 for figures in tried)
    a_row = (more - fewer) / few
    needed = fewer + (batch - few) * a_row
    fit = " and ".join(f"{int((size - needed) / a_row) + batch} on {size} GB" for size in GPUS_GB)
    how = f"{found['parameters'] / 1e6:,.0f} million weights, {found['trainable'] / 1e6:,.0f} million trained; {batch} "
    how += f"rows of {recipe.tokens.max_length:,} tokens, {a_row:.2f} GB each; {fit} fit"
    return Row(f"examples/{name}.yaml: memory", needed, how, unit="GB", most=GPUS_GB[0])


def _rows(recipe: Recipe) -> pa.Table:
    """Rows of the example's columns, each longer than tokens.max_length."""
    words = [f"word{number % WORDS}" for number in range(recipe.tokens.max_length)]
    text, data = " ".join(words), recipe.data
    if recipe.task == "token-classification":
        columns: dict[str, list[Any]] = {data.text[0]: [words], data.label or "": [["O", *["B-X"] * (len(words) - 1)]]}
    elif recipe.task == "sft":
        turns = [{"role": "user", "content": "word1"}, {"role": "assistant", "content": text}]
        parts = {"messages": turns, "instruction": "word1", "input": "", "output": text}
        columns = {column: [parts[name]] for name, column in data.columns.items()}
    else:
        return pa.table({data.text[0]: [text] * ROWS, data.label: ["a", "b"] * (ROWS // 2)})
    return pa.table({name: values * ROWS for name, values in columns.items()})


def _create(name: str, recipe: Recipe, folder: Path) -> None:
    """A model of the published sizes with random weights, and a small tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModel

    from training.programs.create_model import learner, save_tokenizer
    from training.tokenization.special_tokens import SPECIAL

    texts = [f"word{number}" for number in range(WORDS)]
    writes = recipe.task == "sft"
    tokenizer = learner(writes=writes, sentinels=0)(lambda: iter(texts), WORDS * 5)
    values = {key: value for key, value in CONFIGS[name].items() if key != "model_type"}
    config = AutoConfig.for_model(
        CONFIGS[name]["model_type"],
        **values,
        pad_token_id=tokenizer.token_to_id(SPECIAL["pad_token"]),
        bos_token_id=tokenizer.token_to_id(SPECIAL["cls_token"]),
        eos_token_id=tokenizer.token_to_id(SPECIAL["sep_token"]),
    )
    save_tokenizer(tokenizer, None, folder / "tokenizer")
    if writes:
        template = (ROOT / "deployments" / "examples" / "chat.jinja").read_text()
        (folder / "tokenizer" / "chat_template.jinja").write_text(template)
    with torch.no_grad():
        AutoModel.from_config(config, dtype=torch.float32).save_pretrained(folder / "model")
