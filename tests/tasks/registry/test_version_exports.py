"""Registered versions as folders: a generator for vLLM, llama.cpp's converter and Ollama, an embedder as ONNX."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.architectures import ARCHITECTURES
from tests.fork_server import call
from tests.task_types import build_world, recipe_of, write_rows

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
SHARD = "40kB"


def write_and_read(home: Path) -> dict[str, Any]:
    """Saves a tiny Llama for conversations as MLflow has it, in several files, exports it, and reads the folder."""
    import mlflow
    import torch
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tasks.registry import version_exports
    from training.jobs.protocol import OUTPUT, Events, Job
    from training.models.loading import export, load_for_training, load_tokenizer
    from training.task_types import load

    config = {"model_type": "llama", "tie_word_embeddings": True, **ARCHITECTURES["llama"].config}
    recipe = recipe_of("sft", write_rows("sft", home / "rows")) | {"model": {"source": "scratch", "config": config}}
    base = build_world(recipe, home) / "base/output"
    (base / "tokenizer/chat_template.jinja").write_text(TEMPLATE)
    trained = load_for_training(load("sft"), base / "model", [], load_tokenizer(base / "tokenizer"), seed=1)
    export(trained, base / "tokenizer", home / "model")
    mlflow.transformers.save_model(
        {
            "model": AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.float32),
            "tokenizer": AutoTokenizer.from_pretrained(home / "model"),
        },
        str(home / "logged"),
        task="text-generation",
        pip_requirements=["torch"],
    )
    settings = {"task": "sft", "options": {"max_new_tokens": 7}, "export": "safetensors", "max_length": 64}
    inputs = {"model": str(home / "logged/model"), "tokenizer": str(home / "logged/components/tokenizer")}
    (home / "job" / OUTPUT).mkdir(parents=True)
    job = Job(program=version_exports.__name__, key="export", settings=settings, inputs=inputs)
    version_exports.main(home / "job", job, Events(home / "job/events.jsonl"))
    out = home / "job" / OUTPUT
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    with safe_open(out / "model.safetensors", "pt") as file:
        weights = {name: str(file.get_tensor(name).dtype) for name in file.keys()}  # noqa: SIM118
    return {
        "shards": len(list((home / "logged/model").glob("*.safetensors"))),
        "files": sorted(file.name for file in out.iterdir()),
        "weights": weights,
        "same": all(torch.equal(value, trained.state_dict()[name]) for name, value in loaded.state_dict().items()),
        "config": json.loads((out / "config.json").read_text()),
        "generation": json.loads((out / "generation_config.json").read_text()),
        "vocabulary": len(json.loads((out / "tokenizer.json").read_text())["model"]["vocab"]),
        "chat": tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False),
        "end": [tokenizer.eos_token_id, trained.generation_config.eos_token_id],
    }


def test_a_generator_is_one_file_of_weights_with_its_template_and_generation_settings(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("MLFLOW_HUGGINGFACE_MODEL_MAX_SHARD_SIZE", SHARD)
    found = call(write_and_read, tmp_path)
    assert found["shards"] > 1 and found["same"]
    needed = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert needed <= {*found["files"]} and not [name for name in found["files"] if "index" in name]
    config = found["config"]
    assert config["architectures"] == ["LlamaForCausalLM"] and config["tie_word_embeddings"]
    # Tied weights are stored once: readers take the embeddings for the head.
    assert "model.embed_tokens.weight" in found["weights"] and "lm_head.weight" not in found["weights"]
    assert {*found["weights"].values()} == {"torch.float32"}
    assert found["chat"] == "user: Hi\n" and found["vocabulary"] == config["vocab_size"]
    assert found["generation"]["max_new_tokens"] == 7
    assert found["generation"]["eos_token_id"] == found["end"][1]


def write_embedder(home: Path) -> list[str]:
    """Exports a tiny model of embeddings as ONNX, and lists the folder's files."""
    from tasks.registry import version_exports
    from tests.training import tiny
    from tests.training.programs_here import run
    from training.task_types import load

    base = build_world(recipe_of("embedding", write_rows("embedding", home / "rows")), home) / "base/output"
    tiny.export_untrained(base, home / "model", load("embedding"), [])
    inputs = {"model": home / "model", "tokenizer": home / "model"}
    run(version_exports, home / "job", inputs, task="embedding", options={}, export="onnx", max_length=24)
    out = home / "job/output"
    return sorted(file.relative_to(out).as_posix() for file in out.rglob("*") if file.is_file())


@pytest.mark.slow
def test_an_embedder_as_onnx_has_the_files_by_which_sentence_transformers_pools(tmp_path: Path) -> None:
    files = call(write_embedder, tmp_path)
    pooling = {
        "modules.json",
        "1_Pooling/config.json",
        "sentence_bert_config.json",
        "config_sentence_transformers.json",
    }
    assert pooling | {"onnx/model.onnx", "config.json", "tokenizer.json"} <= {*files}
    assert not [name for name in files if name.endswith(".safetensors")]
    assert json.loads((tmp_path / "job/output/sentence_bert_config.json").read_text())["max_seq_length"] == 24
