"""Embeddings of texts: options, token rows, passes and records of the task types that train them.

token features      {"input_ids": [101, 7592, 102, 101, 2088, 102], "text_lengths": [3, 3], "text_ids": [81, 36],
                     "length": 6}: the texts of a row one after another, and perhaps "label", a number
a padded batch      PadTexts in training/batching/batches.py
the model's output  logits (M, D), an embedding for each text; of a micro-batch of a step, the loss of the step ()

`text_ids` are hashes of the texts without prompts: equal texts have the same.

B rows of a batch, N rows of a split, M texts of all of them, D dimensions.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field, PositiveFloat, PositiveInt, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from training.data.duplicates import hash_ids
from training.data.vectors import as_lists
from training.models.pooling import CONFIG, Mode, Pooling, pooling_of, prompts_file, sentence_transformers_files
from training.models.repository_files import PROMPTS, text_prompts
from training.problems import UserError
from training.task_types.task_type import TaskType, WholeStep
from training.tokenization.features import Features, list_column

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.utils import ModelOutput

    from training.batching.batches import Batch, PadTexts, TokenRows
    from training.recipe import Training
    from training.task_types.task_type import Loss
    from training.tokenization.encoder import Encoder

_SHOWN = 4
"""The numbers of an embedding that a terminal shows."""


@dataclass(frozen=True)
class Embeddings:
    """The embeddings of the texts of rows, from predictions as they are stored."""

    vectors: npt.NDArray[np.float32]  # (M, D)
    ids: npt.NDArray[np.int64]  # (M,)
    counts: npt.NDArray[np.int64]  # (N,) the texts of each row

    @cached_property
    def normalized(self) -> npt.NDArray[np.float32]:
        """(M, D) of length 1."""
        return normalize(self.vectors)

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """(N,) the first text of each row."""
        starts: npt.NDArray[np.int64] = np.cumsum(self.counts) - self.counts
        return starts

    @classmethod
    def of(cls, predictions: pa.Table) -> Embeddings:
        ids, vectors = (predictions[name].combine_chunks() for name in ("text_ids", "embeddings"))
        flat = vectors.flatten().to_numpy()
        counts = ids.value_lengths().to_numpy().astype(np.int64)
        return cls(flat.reshape(int(counts.sum()), -1), ids.flatten().to_numpy(), counts)


def normalize(vectors: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """(M, D) the vectors with length 1; one of zeros stays as it is."""
    lengths: npt.NDArray[Any] = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, 1e-12))


class TextEmbedding(WholeStep):
    """The base of task types whose models give a text an embedding."""

    class Options(TaskType.Options):
        """The options of embeddings, under the names of sentence-transformers and with its defaults."""

        loss: str
        scale: PositiveFloat = 20.0
        """The factor of cosine similarities, the reciprocal of a temperature."""
        matryoshka_dims: list[PositiveInt] = Field(default_factory=list)
        """Numbers of dimensions, such as [384, 128, 64]: the loss is the sum over embeddings that are cut to them, so
        that shortened embeddings are useful too. Empty: the loss of whole embeddings."""
        matryoshka_weights: list[PositiveFloat] = Field(default_factory=list)
        """The weight of each of them; empty for equal weights."""
        pooling: Mode | None = None
        """The embedding of a text: the mean of its tokens, its first token (cls), or its last one (lasttoken), as
        decoders need it. null: as the base model's files of sentence-transformers say, else mean."""
        normalize: bool | None = None
        """Whether embeddings have length 1. null: as the base model's files say, else false."""
        prompts: Any = None
        predicted_prompt: str | None = None

        @field_validator("matryoshka_weights")
        @classmethod
        def _one_for_each(cls, weights: list[float], others: ValidationInfo) -> list[float]:
            sizes = others.data.get("matryoshka_dims", [])
            if weights and len(weights) != len(sizes):
                message = f"has {len(weights)} weights for {len(sizes)} matryoshka_dims: give one for each"
                raise PydanticCustomError("weights", message)
            return weights

    options: Options
    embeds = True
    auto_class = "AutoModel"
    hub_task = "sentence-similarity"
    pipeline = False
    repeats_inputs = True
    learned_options: ClassVar[Sequence[str]] = ("prompts",)
    own_prompts: ClassVar[Mapping[str, Sequence[str]]]
    """The columns of texts, with the names under which the prompt of each is found in the base model's files, and by
    which a request of a server selects it."""

    def prompt_columns(self) -> dict[str, Sequence[str]]:
        """`own_prompts`, of the columns that rows have under these options."""
        sets = self.column_sets()
        return {name: names for name, names in self.own_prompts.items() if any(name in columns for columns in sets)}

    # Rows

    @abstractmethod
    def texts(self, rows: pa.RecordBatch) -> list[list[tuple[str, str]]]:
        """The texts of each row, each with its column; rows to predict have only the first."""

    def features(self, encoder: Encoder, rows: pa.RecordBatch) -> Features:
        """The columns of the module's docstring."""
        prompts, by_row = self._prompts(encoder.prompts), self.texts(rows)
        asked, label = self.options.predicted_prompt, self.label_column(rows)
        if asked is not None and not label and all(len(of_row) == 1 for of_row in by_row):
            by_row = [[(asked, text)] for ((_, text),) in by_row]
        texts = [(column, text) for of_row in by_row for column, text in of_row]
        counts = np.array([len(of_row) for of_row in by_row], np.int64)
        encoded = encoder.encode([prompts.get(column, "") + text for column, text in texts], None)
        starts = np.cumsum(counts) - counts
        lengths = np.add.reduceat(encoded.lengths, starts).astype(np.int32)
        ids = hash_ids(text for _, text in texts)
        columns: dict[str, Any] = {
            "input_ids": list_column(encoded.ids, lengths),
            "text_lengths": list_column(encoded.lengths, counts),
            "text_ids": list_column(ids, counts),
            "length": lengths,
        }
        return Features(
            pa.RecordBatch.from_pydict(columns | label),
            np.add.reduceat(encoded.lost, starts),
            longest=np.maximum.reduceat(encoded.lengths + encoded.lost, starts),
        )

    def label_column(self, rows: pa.RecordBatch) -> dict[str, Any]:
        """The column `label` of the token rows, if they have one."""
        return {}

    def given_prompts(self) -> dict[str, str] | None:
        """The recipe's prompts by column; None for the base model's."""
        given: dict[str, str] | None = self.options.prompts
        return given

    def _prompts(self, of_model: Mapping[str, str]) -> dict[str, str]:
        """The prompt of each column, by the recipe or else by the model's files."""
        if (given := self.given_prompts()) is not None:
            return {column: given.get(column, "") for column in self.own_prompts}
        return {
            column: next((of_model[name] for name in names if of_model.get(name)), "")
            for column, names in self.own_prompts.items()
        }

    # Training

    def prepare(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Writes the pooling into the model's config, turns the cache off, and freezes a pooler, which gives no
        embedding. Raises UserError for models with an encoder and a decoder, and for too many dimensions."""
        from training.batching.causal_batches import disable_cache

        if model.config.is_encoder_decoder:
            message = f"{model.config.model_type!r} has an encoder and a decoder: choose a model with one of them."
            raise UserError.of("model", "model", message)
        width = model.config.get_text_config().hidden_size
        if too_large := [size for size in self.options.matryoshka_dims if size > width]:
            message = f"{too_large[0]} is more than the {width} dimensions of the model's embeddings: lower it."
            raise UserError.of("recipe", "options.matryoshka_dims", message)
        given = self.options.pooling, self.options.normalize
        setattr(model.config, CONFIG, asdict(pooling_of(model.config, Path(model.name_or_path), *given)))
        disable_cache(model)
        if (pooler := getattr(model, "pooler", None)) is not None:
            pooler.requires_grad_(False)

    def collator(self, tokenizer: PreTrainedTokenizerBase, multiple: int) -> PadTexts:
        from training.batching.batches import PadTexts

        return PadTexts(tokenizer, multiple)

    def embed(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        """(M, D) the embeddings of a batch's texts."""
        config = getattr(model, "module", model).config  # of DDP and DeepSpeed
        mask = batch["attention_mask"]
        hidden = model(input_ids=batch["input_ids"], attention_mask=mask)["last_hidden_state"]
        return pooling_of(config, Path(config.name_or_path))(hidden, mask)

    def forward(self, model: PreTrainedModel, batch: Batch) -> ModelOutput:
        """`logits` are the embeddings of the texts, (M, D); of a prepared micro-batch, the loss of the step, ()."""
        from transformers.utils import ModelOutput

        from training.task_types.losses.embedding_loss import is_prepared, step_loss

        if is_prepared(batch):
            return ModelOutput(logits=step_loss(self.embed, self.step_function, model, batch))
        return ModelOutput(logits=self.embed(model, batch))

    @property
    def step_function(self) -> Loss:
        """The loss of embeddings that the options select."""
        from training.task_types.losses.embedding_loss import EmbeddingLoss

        names = EmbeddingLoss.__dataclass_fields__.keys() & type(self.options).model_fields.keys()
        return EmbeddingLoss(**{name: getattr(self.options, name) for name in names})

    def loss(self, training: Training, labels: Sequence[str], train: TokenRows, *, outside: bool) -> Loss | None:
        return self.step_function

    def prepare_step(
        self, model: PreTrainedModel, batches: Sequence[Batch], gather: Callable[[Any], list[Any]]
    ) -> list[Batch]:
        """The micro-batches with the gradients of their embeddings, if the loss compares the rows of a step and there
        are several micro-batches or ranks."""
        from training.task_types.losses.embedding_loss import OF_WHOLE_STEP, cache_gradients

        if self.options.loss not in OF_WHOLE_STEP:
            return list(batches)
        return cache_gradients(self.embed, self.step_function, model, batches, gather)

    # Predictions

    def predictions(self, model: PreTrainedModel, outputs: ModelOutput, batch: Batch) -> pa.RecordBatch:
        """`embeddings` (list<float>), those of the row's texts one after another, and `text_ids` (list<int64>)."""
        vectors, ids = outputs["logits"].float().cpu().numpy(), batch["labels"][:, 1:].cpu().numpy()
        counts = (ids >= 0).sum(axis=1)
        return pa.RecordBatch.from_pydict(
            {
                "embeddings": list_column(vectors.reshape(-1), counts * vectors.shape[1]),
                "text_ids": list_column(ids[ids >= 0].astype(np.int64), counts),
            }
        )

    def labels_of(self, config: Any) -> list[str]:
        return []

    # Records

    def record_types(self, labels: Sequence[str]) -> Mapping[str, pa.DataType]:
        """`embedding`, that of the row's first text."""
        return {"embedding": pa.list_(pa.float32())}

    def to_records(self, predictions: pa.Table, labels: Sequence[str]) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = self.to_table(predictions, labels).to_pylist()
        return records

    def to_table(self, predictions: pa.Table, labels: Sequence[str]) -> pa.Table:
        found = Embeddings.of(predictions)
        return pa.table({"embedding": as_lists(found.vectors[found.starts])})

    def lines(self, record: Mapping[str, Any]) -> list[str]:
        vector = record["embedding"]
        return [f"embedding: {len(vector)} numbers ({', '.join(f'{value:.4f}' for value in vector[:_SHOWN])}, …)"]

    def exported_files(self, folder: Path) -> dict[str, str]:
        """The prompts that the model was trained with, as sentence-transformers stores them."""
        prompts = self._prompts(text_prompts(folder))
        by_name: dict[str, str] = {}
        for column, names in self.prompt_columns().items():
            by_name.setdefault(names[0], prompts[column])
        return {PROMPTS: prompts_file(by_name)}

    def published_files(self, folder: Path, max_length: int) -> dict[str, str]:
        """The files by which SentenceTransformer loads the model."""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        width = config.get_text_config().hidden_size  # which files of some architectures call otherwise
        files = sentence_transformers_files(Pooling(**getattr(config, CONFIG)), width, max_length)
        return {**files, **self.exported_files(folder)}
