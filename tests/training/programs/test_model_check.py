"""A model is checked by its configuration: its type, its values, its positions and its layers."""

from __future__ import annotations

from typing import Any

import pytest

from training.problems import UserError
from training.programs import create_model
from training.programs.check_model import check
from training.recipe import Lora
from training.recipe.program_settings import CheckModelSettings

BERT = {"model_type": "bert", "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
T5 = {"model_type": "t5", "vocab_size": 100, "d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2}
MARIAN = {"model_type": "marian", "vocab_size": 100, "d_model": 32, "pad_token_id": 1, "max_position_embeddings": 64}


def problems(config: dict[str, Any], task: str = "sequence-classification", **more: Any) -> dict[str, str]:
    """Field to message; empty for a model that fits."""
    usual = {"options": {}, "labels": ["a", "b"], "max_length": 32, "lora": None, "field": "model.config"}
    try:
        check(CheckModelSettings.model_validate({**usual, "task": task, "config": config, **more}))
    except UserError as error:
        return {problem.where: problem.message for problem in error.problems}
    return {}


def test_a_model_that_fits_its_task_has_no_problems() -> None:
    lora = {"target_modules": ["query", "value"], "modules_to_save": ["classifier"]}
    assert problems(BERT, lora=lora) == {} and problems(BERT, "masked-lm", labels=[]) == {}
    assert problems(T5, "seq2seq", labels=[], max_length=5000) == {}  # its positions are distances


def test_an_unknown_type_names_the_nearest_and_a_few_others() -> None:
    ((where, message),) = problems(BERT | {"model_type": "brt"}).items()
    assert where == "model.config.model_type"
    assert message == (
        "'brt' is no model type of transformers: choose one such as bert, roberta, distilbert, deberta-v2, "
        "modernbert, electra. Did you mean 'bert'?"
    )
    assert problems({"hidden_size": 32}, field="model.path")["model.path"].startswith("no model_type is named: ")


def test_a_type_that_cannot_do_the_task_is_refused_with_some_that_can() -> None:
    ((where, message),) = problems(BERT, "seq2seq", labels=[], field="model.path").items()
    assert where == "model.path"
    assert message == (
        "'bert' has no AutoModelForSeq2SeqLM, which this task type needs: choose a model of a type such as t5, mt5, "
        "bart, mbart, marian, pegasus."
    )


@pytest.mark.parametrize(
    ("changed", "where", "start"),
    [
        ({"hidden_size": 33}, "", "no bert can be made of it: The hidden size (33) is not a multiple of the number of"),
        (
            {"hidden_size": "32"},
            "",
            "bert does not accept it: Validation error for field 'hidden_size': TypeError: Field",
        ),
        ({"hiden_size": 32}, ".hiden_size", "bert has no such setting. Did you mean 'hidden_size'?"),
    ],
)
def test_values_that_do_not_fit_each_other_are_refused_in_one_line(
    changed: dict[str, Any], where: str, start: str
) -> None:
    ((field, message),) = problems(BERT | changed).items()
    assert field == f"model.config{where}" and message.startswith(start) and "\n" not in message
    with pytest.raises(UserError) as refused:  # and where the model is made, too
        create_model.make_config(BERT | changed, "model.config")
        create_model.create(BERT | changed, create_model.train_wordpiece(lambda: iter(["a b"]), 30), 0)
    assert refused.value.problems[0].where == field


def test_settings_of_a_published_model_that_transformers_passes_over_are_no_mistakes() -> None:
    assert problems(BERT | {"hiden_size": 32, "gradient_checkpoint": False}, field="model.path") == {}


def test_more_tokens_than_positions_are_refused_for_each_field_that_sets_them() -> None:
    found = problems(MARIAN, "seq2seq", labels=[], max_length=65, options={"max_target_length": 90})
    assert found.keys() == {"tokens.max_length", "options.max_target_length", "options.max_new_tokens"}
    assert found["tokens.max_length"] == "65 is out of range: MarianMTModel has positions for 64 tokens."


def test_all_layers_that_the_model_lacks_are_reported_by_name() -> None:
    lora = {"target_modules": ["qery", "value", "kay"], "modules_to_save": ["hed"]}
    with pytest.raises(UserError) as refused:
        check(
            CheckModelSettings(
                task="sequence-classification",
                labels=["a", "b"],
                max_length=999,
                lora=Lora.model_validate(lora),
                config=BERT,
                field="model.config",
            )
        )
    problems = [(problem.where, problem.message[:6]) for problem in refused.value.problems]
    assert problems == [
        ("tokens.max_length", "999 is"),
        ("training.lora.modules_to_save", "'hed' "),
        ("training.lora.target_modules", "'qery'"),
        ("training.lora.target_modules", "'kay' "),
    ]
