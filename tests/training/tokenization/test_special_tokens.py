"""Special tokens in texts, unknown tokens, tokens that the model does not have, and what tokens drop: counted, and
said."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tokenizers import Regex, normalizers

from tests.training.tokenization.test_tokens import save_rows, save_tokenizer
from tests.training.vocabularies import CHAT, PAIRS, chat, unigram, word_pieces
from training.data.ipc_files import ipc_writer
from training.problems import UserError
from training.task_types.causal_lm import CausalLM
from training.task_types.preference import Preference
from training.task_types.seq2seq import Seq2Seq
from training.task_types.sequence_classification import SequenceClassification
from training.task_types.sft import SupervisedFineTuning
from training.tokenization.encoder import FastEncoder, load_fast_encoder
from training.tokenization.special_tokens import find_spelt
from training.tokenization.token_files import tokenize

PLAIN = ["the quick brown fox", "the lazy dog"] * 10


def messages(folder: Path, texts: list[str], **more: Any) -> list[str]:
    """The messages on the training rows with these texts; raises UserError."""
    out = folder / "out"
    folder.mkdir(exist_ok=True)
    rows = save_rows(folder / "data", texts)
    tokenize(SequenceClassification(), rows, save_tokenizer(folder / "tokenizer"), out, 64, **more)
    problems = json.loads((out / "log/report.json").read_text())["problems"]
    return [problem["message"] for problem in problems if problem["where"] == "train"]


def test_special_tokens_in_texts_are_counted_with_the_first_of_them(tmp_path: Path) -> None:
    (message,) = messages(tmp_path, [*PLAIN, "the [SEP] dog", "a [CLS]", "[sep] and [SE P] are text"])
    assert message.startswith("2 of 23 rows spell special tokens, such as '[SEP]'. The model reads them as marks")


def test_special_tokens_are_found_in_pairs_lists_and_structures_and_not_where_they_are_encoded_as_text(
    tmp_path: Path,
) -> None:
    chats = pa.array([[{"role": "user", "content": "a"}], [], None, [{"role": "user", "content": "x<|im_end|>\ny"}]])
    rows = pa.RecordBatch.from_pydict(
        {"messages": chats, "words": pa.array([["a"], ["b", "<|im_end|>"], [], None]), "number": pa.array([1, 2, 3, 4])}
    )
    found, first = find_spelt(rows, ["<|im_start|>", "<|im_end|>"])
    assert found.tolist() == [False, True, False, True] and first == "<|im_end|>"
    assert not find_spelt(rows, [])[0].any()
    (tmp_path / "chat").mkdir()
    chat().save(str(tmp_path / "chat/tokenizer.json"))
    for split, tokens in ((False, True), (True, False)):
        settings = json.dumps({**CHAT, "split_special_tokens": split})
        (tmp_path / "chat/tokenizer_config.json").write_text(settings)
        assert bool(load_fast_encoder(tmp_path / "chat", 32).special_texts) == tokens


def save_chat(folder: Path) -> FastEncoder:
    folder.mkdir()
    chat().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(CHAT))
    return load_fast_encoder(folder, 200)


def test_special_tokens_in_messages_are_text_in_training_and_in_prediction_alike(tmp_path: Path) -> None:
    encoder = save_chat(tmp_path / "chat")
    start, end = (encoder.tokenizer.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>"))
    asked = [{"role": "user", "content": "a<|im_end|><|im_start|> b <|im_end|>"}]
    answer = {"role": "assistant", "content": "say <|im_end|>, dog"}
    whole = "<|im_start|>a<|im_end|><|im_start|> b <|im_end|><|im_end|><|im_start|>say <|im_end|>, dog<|im_end|>"

    def batch(**values: Any) -> pa.RecordBatch:
        return pa.RecordBatch.from_pydict({name: [json.dumps(value)] for name, value in values.items()})

    task, prompts = SupervisedFineTuning(), []
    row = task.features(encoder, batch(messages=[*asked, answer])).rows.to_pylist()[0]
    prompts += task.prompts(encoder, batch(messages=asked), None)
    found = [(row["input_ids"], row["of_answer"])]
    pair = batch(prompt=asked, chosen=[answer], rejected=[{**answer, "content": "no"}])
    row = Preference().features(encoder, pair).rows.to_pylist()[0]
    prompts += Preference().prompts(encoder, pair, None)
    found.append((row["input_ids"][: row["chosen_length"]], row["of_answer"][: row["chosen_length"]]))
    for (ids, of_answer), prompt in zip(found, prompts, strict=True):
        assert [ids.count(start), ids.count(end)] == [2, 2]  # those of the template, around two messages
        assert encoder.tokenizer.decode(ids, skip_special_tokens=False) == whole
        answered = [token for token, is_target in zip(ids, of_answer, strict=True) if is_target]
        assert encoder.tokenizer.decode(answered, skip_special_tokens=False).endswith("say <|im_end|>, dog<|im_end|>")
        assert ids[: len(prompt.ids)] == prompt.ids.tolist()
    assert (
        task.is_rendered(batch(messages=asked)).all() and not task.is_rendered(batch(prompt="a", completion="b")).any()
    )
    texts = batch(prompt="a", chosen="b", rejected="c")
    assert Preference().is_rendered(pair).all() and not Preference().is_rendered(texts).any()


def test_special_tokens_in_messages_are_reported_as_text(tmp_path: Path) -> None:
    save_chat(tmp_path / "chat")
    messages = [{"role": "user", "content": "a<|im_end|>"}, {"role": "assistant", "content": "b"}]
    rows = pa.RecordBatch.from_pydict({"messages": [json.dumps(messages)] * 2})
    (tmp_path / "data").mkdir()
    with ipc_writer(tmp_path / "data" / "train.arrow", rows.schema) as writer:
        writer.write(rows)
    tokenize(SupervisedFineTuning(), tmp_path / "data", tmp_path / "chat", tmp_path / "out", 64)
    found = json.loads((tmp_path / "out/log/report.json").read_text())["problems"]
    (message,) = [problem["message"] for problem in found if problem["where"] == "train"]
    assert message.startswith(
        "2 of 2 rows spell special tokens in their messages, such as '<|im_end|>'. They are read as"
    )


def test_texts_of_another_script_than_the_vocabularys_are_a_warning_and_an_error_if_most_tokens_are_unknown(
    tmp_path: Path,
) -> None:
    (message,) = messages(tmp_path / "some", [*PLAIN, *["αβγ δεζ ηθι κλμ νξο"] * 2])
    assert re.match(r"\d\.\d% of 1\d\d tokens, in 2 of 22 rows, stand for what the tokenizer does not know", message)
    with pytest.raises(UserError, match=r"train: 7\d\.\d% of 1\d{2} tokens, in 20 of 20 rows, .* Choose a model for"):
        messages(tmp_path / "most", ["αβγ δεζ ηθι κλμ νξο"] * 20)
    assert messages(tmp_path / "none", PLAIN) == []


def test_rows_of_which_most_tokens_are_unknown_are_named_however_few_they_are(tmp_path: Path) -> None:
    (message,) = messages(tmp_path, [*PLAIN * 20, "αβγ δεζ", "the κλμ νξο dog ηθι", *["κλμ"] * 3])
    assert message.startswith("0.") and message.endswith(
        " In 5 they are most tokens: 'αβγ δεζ', 'the κλμ νξο dog ηθι', 'κλμ', …."
    )


def test_the_unknown_token_is_known_without_its_name_in_the_settings(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "tokenizer")
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True}))
    encoder = load_fast_encoder(folder, 64)
    assert encoder.unk is not None and encoder.unk in encoder.encode(["αβγ"], None).ids


@pytest.mark.parametrize("column", ["target", "completion", "text"])
def test_line_breaks_spaces_and_capitals_that_the_tokenizer_drops_are_counted_in_texts_to_write(
    tmp_path: Path, column: str
) -> None:
    task, other = {
        "target": (Seq2Seq(), "source"),
        "completion": (SupervisedFineTuning(), "prompt"),
        "text": (CausalLM(), ""),
    }[column]
    texts = ["one\ntwo", "one\n", "one", "a  b", "Ant", "a\tb"]
    rows = pa.RecordBatch.from_pydict({column: texts} | ({other: ["A\nb  c"] * len(texts)} if other else {}))
    (tmp_path / "data").mkdir()
    with ipc_writer(tmp_path / "data" / "train.arrow", rows.schema) as writer:
        writer.write(rows)
    for name, tokenizer in {"t5": unigram(), "bert": word_pieces(), "gpt": chat()}.items():
        if name == "t5":
            tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(r"\s+"), " ")])
        (tmp_path / name).mkdir()
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
        (tmp_path / name / "tokenizer_config.json").write_text("{}")
        tokenize(task, tmp_path / "data", tmp_path / name, tmp_path / f"{name}-out", 64)
        problems = json.loads((tmp_path / f"{name}-out/log/report.json").read_text())["problems"]
        found = [problem["message"] for problem in problems if "the text to write" in problem["message"]]
        counts = [re.match(r"in (\d) of 6 rows, the text to write has (\w+)", message) for message in found]
        expected = [("1", "line"), ("2", "tabs"), ("1", "capital")]
        assert [count.groups() for count in counts if count] == expected[: {"t5": 2, "bert": 3, "gpt": 0}[name]]


def test_rows_with_tokens_that_the_model_does_not_have_are_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        messages(tmp_path / "fewer", [*PLAIN, *PAIRS], vocab_size=100)
    assert "rows have tokens that the model does not have: its tokenizer gives the number 1" in str(refused.value)
    assert "and its embedding has 100 rows. Name the tokenizer's own model, or call resize_token" in str(refused.value)
    assert messages(tmp_path / "all", PLAIN, vocab_size=1000) == []
