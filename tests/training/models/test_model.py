"""Requirements of a model before it is trained."""

from __future__ import annotations

import pytest
import torch
import transformers

from training.models.loading import require_positions
from training.problems import UserError

SMALL = {"vocab_size": 40, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
HALVES = {
    **{f"{half}_{name}": value for half in ("encoder", "decoder") for name, value in (("layers", 1), ("ffn_dim", 16))},
    **{"vocab_size": 40, "d_model": 8, "encoder_attention_heads": 2, "decoder_attention_heads": 2},
}


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("bert", {**SMALL, "max_position_embeddings": 16}),
        ("roberta", {**SMALL, "max_position_embeddings": 18, "pad_token_id": 1}),
        ("gpt2", {"vocab_size": 40, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}),
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
