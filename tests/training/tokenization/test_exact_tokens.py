"""Token ids are AutoTokenizer's, whatever the tokenizer: those of its folder as it came."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto import tokenization_auto

from tests.arrow import read_arrow
from tests.training import vocabularies
from tests.training.tokenization.test_tokens import save_rows
from tests.training.vocabularies import CHAT, PAIRS, ROBERTA, TEXTS, save_repository, snapshot
from training.models import repository_files as parts
from training.models.repository_files import uses_tokenizer_json
from training.problems import UserError
from training.task_types.sequence_classification import SequenceClassification
from training.tokenization import token_files, transformers_encoder
from training.tokenization.encoder import load_fast_encoder
from training.tokenization.token_files import write_tokens


def bert_that_keeps_case_in_its_file(folder: Path) -> Path:
    tokenizer = vocabularies.word_pieces(lowercase=False)
    return save_repository(folder, "bert", tokenizer, {"tokenizer_class": "BertTokenizer"})


def legacy(folder: Path) -> Path:
    special = json.dumps({"mask_token": {"content": "quick", "lstrip": True, "rstrip": False, "normalized": False}})
    return save_repository(folder, "gpt_neox", vocabularies.roberta(), ROBERTA, special_tokens_map_json=special)


def tokens_added_by_settings(folder: Path) -> Path:
    fox = {"content": "fox", "lstrip": True, "rstrip": True, "normalized": True, "single_word": False, "special": False}
    return save_repository(folder, "llama", vocabularies.chat(), {**CHAT, "added_tokens_decoder": {"320": fox}})


def python_pieces(folder: Path) -> Path:
    vocabulary = {piece: place for place, piece in enumerate(["<unk>", "the@@", "t@@", "h@@", "e", "the", "fox"])}
    return save_repository(
        folder,
        "ctrl",
        None,
        {"tokenizer_class": "CTRLTokenizer", "unk_token": "<unk>", "pad_token": "<unk>"},
        vocab_json=json.dumps(vocabulary),
        merges_txt="#version: 0.2\nt h\nth e</w>\n",
    )


ITS_CLASS_HAS_A_SAY = {
    "lower case by its class": bert_that_keeps_case_in_its_file,
    "settings of old": legacy,
    "tokens added by settings": tokens_added_by_settings,
    "settings that a class may heed": lambda folder: save_repository(
        folder, "gpt2", vocabularies.chat(), {**CHAT, "add_prefix_space": True, "add_eos_token": True}
    ),
    "class that heeds them": lambda folder: save_repository(
        folder, "gpt2", vocabularies.chat(), {**CHAT, "add_prefix_space": True, "tokenizer_class": "GPT2Tokenizer"}
    ),
    "class of its model's type": lambda folder: save_repository(folder, "qwen2", vocabularies.chat(), CHAT),
    "class by its model's type": lambda folder: save_repository(
        folder, "xlm-roberta", vocabularies.unigram(), {**ROBERTA, "tokenizer_class": None}
    ),
    "class with special tokens of its own": lambda folder: save_repository(
        folder, "t5", vocabularies.unigram(), {**ROBERTA, "tokenizer_class": "T5Tokenizer", "extra_ids": 3}
    ),
    "bytes in Python": lambda folder: save_repository(folder, "t5", None, {"tokenizer_class": "ByT5Tokenizer"}),
    "bytes between special tokens in Python": lambda folder: save_repository(
        folder, "perceiver", None, {"tokenizer_class": "PerceiverTokenizer"}
    ),
    "pieces in Python": python_pieces,
}


def check_ids(repository: Path, data: Path, pairs: bool, out: Path) -> None:
    """Ids, lengths and what was lost are as AutoTokenizer has them, by the way that the stage goes."""
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(repository)
    tokenizer, model = snapshot(repository)
    texts: tuple[Any, ...] = (TEXTS, PAIRS) if pairs else (TEXTS,)
    whole = [len(ids) for ids in reference(*texts, verbose=False)["input_ids"]]
    for max_length in (12, 40, 1000):
        if uses_tokenizer_json(tokenizer, model):
            encoder = load_fast_encoder(tokenizer, max_length)
        else:
            encoder = transformers_encoder.load_encoder(tokenizer, model, max_length)
        write_tokens(
            SequenceClassification(), data, encoder, out / str(max_length), "warning", lambda done, total: None
        )
        expected = reference(*texts, truncation=True, max_length=max_length, return_token_type_ids=pairs)
        found = read_arrow(out / str(max_length) / "train.arrow").to_pydict()
        assert found["input_ids"] == expected["input_ids"]
        assert found.get("token_type_ids") == expected.get("token_type_ids")
        assert found["length"] == [len(ids) for ids in expected["input_ids"]]
        assert found["label"] == list(range(len(TEXTS)))
        report = json.loads((out / str(max_length) / "log" / "report.json").read_text())
        assert report["lost"]["train"] == sum(whole) - sum(found["length"])
        assert report["truncated"]["train"] == sum(length > max_length for length in whole)


@pytest.fixture(params=[False, True], ids=["single", "pairs"])
def rows(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, bool]:
    return save_rows(tmp_path / "data", TEXTS, PAIRS if request.param else None), request.param


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", vocabularies.FROM_TOKENIZER_JSON)
def test_tokenizers_that_follow_their_file(tmp_path: Path, rows: tuple[Path, bool], kind: str, side: str) -> None:
    model_type, make, settings = vocabularies.FROM_TOKENIZER_JSON[kind]
    repository = save_repository(tmp_path / "it", model_type, make(), {**settings, "truncation_side": side})
    check_ids(repository, *rows, tmp_path / "out")
    assert uses_tokenizer_json(tmp_path / "tokenizer", tmp_path / "model")


@pytest.mark.parametrize("kind", ITS_CLASS_HAS_A_SAY)
def test_tokenizers_whose_class_has_a_say(
    tmp_path: Path, rows: tuple[Path, bool], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_files, "MOST_UNKNOWN", 1)  # one of them knows some pieces alone
    check_ids(ITS_CLASS_HAS_A_SAY[kind](tmp_path / "it"), *rows, tmp_path / "out")
    assert not uses_tokenizer_json(tmp_path / "tokenizer", tmp_path / "model")


def test_a_tokenizer_that_its_class_cannot_load_is_refused(tmp_path: Path) -> None:
    repository = save_repository(
        tmp_path / "it", "bert", None, {"tokenizer_class": "BertTokenizer"}, tokenizer_json="{"
    )
    with pytest.raises(UserError, match=r"AutoTokenizer cannot load it: .* Save the tokenizer again"):
        transformers_encoder.load_encoder(*snapshot(repository), 12)


def test_model_types_whose_class_transformers_overrules_are_known() -> None:
    classes = tokenization_auto.TOKENIZER_MAPPING_NAMES
    overruled = {
        kind
        for kind in tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
        if classes[kind] not in parts.TOKENIZER_JSON_CLASSES
    }
    assert overruled <= set(parts.OVERRIDDEN)


def test_special_tokens_may_be_objects_as_in_older_files(tmp_path: Path) -> None:
    as_texts = {"unk_token": "[UNK]", "eos_token": "[SEP]", "mask_token": "[LATE]"}
    as_objects = {name: {"__type": "AddedToken", "content": token} for name, token in as_texts.items()}
    encoders = [
        load_fast_encoder(save_repository(tmp_path / name, "bert", vocabularies.word_pieces(), settings), 16)
        for name, settings in (("texts", as_texts), ("objects", as_objects))
    ]
    assert [(one.eos, one.unk) for one in encoders] == [(3, 1)] * 2
