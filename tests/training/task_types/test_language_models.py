"""Language models: separation of documents, masks independent of the process, and sums by row."""

from __future__ import annotations

import math
import shutil
from itertools import chain
from pathlib import Path
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
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    pipeline,
)

from tests.arrow import read_arrow
from tests.raised import raised_problems
from tests.training import tiny
from tests.training.forks import assert_resumes, curve, finish
from tests.training.programs_here import PREDICT, run
from tests.training.vocabularies import TEXTS, WORD_PIECES, word_pieces
from training import task_types
from training.batching.batches import IGNORED, EvaluationBatches, LengthGroupedBatches, TokenRows
from training.batching.random_states import SeededBatch
from training.engine.predictor import Predictor
from training.evaluation.metrics import compute
from training.evaluation.predictions import Likelihoods
from training.models.loading import export, load_for_training, load_tokenizer
from training.problems import UserError
from training.programs import create_model, predict
from training.programs.compare import CompareSettings, compare_models
from training.programs.score import compute_scores
from training.task_types.generation import set_special_tokens
from training.task_types.losses.token_likelihood import TokenLoss, shift_labels, sums_by_row
from training.task_types.task_type import TaskType
from training.tokenization import encoder as encoder_module
from training.tokenization import token_files

WORDS = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel({str(word): word for word in range(50)})), pad_token="9", eos_token="9"
)
SIZE = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
DOCUMENTS = [[1, 2, 3, 4, 5, 6, 9], [7, 9], [8, 8, 8, 9], [9]]


def documents(*lists: list[int]) -> pa.RecordBatch:
    lengths = np.array([len(ids) for ids in lists], np.int32)
    return pa.RecordBatch.from_pydict({"input_ids": pa.array(lists, pa.list_(pa.int32())), "length": lengths})


def rows_of(task: TaskType, split: str, max_length: int, *blocks: pa.RecordBatch) -> TokenRows:
    return TokenRows(pa.Table.from_batches(task.token_rows(split, max_length, iter(blocks))))


def network(model_type: str, **config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    wide = {"opt": {"ffn_dim": 64, "word_embed_proj_dim": 32}}.get(model_type, {"intermediate_size": 64})
    made = AutoConfig.for_model(model_type, **SIZE, **wide, bos_token_id=0, eos_token_id=9, pad_token_id=0)
    return AutoModelForCausalLM.from_config(made, **config).eval()


def test_documents_are_packed_without_a_gap_and_the_first_token_of_each_is_no_target() -> None:
    task = task_types.load("causal-lm")
    rows = rows_of(task, "train", 5, documents(*DOCUMENTS[:2]), documents(*DOCUMENTS[2:]))
    assert [rows[row]["input_ids"].tolist() for row in range(3)] == [[1, 2, 3, 4, 5], [6, 9, 7, 9, 8], [8, 8, 9, 9]]
    assert [rows[row]["starts"].tolist() for row in range(3)] == [[0], [0, 2, 4], [0, 3]]
    assert rows.targets.tolist() == [4, 2, 2]
    batch = task.collator(WORDS, 6)([rows[row] for row in range(3)])
    none = IGNORED
    assert batch["labels"].tolist() == [
        [none, 2, 3, 4, 5, none],
        [none, 9, none, 9, none, none],
        [none, 8, 9, none, none, none],
    ]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0], [0, 1, 0, 1, 0, 0], [0, 1, 2, 0, 0, 1]]
    assert batch["input_ids"][:, 4:].tolist() == [[5, 9], [8, 9], [9, 9]]
    assert task.target_count(batch) == 8


def test_windows_have_all_of_a_document_in_its_row_and_one_without_tokens_has_a_row_too() -> None:
    task = task_types.load("causal-lm", {"packing": False})
    blocks = documents(*DOCUMENTS[:2]), documents([], *DOCUMENTS[2:])
    for split in ("train", "validation"):
        rows = rows_of(task, split, 3, *blocks)
        assert [rows[row]["input_ids"].tolist() for row in range(len(rows))] == [
            *([1, 2, 3], [4, 5, 6], [9], [7, 9], []),
            *([8, 8, 8], [9], [9]),
        ]
        assert rows.targets.tolist() == [2, 2, 0, 1, 0, 2, 0, 0]
        assert rows.tokens.tolist() == [7, 2, 0, 4, 1]
    assert task.target_count(task.collator(WORDS, 1)([rows[2], rows[4]])) == 0


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_a_packed_document_gets_the_logits_that_it_gets_alone_and_with_the_librarys_collators_it_does_not(
    model_type: str, attention: str
) -> None:
    task, model = task_types.load("causal-lm"), network(model_type, attn_implementation=attention)
    rows = rows_of(task, "train", 14, documents(*DOCUMENTS))
    batch = task.collator(WORDS, 8)([rows[0]])
    flattened = DataCollatorWithFlattening()([{"input_ids": ids} for ids in DOCUMENTS])
    for name in ("input_ids", "labels", "position_ids"):  # so far the library agrees
        assert torch.equal(batch[name][:, :14], flattened[name])
    joined = DataCollatorForLanguageModeling(WORDS, mlm=False)([{"input_ids": [*chain(*DOCUMENTS)]}])
    with torch.no_grad():
        alone = torch.cat([model(torch.tensor([ids])).logits[0] for ids in DOCUMENTS])
        crossing = [(model(**given).logits[0] - alone).abs().max().item() for given in (flattened, joined)]
        task.prepare(model, WORDS)
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
    assert raised_problems(task_types.load("causal-lm").prepare, model, WORDS)[0].where == field
    if field == "options.packing":
        task_types.load("causal-lm", {"packing": False}).prepare(model, WORDS)


@pytest.fixture(scope="module")
def speakers(world: Path) -> Path:
    """A world with a causal model and a masked one, and the tokens of both task types."""
    made = tokenizer_of(world)
    config = tiny.CONFIG | {"model_type": "gpt2", "vocab_size": made.get_vocab_size()}
    create_model.create(config, made, seed=1).save_pretrained(world / "causal-lm/model")
    shutil.copytree(world / "base/model", world / "masked-lm/model")
    for name in MOST:
        shutil.copytree(world / "base/tokenizer", world / name / "tokenizer")
        encoder = encoder_module.load_fast_encoder(world / "base/tokenizer", MOST[name])
        token_files.write_tokens(
            task_types.load(name), world / "data", encoder, world / name / "tokens", "ignore", lambda *_: None
        )
    return world


MOST = {"causal-lm": 12, "masked-lm": 64}
"""Tokens of a row."""


def tokenizer_of(world: Path) -> Tokenizer:
    return Tokenizer.from_file(str(world / "base/tokenizer/tokenizer.json"))


def fit_job(world: Path, job_dir: Path, task: str, **training: Any) -> Path:
    settings = {"task": task, "labels": [], "metrics": ["perplexity", "token_accuracy"]}
    return tiny.fit_job(world, job_dir, base=task, tokens=f"{task}/tokens", settings=settings, **training)


@pytest.mark.slow
@pytest.mark.parametrize(("task", "engine"), [("causal-lm", "accelerate"), ("masked-lm", "trainer")])
def test_killed_within_an_epoch_it_ends_with_the_same_bytes(
    speakers: Path, tmp_path: Path, task: str, engine: str
) -> None:
    settings = {
        "engine": engine,
        "checkpoint_interval_s": 0.02,
        "num_train_epochs": 2,
        "gradient_accumulation_steps": 2,
    }
    whole, killed = (fit_job(speakers, tmp_path / name, task, **settings) for name in ("whole", "killed"))
    assert finish(whole).state == "finished"
    assert_resumes(killed, whole, after=3)
    figures = curve(whole)[max(curve(whole))]
    assert figures["eval_perplexity"] == pytest.approx(math.exp(figures["eval_loss"]), rel=1e-4)
    assert figures["eval_perplexity"] < tokenizer_of(speakers).get_vocab_size() / 2


def test_a_split_is_predicted_row_by_row_and_its_perplexity_is_that_of_the_model_by_hand(
    speakers: Path, tmp_path: Path
) -> None:
    task, folder = task_types.load("causal-lm"), speakers / "causal-lm"
    model = load_for_training(task, folder / "model", [], load_tokenizer(folder / "tokenizer"), seed=1)
    export(model, folder / "tokenizer", tmp_path / "model")
    tables = [predicted(folder, tmp_path, batch_size) for batch_size in (3, 64)]
    assert tables[0].column_names == ["row", "loss", "targets", "hits", "tokens"]
    encoded = tokenizer_of(speakers).encode_batch(texts_of(speakers))
    model.eval()
    for row, ids in enumerate(encoding.ids for encoding in encoded):
        losses, hits = [], 0
        for window in (torch.tensor(ids[start : start + 12]) for start in range(0, len(ids), 12)):
            with torch.no_grad():
                likelihoods = model(window[None]).logits[0, :-1].double().log_softmax(-1)
            losses += (-likelihoods[torch.arange(len(likelihoods)), window[1:]]).tolist()
            hits += int((likelihoods.argmax(-1) == window[1:]).sum())
        for table in tables:
            of_row = {name: table[name][row].as_py() for name in table.column_names}
            assert of_row.pop("loss") == pytest.approx(sum(losses), abs=1e-4)
            assert of_row == {"row": row, "targets": len(losses), "hits": hits, "tokens": len(ids)}
    assert max(map(len, encoded)) > 12 and len(tables[0]) == len(encoded)
    found = task.metric_inputs(tables[0], [])
    total, targets, hits = (sum(tables[0][name].to_pylist()) for name in ("loss", "targets", "hits"))
    values = compute(["perplexity", "token_accuracy"], found)
    assert values == pytest.approx({"perplexity": math.exp(total / targets), "token_accuracy": hits / targets})
    assert compute_scores(["perplexity"], found)["perplexity"]["low"] < values["perplexity"]


def test_a_text_is_continued_with_the_likeliest_tokens_whatever_its_generation_settings_and_its_batch(
    speakers: Path, tmp_path: Path
) -> None:
    task, folder = task_types.load("causal-lm", {"max_new_tokens": 5}), speakers / "causal-lm"
    tokenizer = load_tokenizer(folder / "tokenizer")
    model = load_for_training(task, folder / "model", [], tokenizer, seed=1)
    model.get_output_embeddings().weight.data[tokenizer.sep_token_id] *= 3  # now and then the likeliest
    model.generation_config.update(temperature=0.6, top_p=0.9)  # as models bring them, without do_sample
    set_special_tokens(model, tokenizer)
    export(model, folder / "tokenizer", tmp_path / "model")
    model.eval()
    texts, lengths = [*texts_of(speakers)[:20], ""], set()
    answers = Predictor(task, tmp_path / "model", tmp_path / "model", 12).predict(
        pa.RecordBatch.from_pydict({"text": texts})
    )
    for text, answer in zip(texts, answers, strict=True):
        ids = tokenizer(text)["input_ids"][:-1][-12:]  # what ends a text is no part of one that goes on
        written: list[int] = []
        while len(written) < 5 and tokenizer.sep_token_id not in written:
            with torch.no_grad():
                written.append(int(model(torch.tensor([ids + written])).logits[0, -1].argmax()))
        lengths.add(len(written))
        assert answer["generated_text"] == tokenizer.decode(written, skip_special_tokens=True)
    assert len(lengths) > 1
    (tmp_path / "model/generation_config.json").write_text('{"temperature": 0.6, "early_stopping": true}')
    (name, content), *_ = task.published_files(tmp_path / "model", 16).items()
    (tmp_path / "model" / name).write_text(content)
    settings = GenerationConfig.from_pretrained(tmp_path / "model")
    assert (settings.max_new_tokens, settings.do_sample, settings.temperature) == (5, False, None)
    settings.validate(strict=True)
    quiet = task_types.load("causal-lm", {"max_new_tokens": 0})
    assert "generated_text" not in quiet.record_types([]) and not quiet.published_files(tmp_path / "model", 16)


def texts_of(world: Path, split: str = "validation") -> list[str]:
    texts: list[str] = read_arrow(world / "data" / f"{split}.arrow")["text"].to_pylist()
    return texts


def predicted(folder: Path, tmp_path: Path, batch_size: int) -> pa.Table:
    settings, job_dir = PREDICT | {"batch_size": batch_size}, tmp_path / str(batch_size)
    inputs = {"model": tmp_path / "model", "tokens": folder / "tokens"}
    assert run(predict, job_dir, inputs, task="causal-lm", **settings)["rows"] == 60
    return pq.read_table(job_dir / "output/validation.parquet")


def test_rows_with_nothing_to_tell_make_no_number_undefined_and_other_tokens_of_the_rows_are_not_compared() -> None:
    labels = torch.tensor([[IGNORED, 3, 4], [1, IGNORED, IGNORED]])
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0), requires_grad=True)
    loss = TokenLoss(causal=True, smoothing=0.1)
    assert loss(logits, labels).item() == pytest.approx(loss(logits[:1], labels[:1]).item())
    loss(logits[1:], labels[1:]).backward()
    assert loss(logits[1:], labels[1:]).item() == 0 and not logits.grad.any()
    sums = sums_by_row(logits.detach(), shift_labels(labels))
    assert sums["targets"].to_pylist() == [2, 0] and sums["loss"][1].as_py() == 0
    task = task_types.load("causal-lm")
    assert task.to_records(pa.Table.from_batches([sums]), [])[1] == {"loss": None, "targets": 0, "perplexity": None}
    old = Likelihoods(np.ones(2), np.array([2, 1]), np.zeros(2, np.int64))
    settings = CompareSettings(
        **{"task": "causal-lm", "split": "test", "champion": "small/1", "metrics": ["perplexity"]},
        **{"figure": "perplexity", "less_is_better": [], "margin": 0.0, "confidence": 0.95},
    )
    with pytest.raises(UserError, match=r"this model and small/1 tokenize these rows differently, into 2 and 3 tokens"):
        compare_models(task.metric_inputs(pa.Table.from_batches([sums]), []), old, settings)
    longer, same = (Likelihoods(old.loss, old.targets, old.hits, np.array([3, tokens])) for tokens in (2, 1))
    assert longer.incomparable_reason(same) and not same.incomparable_reason(old)
    none = Likelihoods(np.zeros(2), np.zeros(2, np.int64), np.zeros(2, np.int64))
    assert math.isnan(compute(["perplexity"], none)["perplexity"])


@pytest.fixture(scope="module")
def masked(speakers: Path) -> tuple[TokenRows, Any]:
    folder = speakers / "masked-lm"
    collate = task_types.load("masked-lm").collator(load_tokenizer(folder / "tokenizer"), 1)
    return TokenRows(folder / "tokens/train.arrow"), collate


def masks(rows: TokenRows, collate: Any, epoch: int | None, **dealt: Any) -> dict[int, tuple[list[int], list[int]]]:
    """The ids and labels of each row, as the batches of this epoch have them, or None: an evaluation's."""
    batches: Any = EvaluationBatches(rows.lengths, 7)
    if epoch is not None:
        batches = LengthGroupedBatches(rows.lengths, 8, seed=3, **dealt)
        batches.set_epoch(epoch)
    found = {}
    for numbers in batches:
        batch = collate(rows.__getitems__(numbers))
        for place, row in enumerate(numbers):
            length = rows.lengths[row]
            found[row] = batch["input_ids"][place, :length].tolist(), batch["labels"][place, :length].tolist()
    return found


def test_masks_are_the_same_whatever_the_batch_or_rank_and_others_each_epoch(masked: tuple[TokenRows, Any]) -> None:
    whole = masks(*masked, epoch=0)
    ranks = [masks(*masked, epoch=0, accumulation=2, world=2, rank=rank) for rank in range(2)]
    assert ranks[0] | ranks[1] == whole and len(whole) == len(masked[0])
    again = masks(*masked, epoch=1)
    assert sum(again[row] != whole[row] for row in whole) > len(whole) * 0.8
    assert masks(*masked, epoch=None) == masks(*masked, epoch=None)
    (row, (ids, labels)), *_ = masks(*masked, epoch=None).items()
    batch = masked[1]([masked[0][row]])
    assert (batch["input_ids"][0].tolist(), batch["labels"][0].tolist()) == (ids, labels)


def test_the_configured_share_of_a_rows_tokens_is_chosen_and_most_become_the_mask(
    masked: tuple[TokenRows, Any],
) -> None:
    rows, collate = masked
    became = {"mask": 0, "same": 0, "other": 0}
    for epoch in range(10):
        for row, (ids, labels) in masks(rows, collate, epoch).items():
            chosen = [place for place, label in enumerate(labels) if label != IGNORED]
            assert len(chosen) == rows.targets[row] == max(1, round(0.15 * (len(ids) - 2)))
            assert chosen[0] > 0 and chosen[-1] < len(ids) - 1  # not those that the tokenizer adds
            for place, token in enumerate(rows[row]["input_ids"].tolist()):
                assert ids[place] == token or place in chosen
                if place in chosen:
                    assert labels[place] == token
                    became["mask" if ids[place] == 4 else "same" if ids[place] == token else "other"] += 1
    shares = {name: count / sum(became.values()) for name, count in became.items()}
    assert shares == pytest.approx({"mask": 0.8, "same": 0.1, "other": 0.1}, abs=0.03)


def test_mask_tokens_of_a_text_are_replaced_by_the_likeliest_tokens(speakers: Path, tmp_path: Path) -> None:
    task, folder = task_types.load("masked-lm"), speakers / "masked-lm"
    tokenizer = load_tokenizer(folder / "tokenizer")
    export(load_for_training(task, folder / "model", [], tokenizer, seed=1), folder / "tokenizer", tmp_path / "model")
    text = texts_of(speakers)[0]
    first, *rest = text.split()
    hidden = " ".join([first, "[MASK]", "[MASK]", *rest])
    predictor = Predictor(task, tmp_path / "model", tmp_path / "model", 64)
    predicted = [row["filled_text"] for row in predictor.predict(pa.RecordBatch.from_pydict({"text": [hidden, text]}))]
    found = pipeline("fill-mask", str(tmp_path / "model"), top_k=1, dtype=torch.float32)(hidden)
    filled = [one[0]["token_str"].strip() for one in found]
    assert predicted == [" ".join([first, *filled, *rest]), None]
    cut = Predictor(task, tmp_path / "model", tmp_path / "model", 4)
    (one,) = cut.predict(pa.RecordBatch.from_pydict({"text": ["[MASK] [MASK] [MASK]"]}))
    assert one["filled_text"].count("[MASK]") == 1 and one["filled_text"].endswith("[MASK]")


def test_whole_words_are_hidden_whole_and_no_more_than_fit(tmp_path: Path) -> None:
    task = task_types.load("masked-lm", {"whole_words": True, "mlm_probability": 0.3})
    made = word_pieces()
    encoder = encoder_module.FastEncoder(
        Tokenizer.from_str(made.to_str()), 40, side="right", split_special_tokens=False, eos=None
    )
    rows = TokenRows(pa.Table.from_batches([task.features(encoder, pa.record_batch({"text": TEXTS})).rows]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, mask_token="[MASK]", **WORD_PIECES)
    alone = tokenizer(TEXTS, truncation=True, max_length=40)
    collate, parts = task.collator(tokenizer, 1), 0
    for epoch in range(20):
        batch = collate(SeededBatch([rows[row] for row in range(5)], (1, epoch, 0, 0), range(5)))
        for row, labels in enumerate(batch["labels"].tolist()):
            chosen = {place for place, label in enumerate(labels) if label != IGNORED}
            words = {alone.word_ids(row)[place] for place in chosen}
            assert chosen == {place for place, word in enumerate(alone.word_ids(row)) if word in words}
            assert 0 < len(chosen) <= rows.targets[row] or len(words) == 1
            parts += len(chosen) > len(words)
    assert parts


def test_the_librarys_masks_hang_on_what_was_drawn_before_so_a_resumed_run_has_others(
    masked: tuple[TokenRows, Any], speakers: Path
) -> None:
    rows = [{"input_ids": masked[0][row]["input_ids"].tolist()} for row in range(8)]
    tokenizer = load_tokenizer(speakers / "masked-lm/tokenizer")
    whole, resumed = (DataCollatorForLanguageModeling(tokenizer, seed=3) for _ in range(2))
    whole(rows[:4])  # the batch before the checkpoint
    theirs = [collate(rows[4:])["labels"] for collate in (whole, resumed)]
    assert not torch.equal(*theirs)
