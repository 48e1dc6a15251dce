"""The program that finds hard negatives by embeddings: `python -m training.programs.mine_negatives JOB`, usually
through `accelerate launch`.

inputs     data (train.arrow; with num_candidates also the evaluated splits, with corpus corpus.arrow), model and
           tokenizer (folders of a model of embeddings)
settings   MineSettings, below
output     train.arrow: the rows with their negatives
result     training.data.hard_negatives.MineResult

Each distinct text is embedded once, in blocks (training/jobs/blocks.py). The processes take the batches of a block in
turns; one process writes the same bytes as several with as many threads each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from training import task_types
from training.data.hard_negatives import MineResult, QueryRows, find_candidates, find_negatives, read_documents
from training.data.ipc_files import read_table
from training.jobs.blocks import BLOCKS, ROWS_IN_BLOCK, compute_blocks
from training.jobs.program import run_program
from training.jobs.protocol import OUTPUT, Events, Job, NotInKey, TaskSettings, rank
from training.programs.predict import progress_of_rows
from training.recipe.data_fields import Negatives
from training.task_types.task_type import MinesNegatives
from training.tokenization.transformers_encoder import load_encoder

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from training.task_types.text_embedding import TextEmbedding
    from training.tokenization.encoder import Encoder

TEXTS_AT_ONCE = 64
"""Not a field of the recipe: another number would round embeddings otherwise, and each is stored once."""


class MineSettings(TaskSettings):
    """The settings of a job of this program. The task type is that of the rows."""

    negatives: Negatives
    model: TaskSettings
    """The task type of the model of embeddings."""
    is_trained: Annotated[bool, NotInKey("the files of a model say whether it is trained")]
    """Whether training has prepared the model: then it must have all weights."""
    max_length: int
    """Tokens a text."""
    mixed_precision: Literal["no", "bf16", "fp16"]
    micro_batch_divisor: Annotated[int, NotInKey("its parts have the same rows")] = 1
    """Divides the texts of a batch, so that it fits into memory."""


def main(job_dir: Path, job: Job, events: Events) -> MineResult:
    """Embeds the queries and documents of the training rows, and further documents, and adds near documents to the
    rows."""
    from training.distributed import ranks

    device = ranks.join_group()
    settings = MineSettings.model_validate(job.settings)
    task_type = cast(MinesNegatives, task_types.load(settings.task, settings.options))
    # The training rows come last: rows that are appended to them change no earlier block of texts.
    files = [file for split in ("validation", "test", "train") if (file := _rows_of(job, split)).is_file()]
    by_file = {file: QueryRows.read(task_type, file) for file in files}
    texts = [text for rows in by_file.values() for text in rows.corpus.order]
    further = read_documents(Path(job.inputs["data"]))
    groups = texts, [(text, True) for text in further]
    vectors, embedded = embed(groups, job_dir, job, settings, events, device)
    ranks.leave_group()
    if vectors is None:
        return MineResult(rows=0, negatives=0, without=0)  # of another rank, which is not read

    def report(done: int, total: int) -> None:
        events.progress(phase="search", done=done, total=total)

    chosen, start, result = settings.negatives, 0, MineResult(rows=0, negatives=0, without=0)
    for file, rows in by_file.items():
        order = rows.corpus.order
        own, is_document = vectors[start : start + len(order)], np.array([document for _, document in order], np.bool_)
        start += len(order)
        queries, documents = own[~is_document], own[is_document]
        if file.stem == "train":
            new = rows.corpus.add_documents(further)
            documents = np.concatenate([documents, vectors[len(texts) :][new]])
        scores = partial(_products, queries, documents.T)
        if file.stem == "train":
            found = find_negatives(rows.corpus, scores, chosen, report)
            result = rows.write(found, chosen.num_negatives, job_dir / OUTPUT / file.name)
        else:
            assert chosen.num_candidates is not None
            rows.write_candidates(
                find_candidates(rows.corpus, scores, chosen.num_candidates), job_dir / OUTPUT / file.name
            )
    return result.model_copy(update={"texts": len(vectors), "embedded": embedded})


def _rows_of(job: Job, split: str) -> Path:
    return Path(job.inputs["data"]) / f"{split}.arrow"


def _products(
    queries: npt.NDArray[np.float32], documents: npt.NDArray[np.float32], first: int, last: int
) -> npt.NDArray[np.float32]:
    """(q, C) of queries (Q, D) and documents (D, C)."""
    return np.asarray(queries[first:last] @ documents)


def embed(
    groups: Sequence[Sequence[tuple[str, bool]]],
    job_dir: Path,
    job: Job,
    settings: MineSettings,
    events: Events,
    device: torch.device,
) -> tuple[npt.NDArray[np.float32] | None, int]:
    """The embeddings of the texts, each with whether it is a document, (M, D) of length 1 on rank 0, None on others;
    and the number of texts that were embedded now, not by an earlier job. A block has texts of one group, so a text
    that is appended to a group changes no block of the others."""
    from training.batching.batches import TokenRows
    from training.engine.inference import predict
    from training.models import loading
    from training.task_types.text_embedding import Embeddings, TextEmbedding, normalize

    folder, tokenizer_folder = Path(job.inputs["model"]), Path(job.inputs["tokenizer"])
    task_type = task_types.load(settings.model.task, settings.model.options)
    assert isinstance(task_type, TextEmbedding)
    blocks = _tokenize(task_type, load_encoder(tokenizer_folder, folder, settings.max_length), groups, events)
    tokenizer = loading.load_tokenizer(tokenizer_folder, folder)
    collate = task_type.collator(tokenizer, loading.padding_multiple())
    batch_size, done = -(-TEXTS_AT_ONCE // settings.micro_batch_divisor), 0

    @cache
    def load_network() -> PreTrainedModel:
        if settings.is_trained:
            return loading.load_trained(task_type, folder)
        network = loading.load_base(task_type, folder, seed=0)
        task_type.prepare(network, tokenizer)
        return network

    def compute(number: int) -> pa.Table | None:
        nonlocal done
        rows = TokenRows(blocks[number].tokens)
        report = progress_of_rows(events, "train", int(blocks[number].places.min()), sum(map(len, groups)))
        found = predict(
            task_type, load_network().to(device), rows, collate, batch_size, settings.mixed_precision, report
        )
        done += len(rows)
        return None if rank() else found.select(["text_ids", "embeddings"])

    files = compute_blocks(job_dir / BLOCKS, [block.digest for block in blocks], compute)
    if rank() > 0:
        return None, done
    parts = [Embeddings.of(read_table(files[block.digest])).vectors for block in blocks]
    vectors = np.concatenate(parts)[np.argsort(np.concatenate([block.places for block in blocks]))]
    return normalize(vectors), done


@dataclass(frozen=True)
class TokenBlock:
    """The tokens of up to ROWS_IN_BLOCK texts, those of queries first."""

    tokens: pa.Table
    places: npt.NDArray[np.int64]
    """The number of each text."""

    @property
    def digest(self) -> str:
        """Names all that the block's embeddings depend on, except for the model."""
        content = hashlib.sha256()
        for name in ("text_ids", "text_lengths", "input_ids"):
            values = self.tokens[name].combine_chunks().flatten().to_numpy()
            content.update(values.astype(np.int64).tobytes())
        return content.hexdigest()[:40]


def _tokenize(
    task_type: TextEmbedding, encoder: Encoder, groups: Sequence[Sequence[tuple[str, bool]]], events: Events
) -> list[TokenBlock]:
    """The tokens of the texts with their prompts: queries by that of the task type's first column, documents by that of
    its second one."""
    blocks, columns, start = list[TokenBlock](), [*task_type.own_prompts][:2], 0
    for of_block in (group[at : at + ROWS_IN_BLOCK] for group in groups for at in range(0, len(group), ROWS_IN_BLOCK)):
        events.progress(phase="tokenize", done=start, total=sum(map(len, groups)))
        parts, places = list[pa.RecordBatch](), list[int]()
        for column, wanted in zip(columns, (False, True), strict=True):
            chosen = [place for place, (_, is_document) in enumerate(of_block) if is_document == wanted]
            if chosen:
                rows = pa.RecordBatch.from_pydict({column: [of_block[place][0] for place in chosen]})
                parts.append(task_type.features(encoder, rows).rows)
                places += chosen
        blocks.append(TokenBlock(pa.Table.from_batches(parts).combine_chunks(), start + np.array(places)))
        start += len(of_block)
    return blocks


if __name__ == "__main__":
    run_program(main)
