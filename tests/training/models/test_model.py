"""A model before it is trained: requirements, and outputs for the recipe's labels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from tests.training.vocabularies import byte_pairs
from training import task_types
from training.models.loading import load_for_training, require_positions
from training.problems import UserError

SMALL = {"vocab_size": 40, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
GPT2 = {"vocab_size": 40, "n_embd": 8, "n_layer": 1, "n_head": 2}
HALVES = {
    **{f"{half}_{name}": value for half in ("encoder", "decoder") for name, value in (("layers", 1), ("ffn_dim", 16))},
    **{"vocab_size": 40, "d_model": 8, "encoder_attention_heads": 2, "decoder_attention_heads": 2},
}


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("bert", {**SMALL, "max_position_embeddings": 16}),
        ("roberta", {**SMALL, "max_position_embeddings": 18, "pad_token_id": 1}),
        ("gpt2", {**GPT2, "n_positions": 16}),
        ("opt", {**SMALL, "ffn_dim": 16, "word_embed_proj_dim": 8, "max_position_embeddings": 16}),
        ("bart", {**HALVES, "max_position_embeddings": 16}),
        ("pegasus", {**HALVES, "max_position_embeddings": 16}),
    ],
)
def test_a_model_takes_as_many_tokens_as_it_has_places_for_and_no_more(model_type: str, config: dict[str, int]) -> None:
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(model_type, **config)).eval()

    def predict(tokens: int) -> None:
        ids = torch.full((1, tokens), 7)
        decoded = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
        model(input_ids=ids, attention_mask=torch.ones_like(ids), **decoded)

    require_positions(model, max_length=16)
    predict(16)
    with pytest.raises((IndexError, RuntimeError)):
        predict(17)
    with pytest.raises(UserError) as refused:
        require_positions(model, max_length=17, max_new_tokens=16, max_target_length=20)
    reason = f"is out of range: {type(model).__name__} has positions for 16 tokens."
    assert str(refused.value).splitlines() == [
        f"tokens.max_length: 17 {reason}",
        f"options.max_target_length: 20 {reason}",
    ]


def test_a_model_with_rotary_positions_takes_any_number_of_tokens() -> None:
    config = transformers.AutoConfig.for_model("llama", **SMALL, max_position_embeddings=16)
    require_positions(transformers.AutoModel.from_config(config), max_length=17)


@pytest.mark.parametrize(
    ("model_type", "config", "task"),
    [
        ("bert", SMALL, "sequence-classification"),
        ("bert", SMALL, "token-classification"),
        ("roberta", SMALL, "multi-label-classification"),
        ("gpt2", {**GPT2, "pad_token_id": 0, "eos_token_id": 2}, "sequence-classification"),
        ("bart", HALVES, "sequence-classification"),
    ],
)
def test_outputs_of_a_base_model_with_the_same_labels_in_another_order_follow_the_labels(
    model_type: str, config: dict[str, int], task: str, tmp_path: Path
) -> None:
    kind = task_types.load(task)
    theirs = transformers.AutoConfig.for_model(model_type, **config, **kind.config_fields(["CON", "NEU", "ENT"]))
    base = getattr(transformers, kind.auto_class).from_config(theirs).eval()
    for weight in base.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    base.save_pretrained(tmp_path)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_pairs())
    ids = torch.tensor([[5, 6, 7, theirs.eos_token_id or 2]])  # BART reads the last end token
    with torch.no_grad():
        expected = base(input_ids=ids).logits
        for labels, order in ((["ent", "neu", "con"], [2, 1, 0]), (["con", "ent", "neu"], [0, 2, 1])):
            model = load_for_training(kind, tmp_path, labels, tokenizer, seed=1).eval()
            torch.testing.assert_close(model(input_ids=ids).logits, expected[..., order])
            assert [*model.config.id2label.values()] == labels
        for labels in (["con", "neu", "ent"], ["con", "neu", "other"]):
            model = load_for_training(kind, tmp_path, labels, tokenizer, seed=1).eval()
            torch.testing.assert_close(model(input_ids=ids).logits, expected)
