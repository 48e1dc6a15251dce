"""Sequence to sequence: a text becomes another text, such as its translation or summary.

A row of the data set        {"source": "A dog runs.", "target": "Ein Hund rennt."}
token features               {"input_ids": [71, 1782, ..., 1], "length": 5, "label": [1193, ..., 1], "targets": 6}
                             and `reference`, the target as a text, for metrics
a padded batch               {"input_ids": (B, T), "attention_mask": (B, T), "labels": (B, S)}, labels padded with -100
the decoder's input          decoder_input_ids (B, S), made by the model: its start token, then the labels
the model's output           logits (B, S, V); the prediction is generated token by token

B rows of a batch, T tokens of the longest source, S of the longest target, V vocabulary.

A target ends with the tokenizer's eos token, or else its sep token, as for BERT's and those of models from scratch. The
decoder starts with the token that the model's config names, or else, as in T5, with the pad token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import pyarrow as pa
from pydantic import Field

from training.evaluation.constant_predictions import Baseline, Constant, read_column, sample_evenly, shorten
from training.evaluation.generated_texts import Generated
from training.problems import UserError
from training.recipe.tables.metrics import TEXTS, metrics_for
from training.task_types.generation import Generation, listed, unset_ineffective
from training.task_types.targets import HasTargets, chooses_loss
from training.task_types.task_type import Column, LearnsTokens, TaskType, WritesTargets
from training.tokenization.features import Features, count_lost, list_column

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.utils import ModelOutput

    from training.batching.batches import Batch, PadToLongest, TokenRows
    from training.recipe import Training
    from training.task_types.task_type import Loss
    from training.tokenization.encoder import Encoder

_SHARDED = ("fsdp", "deepspeed-zero3")
"""Strategies that shard weights. All processes must take part in each forward pass, but the lengths of their generated
texts differ."""

FREQUENT_TARGETS = 5
"""The number of frequent training targets that are tried as constant predictions."""
CHOOSING_ROWS = 200
"""The number of training rows that choose the best of them; metrics of texts are slow."""

EXACT = 1e-2
"""The largest tolerance between runs with the same precision."""


class Seq2Seq(LearnsTokens, HasTargets, WritesTargets):
    """A generated text for each text."""

    class Options(Generation, TaskType.Options):
        prefix: str = ""
        """A text before each source, such as `translate English to German: ` for T5."""
        max_target_length: int = Field(default=128, ge=1)
        """The most tokens of a target, special tokens included; longer targets are truncated."""
        generate_while_training: bool = True
        """Whether evaluations during training generate texts, which is slow. If not, they compute only the loss."""

    options: Options
    option_stages: ClassVar = {
        "tokenize": ("prefix", "max_target_length"),
        "fit": (),
        "evaluate": (*Generation.model_fields, "generate_while_training"),
        "predict": tuple(Generation.model_fields),
        **dict.fromkeys(("score", "compare"), ()),
    }
    learned_options: ClassVar[Sequence[str]] = ("prefix",)
    auto_class = "AutoModelForSeq2SeqLM"
    hub_task = "text2text-generation"
    pipeline = False  # transformers has none any more
    card_sentence = "Generates a text from a {text}"
    generates_text = True
    teacher_outputs = "tokens"
    teacher_writes = True
    causal = False
    columns: ClassVar = {"source": Column("text"), "target": Column("text", target=True)}
    prediction_type: ClassVar = TEXTS
    metrics: ClassVar = metrics_for(TEXTS)
    target_form = "tokens"

    def position_limits(self) -> dict[str, int]:
        return {name: getattr(self.options, name) for name in ("max_target_length", "max_new_tokens")}

    def while_training(self, strategy: str) -> Self:
        """Computes only the loss if generate_while_training is false or the weights are sharded."""
        sharded = strategy in _SHARDED
        if self.options.generate_while_training and not sharded:
            return self
        loss_only = type(self)(self.options.model_dump())
        loss_only.loss_only_reason = ""
        if self.options.generate_while_training:
            loss_only.loss_only_reason = (
                f"with {strategy}, nothing is generated while training: evaluations give the loss alone, "
                "and the metrics come with the predictions of the trained model."
            )
        return loss_only

    def prepare(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Sets the tokens of targets. Raises UserError if there is no end token, and if the model lacks positions for
        the tokens that the options allow."""
        from training.models.loading import require_positions

        require_positions(model, **self.position_limits())
        set_target_tokens(model, tokenizer)

    def features(self, encoder: Encoder, rows: pa.RecordBatch) -> Features:
        """input_ids and length, of the prefix and `source`; and, if rows have targets, `label`, the token ids
        (list<int64>) of `target`, `targets` (int32), their number, and `reference`, its text."""
        sources = encoder.encode([self.options.prefix + text for text in rows.column("source").to_pylist()], None)
        columns: dict[str, Any] = {"input_ids": list_column(sources.ids, sources.lengths), "length": sources.lengths}
        if "target" not in rows.schema.names:
            return Features(pa.RecordBatch.from_pydict(columns), sources.lost)
        most = self.options.max_target_length
        if most <= (special := encoder.special_tokens(pairs=False)):
            message = f"{most} leaves no room for a target and its {special} special tokens: choose more."
            raise UserError.of("tokens", "options.max_target_length", message)
        references = rows.column("target").to_pylist()
        targets = encoder.encode_targets(references, most)
        columns |= {"label": list_column(targets.ids.astype(np.int64), targets.lengths), "targets": targets.lengths}
        columns |= {"reference": rows.column("target")}
        rows_of_tokens = np.repeat(np.arange(len(targets.lengths)), targets.lengths)
        unwritable = len(np.unique(rows_of_tokens[targets.ids == (-1 if encoder.unk is None else encoder.unk)]))
        remarks = count_lost(lambda texts: encoder.encode_targets(texts, special + len("a  b")), references)
        batch = pa.RecordBatch.from_pydict(columns)
        return Features(batch, sources.lost, targets.lost, remarks=remarks, unwritable=unwritable)

    def collator(self, tokenizer: PreTrainedTokenizerBase, multiple: int) -> PadToLongest:
        from training.batching.batches import PadSourceAndTarget

        return PadSourceAndTarget(tokenizer, multiple)

    def loss(self, training: Training, labels: Sequence[str], train: TokenRows, *, outside: bool) -> Loss | None:
        """Cross entropy inside of the model, or the loss of each target token. Smoothing is outside of it too, because
        the Trainer would pass no labels to the model."""
        is_outside = outside or chooses_loss(training)
        return super().loss(training, labels, train, outside=outside) if is_outside else None

    def targets(self, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        from training.task_types.losses.target_losses import select_targets

        return select_targets(logits, labels)

    def target_count(self, batch: Batch) -> int:
        from training.batching.batches import IGNORED

        return int((self.target_ids(batch) != IGNORED).sum())

    def target_ids(self, batch: Batch) -> torch.Tensor:
        from training.task_types.losses.token_distillation import token_labels

        return token_labels(batch["labels"])

    def forward(self, model: PreTrainedModel, batch: Batch) -> ModelOutput:
        """The logits (B, S, V); nothing without targets. The model makes its decoder's input from the labels."""
        from transformers.utils import ModelOutput

        return model(**{**batch, "labels": self.target_ids(batch)}) if "labels" in batch else ModelOutput()

    def write_targets(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, encoder: Encoder, rows: pa.RecordBatch
    ) -> tuple[list[str], list[bool]]:
        """The texts of `predictions`."""
        import torch

        from training.batching.batches import TokenRows
        from training.models.loading import padding_multiple

        tokens = TokenRows(pa.Table.from_batches([self.features(encoder, rows).rows]))
        batch = self.collator(tokenizer, padding_multiple())([tokens[row] for row in range(len(tokens))])
        inputs = {name: tensor.to(model.device) for name, tensor in batch.items()}
        with torch.inference_mode():
            found = pa.Table.from_batches([self.predictions(model, self.forward(model, inputs), inputs)])
        return self.decode(found, tokenizer)["prediction"].to_pylist(), self._is_cut(found, model)

    def with_targets(self, rows: pa.RecordBatch, texts: Sequence[str]) -> pa.RecordBatch:
        return rows.set_column(rows.schema.get_field_index("target"), "target", pa.array(texts, pa.string()))

    def predictions(self, model: PreTrainedModel, outputs: ModelOutput, batch: Batch) -> pa.RecordBatch:
        """`prediction`, the generated tokens (list<int32>), unless there is a `loss_only_reason`; and, with targets,
        `loss`, the sum of their cross entropies, and `targets`, their number."""
        from training.task_types.losses.token_likelihood import sums_by_row

        columns: dict[str, Any] = {}
        if self.loss_only_reason is None:
            inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
            generated = model.generate(**inputs, generation_config=self.options.settings_for(model)).cpu().numpy()
            columns["prediction"] = pa.array(list(generated), pa.list_(pa.int32()))
        if "labels" in batch:
            sums = sums_by_row(outputs["logits"], batch["labels"])
            columns |= {name: sums[name] for name in ("loss", "targets")}
        return pa.RecordBatch.from_pydict(columns)

    def cut_texts(self, predictions: pa.Table, model: PreTrainedModel) -> int:
        """The generated texts without an end token."""
        if "prediction" not in predictions.column_names:
            return 0
        return sum(self._is_cut(predictions, model))

    def _is_cut(self, predictions: pa.Table, model: PreTrainedModel) -> list[bool]:
        ends = listed(self.options.settings_for(model).eos_token_id)
        # A generated text begins with the decoder's start token, which may be an end token.
        return [not np.isin(ids[1:], ends).any() for ids in predictions["prediction"].to_pylist()]

    def decode(self, predictions: pa.Table, tokenizer: PreTrainedTokenizerBase) -> pa.Table:
        """`prediction` as a text without special tokens."""
        texts = tokenizer.batch_decode(predictions["prediction"].to_pylist(), skip_special_tokens=True)
        place = predictions.column_names.index("prediction")
        return predictions.set_column(place, "prediction", pa.array(texts, pa.string()))

    def metric_inputs(self, predictions: pa.Table, labels: Sequence[str]) -> Generated:
        return Generated(*(predictions[name].to_numpy() for name in ("label", "prediction")))

    def empty_predictions(self, labels: Sequence[str]) -> Generated:
        return Generated(np.empty(0, np.object_), np.empty(0, np.object_))

    def baseline(self, data: Path, tokens: Path, model: Path, labels: Sequence[str]) -> Baseline:
        """One of the most frequent training targets for every row, chosen on CHOOSING_ROWS rows at most."""
        targets = read_column(data / "train.arrow", "target")
        texts = [text for text, _ in Counter(targets.to_pylist()).most_common(FREQUENT_TARGETS)]

        def predict(text: str, rows: Generated, split: str) -> Generated:
            return Generated(rows.references, np.full(len(rows), text, np.object_))

        some = np.array(targets.take(sample_evenly(len(targets), CHOOSING_ROWS)).to_pylist(), np.object_)
        return Baseline([Constant(shorten(text), partial(predict, text)) for text in texts], Generated(some, some))

    def record_types(self, labels: Sequence[str]) -> Mapping[str, pa.DataType]:
        return {"prediction": pa.string()}

    def same_prediction(self, given: Mapping[str, Any], stored: Mapping[str, Any], tolerance: float) -> bool:
        """Compares the texts. In a lower precision all texts count as equal, because one near tie of two tokens changes
        the rest of a text."""
        return tolerance > EXACT or super().same_prediction(given, stored, tolerance)

    def to_records(self, predictions: pa.Table, labels: Sequence[str]) -> list[dict[str, Any]]:
        return [{"prediction": text} for text in predictions["prediction"].to_pylist()]

    def lines(self, record: Mapping[str, Any]) -> list[str]:
        return [record["prediction"]]

    def published_files(self, folder: Path, max_length: int) -> dict[str, str]:
        return self.options.published_files(folder)


def set_target_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Sets the decoder's start token, and the first and last token of a target, to those of this tokenizer: a
    multilingual model may have those of another language. Raises UserError if targets have no end token, because the
    model would not learn to stop."""
    import torch

    config, generation = model.config, model.generation_config
    empty_target = tokenizer(text_target="")["input_ids"]
    ends = (tokenizer.eos_token_id, tokenizer.sep_token_id)
    end = next((token for token in ends if token is not None and token in empty_target), None)
    if end is None:
        message = "adds no eos_token to a target: choose a tokenizer that does, such as that of a T5 or a BART."
        raise UserError.of("model", "tokenizer", message)
    if end not in listed(config.eos_token_id):
        config.eos_token_id = end
    if getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id
    start = config.decoder_start_token_id
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        start = int(model.prepare_decoder_input_ids_from_labels(labels=torch.tensor([empty_target]))[0, 0])
    generation.update(pad_token_id=config.pad_token_id, eos_token_id=config.eos_token_id, decoder_start_token_id=start)
    unset_ineffective(generation)
    for forced, token in {"forced_bos_token_id": empty_target[0], "forced_eos_token_id": end}.items():
        if getattr(generation, forced, None) is not None:
            setattr(generation, forced, token)
