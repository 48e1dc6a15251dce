"""A model is checked by its configuration: its type, its values, its positions and its layers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import transformers

from training.models.weights import read_shapes
from training.problems import UserError
from training.programs import create_model
from training.programs.check_model import CheckedModel, CheckModelSettings, check
from training.recipe import Lora

BERT = {"model_type": "bert", "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
T5 = {"model_type": "t5", "vocab_size": 100, "d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2}
MARIAN = {"model_type": "marian", "vocab_size": 100, "d_model": 32, "pad_token_id": 1, "max_position_embeddings": 64}


def problems(config: dict[str, Any], task: str = "sequence-classification", **more: Any) -> dict[str, str]:
    """Field to message; empty for a model that fits."""
    try:
        checked(config, task, **more)
    except UserError as error:
        return {problem.where: problem.message for problem in error.problems}
    return {}


def checked(config: dict[str, Any], task: str = "sequence-classification", **more: Any) -> CheckedModel:
    usual = {"options": {}, "labels": ["a", "b"], "max_length": 32, "lora": None, "field": "model.config"}
    return check(CheckModelSettings.model_validate({**usual, "task": task, "config": config, **more}))


def saved(config: dict[str, Any], auto_class: str = "AutoModel") -> dict[str, list[int]]:
    """The names and shapes in the file of such a model."""
    made = getattr(transformers, auto_class).from_config(transformers.AutoConfig.for_model(**config))
    with tempfile.TemporaryDirectory() as folder:
        made.save_pretrained(folder)
        return read_shapes({path.name: path for path in Path(folder).iterdir()})


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
        ({"num_hidden_layers": 10**9}, ".num_hidden_layers", "num_hidden_layers 1,000,000,000 of its configuration is"),
        (
            {"max_position_embeddings": 10**9},
            ".max_position_embeddings",
            "max_position_embeddings 1,000,000,000 of its",
        ),
        ({"num_labels": 10**9}, ".num_labels", "num_labels 1,000,000,000 of its configuration is more than 1,048,576"),
        ({"vocab_size": 10**12}, ".vocab_size", "vocab_size 1,000,000,000,000 of its configuration is more than 2,147"),
        (
            {"num_hidden_layers": -1},
            ".num_hidden_layers",
            "num_hidden_layers -1 of its configuration is negative: name",
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


LLAMA = {**BERT, "model_type": "llama", "intermediate_size": 64, "num_key_value_heads": 1}


@pytest.mark.parametrize("lora", [{"modules_to_save": ["lm_head"]}, {"modules_to_save": ["embed_tokens"]}])
def test_adapters_of_a_layer_that_shares_its_weight_are_refused_before_training(lora: dict[str, Any]) -> None:
    found = problems({**LLAMA, "tie_word_embeddings": True}, "causal-lm", labels=[], lora=lora)
    assert found.keys() == {"training.lora"}
    assert "model.embed_tokens.weight and lm_head.weight are one weight" in found["training.lora"]
    assert problems({**LLAMA, "tie_word_embeddings": False}, "causal-lm", labels=[], lora=lora) == {}


@pytest.mark.parametrize("task", ["preference", "kto"])
def test_a_reference_with_a_head_that_only_training_would_add_is_refused_before_training(task: str) -> None:
    untied, tied = ({**LLAMA, "tie_word_embeddings": tied} for tied in (False, True))
    found = problems(untied, task, labels=[])
    assert found["model.config"].startswith("a new LlamaForCausalLM has a head of its own")
    assert found["model.config"].endswith("Or set tie_word_embeddings: true.")
    assert problems(tied, task, labels=[]) == problems(untied, "sft", labels=[]) == {}
    without = problems(untied, task, labels=[], field="model.path", weights=saved(untied))
    assert "its files lack the head of LlamaForCausalLM, lm_head.weight" in without["model.path"]
    if task == "preference":
        assert problems(untied, task, labels=[], options={"loss": "orpo"}) == {}


@pytest.mark.parametrize(
    ("config", "auto_class", "task"),
    [
        (BERT, "AutoModel", "sequence-classification"),
        (BERT, "AutoModelForMaskedLM", "masked-lm"),
        (BERT, "AutoModelForTokenClassification", "token-classification"),
        ({**BERT, "model_type": "gpt2"}, "AutoModel", "causal-lm"),  # the head is the embedding
        (LLAMA, "AutoModelForCausalLM", "causal-lm"),
        (LLAMA, "AutoModelForCausalLM", "sequence-classification"),
        (T5, "AutoModelForSeq2SeqLM", "seq2seq"),
        (MARIAN, "AutoModelForSeq2SeqLM", "seq2seq"),
    ],
)
def test_a_new_head_for_the_task_is_expected(config: dict[str, Any], auto_class: str, task: str) -> None:
    labels = ["a", "b"] if "classification" in task else []
    most = {"options": {"max_target_length": 32, "max_new_tokens": 32}} if task == "seq2seq" else {}
    found = checked(config, task, labels=labels, weights=saved(config, auto_class), **most)
    assert found == CheckedModel(vocab_size=config["vocab_size"])


def test_a_masked_language_models_missing_pooler_is_a_note_and_the_random_head_of_a_causal_one_a_warning() -> None:
    found = checked(BERT, weights=saved(BERT, "AutoModelForMaskedLM"), field="model.path")
    assert found.warnings == [] and found.notes[0].startswith("model.path: its files lack the pooler (bert.pooler.")
    found = checked(LLAMA, "causal-lm", labels=[], weights=saved(LLAMA))
    assert "lack the head of LlamaForCausalLM, lm_head.weight, which is drawn at random" in found.warnings[0].message


@pytest.mark.parametrize(
    ("prefix", "advice"),
    [
        (
            "_orig_mod.",
            "'_orig_mod.' is in the names of the files; torch.compile adds it: save the model with model",
        ),
        ("module.", "'module.' is in the names of the files; DistributedDataParallel adds it: save the model with mod"),
        ("net.", "The names in the files begin with 'net.': save the model with save_pretrained()."),
    ],
)
def test_weights_under_other_names_are_refused_with_three_names_of_each_side(prefix: str, advice: str) -> None:
    weights = {f"{prefix}{name}": shape for name, shape in saved(BERT).items()}
    message = problems(BERT, weights=weights)["model.config"]
    assert message.startswith(
        "none of the 21 weights of BertForSequenceClassification is in its files: the model needs "
        "bert.embeddings.LayerNorm.bias, bert.embeddings.LayerNorm.weight, bert.embeddings.position_embeddings.weight "
        f"and 18 more; they have {prefix}embeddings.LayerNorm.bias, {prefix}embeddings.LayerNorm.weight, {prefix}emb"
    )
    assert advice in message


def test_missing_and_misshapen_weights_are_an_error_above_a_tenth_of_the_model_and_a_warning_below() -> None:
    small = BERT | {"intermediate_size": 64, "max_position_embeddings": 32}
    whole = saved(small)
    message = problems(small, weights=whole | {"embeddings.word_embeddings.weight": [90, 32]})["model.config"]
    assert "its files lack 1 of the 21 weights" in message and "bert.embeddings.word_embeddings.weight. Name" in message
    bias = "encoder.layer.0.attention.self.key.bias"
    (warning,) = checked(small, weights={name: shape for name, shape in whole.items() if name != bias}).warnings
    assert f"bert.{bias}. They are drawn at random before training." in warning.message


def test_layers_in_the_files_that_the_configuration_does_not_have_are_a_warning() -> None:
    (warning,) = checked(BERT, weights=saved(BERT | {"num_hidden_layers": 2})).warnings
    assert "its files have 16 weights of layers beyond those of config.json: encoder.layer.1." in warning.message


def test_code_that_a_configuration_names_is_a_note_for_a_published_model_and_an_error_in_a_recipe() -> None:
    named = BERT | {"attn_implementation": "owner/kernel"}
    (note,) = checked(named, field="model.path").notes
    assert note == (
        "model.path: attn_implementation 'owner/kernel' of its config.json is not used: only the recipe chooses code."
    )
    assert "code is chosen by model.attn_implementation alone: leave it out" in problems(named)["model.config"]


DEBERTA = {**BERT, "model_type": "deberta", "num_hidden_layers": 40, "relative_attention": True}


def test_a_number_format_that_the_model_cannot_compute_in_is_refused_by_its_field() -> None:
    found = problems({**DEBERTA, "pos_att_type": ["c2p"]}, mixed_precision="bf16")
    assert found["compute.mixed_precision"].startswith("'bf16' cannot be computed by DebertaForSequenceClassification")
    assert problems({**DEBERTA, "pos_att_type": ["c2p"]}) == {} and problems(BERT, mixed_precision="bf16") == {}
    for config, task in ((T5, "seq2seq"), (LLAMA, "causal-lm")):
        short = {"options": {"max_target_length": 32, "max_new_tokens": 32}} if task == "seq2seq" else {}
        assert problems(config, task, labels=[], mixed_precision="bf16", **short) == {}


@pytest.mark.slow
def test_an_export_that_torch_cannot_convert_is_refused_before_training() -> None:
    pytest.importorskip("onnxscript")
    xlnet = {"model_type": "xlnet", "vocab_size": 100, "d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 32}
    assert "torch cannot convert XLNetFor" in problems(xlnet, exports=["onnx"])["release.exports"]
    assert problems(BERT, exports=["onnx"]) == {}
