"""Sequence to sequence: what rows become, what is learnt of them, what the model writes, and how that is judged."""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sacrebleu
import torch
from transformers import AutoTokenizer, ByT5Tokenizer, DataCollatorForSeq2Seq
from transformers.trainer_pt_utils import LabelSmoother

from tests.arrow import read_arrow, write_arrow
from tests.training import tiny
from tests.training.forks import assert_resumes, curve, finish
from tests.training.programs_here import COMPARE, PREDICT, SCORE, run, warnings_of
from tests.training.vocabularies import WORD_PIECES, save_repository, word_pieces
from training.batching.batches import TokenRows
from training.engine.predictor import Predictor
from training.evaluation import metrics
from training.evaluation.generated_texts import Generated
from training.evaluation.metrics.resampling import figures
from training.jobs.protocol import Events, Job
from training.models.loading import load_for_training, load_tokenizer, load_trained
from training.problems import UserError
from training.programs import compare, create_model, predict, score
from training.recipe import Training
from training.task_types.seq2seq import Seq2Seq
from training.tokenization import encoder as encoder_module
from training.tokenization import transformers_encoder
from training.tokenization.token_files import tokenize, write_tokens

WORDS = {"cat": "Katze", "dog": "Hund", "red": "rot", "tall": "groß", "runs": "rennt", "sleeps": "schläft"}
CONFIG = {"model_type": "t5", "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 150}
OPTIONS = {"prefix": "cat: ", "max_new_tokens": 12}
METRICS = ["bleu", "chrf", "rouge1", "rouge2", "rougeL", "exact_match"]


def write_rows(folder: Path, rows: dict[str, int]) -> Path:
    folder.mkdir(parents=True)
    draw = random.Random(3)
    for split, count in rows.items():
        chosen = [draw.choices(list(WORDS), k=draw.randint(1, 6)) for _ in range(count)]
        sources, targets = ([" ".join(map(say, row)) for row in chosen] for say in (str, WORDS.__getitem__))
        table = pa.table({"source": sources, "target": targets})
        write_arrow(folder / f"{split}.arrow", table)
    (folder / "labels.json").write_text("[]")
    return folder


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("world")
    data = write_rows(home / "data", {"train": 120, "validation": 30})
    settings = {"config": CONFIG, "seed": 1, "texts": ["source", "target"], "writes": True}
    (home / "base/output").mkdir(parents=True)
    job = Job(program="training.programs.create_model", key="base", settings=settings, inputs={"data": str(data)})
    create_model.main(home / "base", job, Events(home / "base/events.jsonl"))
    tokenize(Seq2Seq(OPTIONS), data, home / "base/output/tokenizer", home / "tokens", 32)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield home
    torch.set_num_threads(before)


def rows_of(folder: Path, split: str) -> pa.Table:
    return read_arrow(folder / f"{split}.arrow")


def test_tokens_are_those_that_autotokenizer_gives_for_sources_with_their_prefix_and_for_targets(world: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(world / "base/output/tokenizer")
    rows, tokens = rows_of(world / "data", "validation"), rows_of(world / "tokens", "validation")
    sources, targets = (rows[name].to_pylist() for name in ("source", "target"))
    assert tokens["input_ids"].to_pylist() == tokenizer([f"cat: {text}" for text in sources])["input_ids"]
    labels = tokenizer(text_target=targets)["input_ids"]
    assert tokens["label"].to_pylist() == labels
    assert tokens["targets"].to_pylist() == [*map(len, labels)]
    assert tokens["reference"].to_pylist() == targets


def test_targets_that_are_cut_are_counted_and_reported_with_the_option_that_cuts_them(
    world: Path, tmp_path: Path
) -> None:
    task = Seq2Seq({"max_target_length": 5})
    tokenize(task, world / "data", world / "base/output/tokenizer", tmp_path, 32)
    tokenizer = AutoTokenizer.from_pretrained(world / "base/output/tokenizer")
    texts = rows_of(world / "data", "train")["target"].to_pylist()
    whole, cut = tokenizer(text_target=texts), tokenizer(text_target=texts, truncation=True, max_length=5)
    assert rows_of(tmp_path, "train")["label"].to_pylist() == cut["input_ids"]
    lost = [len(row) - 5 for row in whole["input_ids"] if len(row) > 5]
    report = json.loads((tmp_path / "log/report.json").read_text())
    assert (report["targets"]["truncated"]["train"], report["targets"]["lost"]["train"]) == (len(lost), sum(lost))
    assert report["truncated"]["train"] == 0
    assert {problem["where"] for problem in report["problems"]} == {"options.max_target_length"}
    assert f"5 cuts {len(lost)} of 120 targets of train" in report["problems"][0]["message"]
    with pytest.raises(UserError, match=r"options\.max_target_length: 2 leaves no room for a target"):
        tokenize(Seq2Seq({"max_target_length": 2}), world / "data", world / "base/output/tokenizer", tmp_path, 32)


def test_targets_with_a_character_that_the_tokenizer_does_not_know_are_counted(tmp_path: Path) -> None:
    rows = pa.table({"source": ["{ a }"] * 3, "target": ["the dog", "the {", "{ } fox {"]})
    (tmp_path / "data").mkdir()
    write_arrow(tmp_path / "data/train.arrow", rows)
    folder = save_repository(tmp_path / "it", "t5", word_pieces(), WORD_PIECES)
    for load in (encoder_module.load_fast_encoder(folder, 32), transformers_encoder.load_encoder(folder, folder, 32)):
        write_tokens(Seq2Seq({}), tmp_path / "data", load, tmp_path / "tokens", "warning", lambda done, total: None)
        problems = json.loads((tmp_path / "tokens/log/report.json").read_text())["problems"]
        (found,) = (problem for problem in problems if "targets have characters" in problem["message"])
        assert found["where"] == "train"
        assert found["message"].startswith("2 of 3 targets have characters that the tokenizer does not know")


def save_mbart(folder: Path, **languages: str) -> Path:
    """A model and a tokenizer, which writes another language's token behind a target than behind a source."""
    from transformers import MBartConfig, MBartForConditionalGeneration, MBartTokenizer

    special = [(token, 0.0) for token in ("<s>", "<pad>", "</s>", "<unk>")]
    words = [(word, -1.0 - place) for place, word in enumerate(["▁dog", "▁a", "▁ein", "▁Hund"])]
    tokenizer = MBartTokenizer(vocab=special + words, **languages)
    tokenizer.save_pretrained(folder)
    sizes = dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "d_model", "max_position_embeddings"), 16)
    sizes |= dict.fromkeys(
        ("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"), 1
    )
    MBartForConditionalGeneration(MBartConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    return folder


def test_a_tokenizer_with_another_way_for_targets_encodes_them_in_it_and_the_decoder_begins_as_it_was_trained(
    tmp_path: Path,
) -> None:
    folder = save_mbart(tmp_path / "both", src_lang="en_XX", tgt_lang="de_DE")
    encoder, tokenizer = (
        transformers_encoder.load_encoder(folder, folder, 8),
        AutoTokenizer.from_pretrained(folder),
    )
    for _ in range(2):  # a source after a target is a source again
        assert encoder.encode(["a dog"], None).ids.tolist() == tokenizer("a dog")["input_ids"]
        targets = encoder.encode_targets(["ein Hund", "ein ein Hund Hund"], 5)
        expected = tokenizer(text_target=["ein Hund", "ein ein Hund Hund"], truncation=True, max_length=5)["input_ids"]
        assert targets.ids.tolist() == [token for row in expected for token in row]
        assert targets.lost.tolist() == [0, 1]
    task = Seq2Seq({"max_target_length": 8, "max_new_tokens": 8})
    model = load_for_training(task, folder, [], tokenizer, seed=1)
    assert model.generation_config.decoder_start_token_id == tokenizer.convert_tokens_to_ids("de_DE")
    one = save_mbart(tmp_path / "one", src_lang="en_XX")
    with pytest.raises(UserError, match="names no tgt_lang"):
        transformers_encoder.load_encoder(one, one, 8).encode_targets(["ein Hund"], 5)


def test_a_tokenizer_in_python_encodes_targets_as_it_does_by_itself(tmp_path: Path) -> None:
    ByT5Tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    encoder = transformers_encoder.load_encoder(tmp_path, tmp_path, 8)
    assert isinstance(encoder, transformers_encoder.PythonEncoder)
    targets = encoder.encode_targets(["abc", "abcdef"], 5)
    assert targets.ids.tolist() == [100, 101, 102, 1, 100, 101, 102, 103, 1]
    assert targets.lost.tolist() == [0, 2]


def test_batches_are_those_of_data_collator_for_seq2seq_and_the_models_decoder_begins_with_them(world: Path) -> None:
    task, tokenizer = Seq2Seq(), load_tokenizer(world / "base/output/tokenizer")
    model = load_for_training(task, world / "base/output/model", [], tokenizer, seed=1).eval()
    assert (model.config.eos_token_id, model.config.decoder_start_token_id) == (tokenizer.sep_token_id, 0)
    rows = TokenRows(world / "tokens/train.arrow")
    some = [rows[row] for row in (0, 3, 5, 60)]
    ours = task.collator(tokenizer, multiple=8)(some)
    lists = [{"input_ids": row["input_ids"].tolist(), "labels": row["label"].tolist()} for row in some]
    theirs = DataCollatorForSeq2Seq(tokenizer, model, pad_to_multiple_of=8)(lists)
    decoder = theirs.pop("decoder_input_ids")
    assert ours.keys() == theirs.keys() - {"token_type_ids"}
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    with torch.inference_mode():
        assert torch.equal(task.forward(model, ours).logits, model(**theirs, decoder_input_ids=decoder).logits)
    assert task.target_count(ours) == sum(len(row["label"]) for row in some)


def test_losses_add_up_to_the_models_own_and_are_smoothed_as_the_trainer_smooths(world: Path) -> None:
    task, tokenizer = Seq2Seq({"max_new_tokens": 1}), load_tokenizer(world / "base/output/tokenizer")
    model = load_for_training(task, world / "base/output/model", [], tokenizer, seed=1).eval()
    rows = TokenRows(world / "tokens/train.arrow")
    batch = task.collator(tokenizer, multiple=1)([rows[row] for row in range(9)])
    training = Training()
    with torch.inference_mode():
        outputs = task.forward(model, batch)
        answers = task.predictions(model, outputs, batch)
        assert answers["targets"].to_pylist() == rows.targets[:9].tolist()
        mean = sum(answers["loss"].to_pylist()) / int(rows.targets[:9].sum())
        assert mean == pytest.approx(float(outputs.loss), rel=1e-6)
        assert task.loss(training, [], rows, outside=False) is None
        ours = task.loss(training, [], rows, outside=True)
        assert ours is not None and float(ours(outputs.logits, batch["labels"])) == pytest.approx(mean, rel=1e-6)
        smoothed = task.loss(Training(label_smoothing_factor=0.1), [], rows, outside=False)
        theirs = LabelSmoother(0.1)({"logits": outputs.logits}, batch["labels"])
        assert smoothed is not None
        assert float(smoothed(outputs.logits, batch["labels"])) == pytest.approx(float(theirs), rel=1e-5)


def fit_job(world: Path, job_dir: Path, *, options: dict[str, Any] | None = None, best: str | None = None) -> Path:
    """As tiny's, of this task type and these rows."""
    chosen = {"num_train_epochs": 2, "checkpoint_interval_s": 0.02, **({"metric_for_best_model": best} if best else {})}
    tiny.fit_job(world, job_dir, **chosen)
    written = Job.read(job_dir)
    base = {"model": str(world / "base/output/model"), "tokenizer": str(world / "base/output/tokenizer")}
    settings = {
        **written.settings,
        "task": "seq2seq",
        "options": OPTIONS | (options or {}),
        "labels": [],
        "metrics": METRICS,
    }
    written.model_copy(update={"settings": settings, "inputs": {**written.inputs, **base}}).write(job_dir)
    return job_dir


@pytest.fixture(scope="module")
def trained(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed job, with the metrics of its generated texts after each epoch."""
    job_dir = fit_job(world, tmp_path_factory.mktemp("jobs") / "undisturbed")
    assert finish(job_dir).state == "finished"
    return job_dir


@pytest.mark.slow
def test_run_killed_mid_epoch_ends_with_the_same_weights_and_the_same_metrics_of_what_it_wrote(
    world: Path, trained: Path, tmp_path: Path
) -> None:
    job_dir = fit_job(world, tmp_path / "killed")
    assert_resumes(job_dir, trained, after=4)
    assert {f"eval_{name}" for name in METRICS} <= set(curve(trained)[30])


@pytest.mark.slow
def test_a_silent_kind_gives_the_loss_alone_while_training_and_a_metric_that_would_choose_is_refused(
    world: Path, trained: Path, tmp_path: Path
) -> None:
    """As where the processes hold shares of the weights. The loss is that of an evaluation that generates."""
    silent = {"generate_while_training": False}
    failure = finish(fit_job(world, tmp_path / "chooses", options=silent, best="bleu")).failure
    assert failure is not None and failure.problems[0].where == "training.metric_for_best_model"
    job_dir = fit_job(world, tmp_path / "silent", options=silent)
    assert finish(job_dir).state == "finished"
    without_metrics, with_metrics = curve(job_dir), curve(trained)
    assert (
        without_metrics[30]["eval_loss"] == with_metrics[30]["eval_loss"]
        and without_metrics[30].keys() < with_metrics[30].keys()
    )
    assert not [name for name in METRICS if f"eval_{name}" in without_metrics[30]]
    task = Seq2Seq().while_training("fsdp")
    assert task.loss_only_reason is not None and task.loss_only_reason.startswith(
        "with fsdp, nothing is generated while training"
    )
    assert Seq2Seq().while_training("deepspeed-zero2").loss_only_reason is None


def predicted(world: Path, model: Path, job_dir: Path, batch_size: int, **options: Any) -> Path:
    settings = PREDICT | {"batch_size": batch_size, "options": OPTIONS | options}
    run(predict, job_dir, {"model": model, "tokens": world / "tokens"}, task="seq2seq", **settings)
    return job_dir / "output"


@pytest.fixture(scope="module")
def predictions(world: Path, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return predicted(world, trained / "output/model", tmp_path_factory.mktemp("predictions") / "job", 16)


def test_the_text_generated_for_a_row_is_independent_of_the_other_rows_in_the_batch(
    world: Path, trained: Path, predictions: Path, tmp_path: Path
) -> None:
    one = pq.read_table(predicted(world, trained / "output/model", tmp_path / "one", 1) / "validation.parquet")
    many = pq.read_table(predictions / "validation.parquet")
    assert one["prediction"].to_pylist() == many["prediction"].to_pylist()
    assert len(set(one["prediction"].to_pylist())) > 1
    np.testing.assert_allclose(one["loss"].to_numpy(), many["loss"].to_numpy(), rtol=1e-5)


def test_texts_that_are_cut_at_the_limit_are_counted_in_a_warning(world: Path, trained: Path, tmp_path: Path) -> None:
    for most, expected in ((64, 0), (1, 30)):
        job_dir = tmp_path / str(most)
        predicted(world, trained / "output/model", job_dir, 16, max_new_tokens=most)
        cut = [message for message in warnings_of(job_dir) if "reached options.max_new_tokens and were cut" in message]
        assert cut == [] if expected == 0 else cut[0].startswith(f"{expected} of 30 texts generated for validation")


def test_answers_are_what_the_exported_model_generates_by_itself_with_the_options_over_its_own_settings(
    world: Path, trained: Path, predictions: Path, tmp_path: Path
) -> None:
    folder = trained / "output/model"
    model, tokenizer = load_trained(Seq2Seq(), folder), load_tokenizer(folder)
    source = rows_of(world / "data", "validation")["source"].to_pylist()[0]
    given = {
        name: value for name, value in tokenizer(f"cat: {source}", return_tensors="pt").items() if "type" not in name
    }
    beams = {"num_beams": 3, "min_new_tokens": 9, "length_penalty": 0.5, "no_repeat_ngram_size": 2}
    for name, options in {"greedy": {}, "beams": beams}.items():
        (written,) = model.generate(**given, max_new_tokens=12, **options)
        found = predicted(world, folder, tmp_path / name, 16, **options) / "validation.parquet"
        answers = pq.read_table(found)
        assert answers["prediction"][0].as_py() == tokenizer.decode(written, skip_special_tokens=True), name
    model.generation_config.num_beams = 4
    assert Seq2Seq(OPTIONS).options.settings_for(model).num_beams == 1
    predictor = Predictor(Seq2Seq(OPTIONS), folder, folder, 32)
    generated = predictor.predict(rows_of(world / "data", "validation").select(["source"]).to_batches()[0])
    stored = pq.read_table(predictions / "validation.parquet")["prediction"].to_pylist()
    assert generated == [{"prediction": text} for text in stored]


def test_scores_have_intervals_and_the_worst_rows_show_source_target_and_prediction(
    world: Path, predictions: Path, tmp_path: Path
) -> None:
    inputs = {"predictions": predictions, "data": world / "data", "tokens": world / "tokens", "model": world / "base"}
    (world / "data/labels.json").write_text("[]")
    settings = SCORE | {"slices": ["length_bucket"], "splits": ["validation"], "metrics": METRICS}
    run(score, tmp_path / "score", inputs, task="seq2seq", **settings)
    out = tmp_path / "score/output"
    table = pq.read_table(predictions / "validation.parquet")
    labels, texts = table["label"].to_pylist(), table["prediction"].to_pylist()
    assert labels == rows_of(world / "data", "validation")["target"].to_pylist()
    found = json.loads((out / "metrics.json").read_text())["validation"]
    assert list(found) == METRICS
    assert found["bleu"]["value"] == pytest.approx(sacrebleu.corpus_bleu(texts, [labels]).score, abs=1e-9)
    assert found["chrf"]["low"] < found["chrf"]["value"] < found["chrf"]["high"]
    with open(out / "log/predictions_sample.csv", newline="", encoding="utf-8") as file:
        worst = list(csv.DictReader(file))
    assert [row["source"] for row in worst] != [] and len(worst) == 30
    assert all(row["target"] == row["label"] == labels[int(row["row"])] for row in worst)
    assert [float(row["chrf"]) for row in worst] == sorted(float(row["chrf"]) for row in worst)


def test_models_are_compared_by_a_metric_of_texts_and_rows_by_their_chrf(
    world: Path, predictions: Path, tmp_path: Path
) -> None:
    table = pq.read_table(predictions / "validation.parquet")
    (tmp_path / "perfect").mkdir()
    perfect = table.set_column(table.column_names.index("prediction"), "prediction", table["label"])
    pq.write_table(perfect, tmp_path / "perfect/validation.parquet")
    inputs = {"predictions": tmp_path / "perfect", "champion": predictions, "data": world / "data"}
    settings = COMPARE | {"split": "validation", "metrics": ["chrf"], "figure": "chrf"}
    figures = run(compare, tmp_path / "compare", inputs, task="seq2seq", **settings)
    assert (figures["value"], figures["method"], figures["better"]) == (100.0, "permutation", True)
    texts = zip(table["label"].to_pylist(), table["prediction"].to_pylist(), strict=True)
    assert (figures["gained"], figures["lost"]) == (sum(one != other for one, other in texts), 0)


def test_metrics_are_those_of_sacrebleu_and_of_rouge_score() -> None:
    draw = random.Random(5)
    words = ["the", "cat", "sat", "on", "Mat", "U.S.", "x-y", "groß", "日本", "12"]
    texts = [[" ".join(draw.choices(words, k=draw.randrange(14))) for _ in range(60)] for _ in range(2)]
    pairs = Generated(*(np.array(side, np.object_) for side in texts))
    found = metrics.compute(METRICS, pairs)
    predictions, references = pairs.predictions.tolist(), [pairs.references.tolist()]
    assert found["bleu"] == pytest.approx(sacrebleu.corpus_bleu(predictions, references).score, abs=1e-9)
    assert found["chrf"] == pytest.approx(sacrebleu.corpus_chrf(predictions, references).score, abs=1e-9)
    # What rouge-score 0.1.2 gave; it needs nltk and absl.
    for prediction, reference, *expected in (
        ("the cat sat on the mat", "the cat lay on a mat", 2 / 3, 0.2, 2 / 3),
        ("The U.S. cat's 2 hats!", "the us cats 2 hats", 0.5, 0.2, 0.5),
        ("a b a b c", "b a c a b", 1.0, 0.5, 0.6),
        ("", "a b", 0.0, 0.0, 0.0),
    ):
        one = Generated(*(np.array([text], np.object_) for text in (reference, prediction)))
        assert list(metrics.compute(["rouge1", "rouge2", "rougeL"], one).values()) == pytest.approx(expected), reference
    assert metrics.compute(["exact_match"], Generated(*np.array([["a ", "b"], ["a", "c"]], object))) == {
        "exact_match": 0.5
    }


@pytest.mark.parametrize(
    ("texts", "tokenizer"),
    [
        (["Привет мир", "красный дом стоит"], "13a"),
        (["Fußgänger überqueren die Straße", "Äpfel und Öl"], "13a"),
        (["हिन्दी में लिखा है", "नमस्ते दुनिया"], "13a"),
        (["한국어 단어 세 개", "안녕 세상"], "13a"),
        (["我喜欢喝茶", "使用 TensorFlow 框架"], "zh"),
        (["日本語のテキストです", "これはペンです"], "char"),
        (["ภาษาไทยไม่มีช่องว่าง", "สวัสดีชาวโลก"], "char"),
    ],
)
def test_copies_are_perfect_in_every_script_and_other_texts_are_not(texts: list[str], tokenizer: str) -> None:
    references, names = np.array(texts, object), [*METRICS, "bleu_13a", "bleu_zh", "bleu_char", "bleu_intl"]
    perfect = metrics.compute(names, Generated(references, references))
    most = {name: 1.0 if "rouge" in name or name == "exact_match" else 100.0 for name in names}
    assert perfect == pytest.approx(most)
    worse = Generated(references, np.array([text[: len(text) * 2 // 3] for text in texts], object))
    found = metrics.compute(names, worse)
    assert 0.4 < found["rouge1"] < 1 and 0.4 < found["rougeL"] < 1
    library = sacrebleu.BLEU(tokenize=tokenizer, effective_order=True)
    expected = library.corpus_score(worse.predictions.tolist(), [texts]).score
    assert found["bleu"] == found[f"bleu_{tokenizer}"] == pytest.approx(expected)
    remarks = metrics.remarks(names, worse)
    assert len(remarks) == (tokenizer != "13a")
    assert all(f"is {tokenizer} for 2 rows" in remark and f"tok:{tokenizer}" in remark for remark in remarks)


def test_short_copies_are_perfect_and_references_that_are_too_short_for_a_metric_do_not_count() -> None:
    short = np.array(["yes", "no way", "!"], object)
    found = metrics.compute(METRICS, Generated(short, short))
    most = {"bleu": 100.0, "chrf": 100.0, "rouge1": 1.0, "rouge2": 1.0, "rougeL": 1.0, "exact_match": 1.0}
    assert found == pytest.approx(most)
    assert metrics.compute(["bleu"], Generated(short, np.array(["yes", "no", "?"], object)))["bleu"] > 0
    signs = metrics.compute(METRICS, Generated(short[2:], short[2:]))
    assert {name for name, value in signs.items() if math.isnan(value)} == {"rouge1", "rouge2", "rougeL"}
    nothing = metrics.compute(METRICS, Generated(short[:2], np.array(["", ""], object)))
    assert set(nothing.values()) == {0.0}


def test_figures_on_draws_of_rows_are_those_of_the_rows_drawn() -> None:
    texts = [["a cat", "two red dogs", "x"], ["a cat sat", "two dogs ran", "y"]]
    pairs = Generated(*(np.array(side, np.object_) for side in texts))
    counts = np.array([[1, 1, 1], [0, 2, 1], [3, 0, 0], [0, 0, 3]], np.int32)
    for name, figure in figures(METRICS, pairs).items():
        drawn = [metrics.compute([name], pairs.take(np.repeat(np.arange(3), count)))[name] for count in counts]
        assert figure(counts).tolist() == pytest.approx(drawn, nan_ok=True), name


def test_training_is_keyed_by_how_answers_are_made_only_where_a_metric_of_them_chooses() -> None:
    task = Seq2Seq(OPTIONS)
    assert task.options_of("fit") == {}
    assert task.options_of("tokenize").keys() == {"prefix", "max_target_length"}
    assert task.options_of("predict")["num_beams"] == 1 and "prefix" not in task.options_of("predict")
