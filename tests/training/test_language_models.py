"""Language models: documents that are kept apart, masks that are the same whoever makes them, and sums by row."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tests.training import tiny
from tests.training.forks import assert_same, checkpoints_written, curve, finish, kill_when
from training import kinds, predict, scratch, tokens
from training.batching import TokenRows
from training.kinds.base import Kind
from training.likelihood import IGNORED, TokenLoss, following
from training.model import load_for_training, load_tokenizer, load_trained
from training.predicted import Likelihoods
from training.problems import UserError
from training.protocol import Events, Job
from training.recipe import Training

WORDS = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel({str(word): word for word in range(50)})), pad_token="9", eos_token="9"
)
SIZE = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
DOCUMENTS = [[1, 2, 3, 4, 5, 6, 9], [7, 9], [8, 8, 8, 9], [9]]


def documents(*lists: list[int]) -> pa.RecordBatch:
    lengths = np.array([len(ids) for ids in lists], np.int32)
    return pa.RecordBatch.from_pydict({"input_ids": pa.array(lists, pa.list_(pa.int32())), "length": lengths})


def rows_of(kind: Kind, split: str, max_length: int, *blocks: pa.RecordBatch) -> TokenRows:
    return TokenRows(pa.Table.from_batches(kind.token_rows(split, max_length, iter(blocks))))


def network(model_type: str, **config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    wide = {"opt": {"ffn_dim": 64, "word_embed_proj_dim": 32}}.get(model_type, {"intermediate_size": 64})
    made = AutoConfig.for_model(model_type, **SIZE, **wide, bos_token_id=0, eos_token_id=9, pad_token_id=0)
    return AutoModelForCausalLM.from_config(made, **config).eval()


def test_documents_are_packed_without_a_gap_and_nobody_is_asked_for_the_first_token_of_one() -> None:
    kind = kinds.load("causal-lm")
    rows = rows_of(kind, "train", 5, documents(*DOCUMENTS[:2]), documents(*DOCUMENTS[2:]))
    assert [rows[row]["input_ids"].tolist() for row in range(3)] == [[1, 2, 3, 4, 5], [6, 9, 7, 9, 8], [8, 8, 9, 9]]
    assert [rows[row]["starts"].tolist() for row in range(3)] == [[0], [0, 2, 4], [0, 3]]
    assert rows.targets.tolist() == [4, 2, 2]
    batch = kind.collator(WORDS, 6)([rows[row] for row in range(3)])
    none = IGNORED
    assert batch["labels"].tolist() == [
        [none, 2, 3, 4, 5, none],
        [none, 9, none, 9, none, none],
        [none, 8, 9, none, none, none],
    ]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0], [0, 1, 0, 1, 0, 0], [0, 1, 2, 0, 0, 1]]
    assert batch["input_ids"][:, 4:].tolist() == [[5, 9], [8, 9], [9, 9]]
    assert kind.targets(batch) == 8


def test_windows_have_all_of_a_document_in_its_row_and_one_without_tokens_has_a_row_too() -> None:
    kind = kinds.load("causal-lm", {"packing": False})
    blocks = documents(*DOCUMENTS[:2]), documents([], *DOCUMENTS[2:])
    for split in ("train", "validation"):
        rows = rows_of(kind, split, 3, *blocks)
        assert [rows[row]["input_ids"].tolist() for row in range(len(rows))] == [
            *([1, 2, 3], [4, 5, 6], [9], [7, 9], []),
            *([8, 8, 8], [9], [9]),
        ]
        assert rows.targets.tolist() == [2, 2, 0, 1, 0, 2, 0, 0]
        assert rows.tokens.tolist() == [7, 2, 0, 4, 1]
    assert kind.targets(kind.collator(WORDS, 1)([rows[2], rows[4]])) == 0


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_a_packed_document_gets_the_logits_that_it_gets_alone_and_with_the_librarys_collators_it_does_not(
    model_type: str, attention: str
) -> None:
    kind, model = kinds.load("causal-lm"), network(model_type, attn_implementation=attention)
    rows = rows_of(kind, "train", 14, documents(*DOCUMENTS))
    batch = kind.collator(WORDS, 8)([rows[0]])
    flattened = DataCollatorWithFlattening()([{"input_ids": ids} for ids in DOCUMENTS])
    for name in ("input_ids", "labels", "position_ids"):  # so far the library agrees
        assert torch.equal(batch[name][:, :14], flattened[name])
    joined = DataCollatorForLanguageModeling(WORDS, mlm=False)([{"input_ids": sum(DOCUMENTS, [])}])
    with torch.no_grad():
        alone = torch.cat([model(torch.tensor([ids])).logits[0] for ids in DOCUMENTS])
        crossing = [(model(**given).logits[0] - alone).abs().max().item() for given in (flattened, joined)]
        kind.prepare(model)
        kept_apart = (model(**batch).logits[0, :14] - alone).abs().max().item()
    assert kept_apart < 1e-6 and min(crossing) > 0.01
    assert (joined["labels"] == WORDS.eos_token_id).sum() == 0  # filled up with eos, it teaches no model to end
    assert (batch["labels"] == WORDS.eos_token_id).sum() == 3


@pytest.mark.parametrize(
    ("model_type", "field"),
    [("opt", "options.packing"), ("bloom", "options.packing"), ("bert", "model")],
)
def test_a_model_that_cannot_keep_documents_apart_or_sees_what_it_shall_tell_is_refused(
    model_type: str, field: str
) -> None:
    model = network(model_type)
    with pytest.raises(UserError) as refused:
        kinds.load("causal-lm").prepare(model)
    assert refused.value.problems[0].where == field
    if field == "options.packing":
        kinds.load("causal-lm", {"packing": False}).prepare(model)


@pytest.fixture(scope="module")
def speakers(world: Path) -> Path:
    """A world with a causal model beside the other one, and the tokens of both kinds."""
    made = tokenizer_of(world)
    config = tiny.CONFIG | {"model_type": "gpt2", "vocab_size": made.get_vocab_size()}
    scratch.create(config, made, seed=1).save_pretrained(world / "causal-lm/model")
    shutil.copytree(world / "base/model", world / "masked-lm/model")
    for name in MOST:
        shutil.copytree(world / "base/tokenizer", world / name / "tokenizer")
        encoder = tokens.load_encoder(world / "base/tokenizer", MOST[name])
        tokens.write(kinds.load(name), world / "data", encoder, world / name / "tokens", "ignore", lambda *_: None)
    return world


MOST = {"causal-lm": 12}
"""Tokens of a row."""


def tokenizer_of(world: Path) -> Tokenizer:
    return Tokenizer.from_file(str(world / "base/tokenizer/tokenizer.json"))


def fit_job(world: Path, job_dir: Path, kind: str, **training: Any) -> Path:
    job = Job.read(tiny.fit_job(world, job_dir, base=kind, **training))
    settings = job.settings | {"kind": kind, "labels": [], "metrics": ["perplexity", "token_accuracy"]}
    inputs = dict(job.inputs) | {"tokens": str(world / kind / "tokens")}
    job.model_copy(update={"settings": settings, "inputs": inputs}).write(job_dir)
    return job_dir


@pytest.mark.parametrize("engine", ["trainer", "accelerate"])
@pytest.mark.parametrize("kind", MOST)
def test_killed_within_an_epoch_it_ends_with_the_same_bytes(
    speakers: Path, tmp_path: Path, kind: str, engine: str
) -> None:
    asked = {"engine": engine, "checkpoint_interval_s": 0.02, "num_train_epochs": 2, "gradient_accumulation_steps": 2}
    whole, killed = (fit_job(speakers, tmp_path / name, kind, **asked) for name in ("whole", "killed"))
    assert finish(whole).state == "finished"
    assert kill_when(killed, lambda: checkpoints_written(killed) >= 3)
    assert finish(killed).state == "finished"
    assert_same(killed, whole)
    figures = curve(whole)[max(curve(whole))]
    assert figures["eval_perplexity"] == pytest.approx(math.exp(figures["eval_loss"]), rel=1e-4)
    assert figures["eval_perplexity"] < tokenizer_of(speakers).get_vocab_size() / 2
