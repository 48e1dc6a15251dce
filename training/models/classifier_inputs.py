"""The input of a classifier's head, an embedding of the text: made equal to the embedding that the base model was
trained to give, and reached without the head.

Classifiers of BERT and similar models read the first token through a dense layer with tanh. Base models for sentence
embeddings mostly give the mean of all tokens. An appended layer whose attention is uniform computes this mean in the
first token, so transformers loads the model by its config.json as any other:

    query = key = 0             each token attends equally to all tokens that are not padding
    value = 1, output = 100     the mean m of the tokens, which outweighs the token h that is added to it
    LayerNorm(100 m + h)        m, standardized; the feed-forward part adds 0
    tanh(x / 10)                the dense layer; nearly linear

H dimensions of a hidden state.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from training.models.pooling import pooling_of
from training.problems import UserError

POOLED = "classifier_reads"
"""The field of a model's config with the pooling that `read_embedding` has set."""
_OF_BERT = ("bert", "camembert", "roberta", "xlm-roberta")
_MEAN_SCALE, _DENSE_SCALE = 100.0, 0.1


def read_embedding(model: PreTrainedModel) -> None:
    """Sets the input of a classifier's head to the embedding of the base model: pooled as its files of
    sentence-transformers name it, else to the mean. The models of a type that is not known here stay as they are."""
    config = model.config
    if getattr(config, POOLED, None) is not None:  # an earlier training has set it
        return
    try:
        pooling = pooling_of(config, Path(config.name_or_path)).pooling
    except UserError as error:
        message = "its files of sentence-transformers name a pooling that options.contrastive does not know: choose a "
        raise UserError.of("model", "model.path", f"{message}base model with the mean or the first token.") from error
    if hasattr(config, "classifier_pooling") and pooling in ("mean", "cls"):
        config.classifier_pooling = pooling
    elif config.model_type in _OF_BERT and pooling in ("mean", "cls"):
        if pooling == "mean":
            _append_mean(model)
        _set_identity(_dense_layer(model), _DENSE_SCALE)
    else:
        return
    setattr(config, POOLED, pooling)


def take_head(model: PreTrainedModel) -> tuple[str, nn.Linear]:
    """Removes the head, so that `logits` are its input. Returns its name and the layer, for `put_head`."""
    within = f"{model.base_model_prefix}."
    name, head = [
        (name, layer)
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
        and layer.out_features == model.config.num_labels
        and not name.startswith(within)
    ][-1]
    model.set_submodule(name, nn.Identity())
    return name, head


def put_head(model: PreTrainedModel, name: str, head: nn.Linear) -> None:
    model.set_submodule(name, head)


def _append_mean(model: PreTrainedModel) -> None:
    encoder = model.base_model.encoder
    layer = deepcopy(encoder.layer[-1])
    attention = layer.attention
    for dense in (attention.self.query, attention.self.key, layer.intermediate.dense, layer.output.dense):
        _set_identity(dense, 0.0)
    _set_identity(attention.self.value, 1.0)
    _set_identity(attention.output.dense, _MEAN_SCALE)
    for norm in (attention.output.LayerNorm, layer.output.LayerNorm):
        nn.init.ones_(norm.weight)
        nn.init.zeros_(norm.bias)
    encoder.layer.append(layer)
    model.config.num_hidden_layers += 1


def _set_identity(dense: nn.Linear, scale: float) -> None:
    """Sets the layer to its input times `scale`; with 0 its shape may be any."""
    with torch.no_grad():
        dense.weight.zero_()
        dense.bias.zero_()
        if scale:
            dense.weight.fill_diagonal_(scale)


def _dense_layer(model: PreTrainedModel) -> nn.Linear:
    pooler = getattr(model.base_model, "pooler", None)  # RoBERTa's classifier has the layer itself
    return cast(nn.Linear, (model.classifier if pooler is None else pooler).dense)
