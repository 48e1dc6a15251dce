"""A teacher in the programs that compute its outputs: its files, its network, and the time that its blocks take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pyarrow as pa

from training import task_types
from training.jobs.blocks import BLOCKS, compute_files
from training.jobs.protocol import Events, Job, NotInKey, rank
from training.problems import UserError
from training.programs.predict import BlocksResult, ForwardSettings, progress_of_rows
from training.programs.predict_champion import require_task

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput

    from training.batching.batches import Batch, TokenRows
    from training.engine.collation import Collate
    from training.tokenization.encoder import Encoder

FIELD = "training.teacher.path"
Report = Callable[[int], None]
"""Gets the number of rows of a block that are done."""


class TeacherSettings(ForwardSettings):
    """The settings of a teacher's program. The task type and its options are the teacher's, unless the program says
    otherwise."""

    teacher: Annotated[str, NotInKey("it names the model in messages")]
    """NAME/VERSION, the repository or the folder."""
    max_length: int
    """Tokens a row; of several texts in a row, of each."""


class TeacherResult(BlocksResult):
    """The work of a teacher."""

    rest: float | None = None
    """Of language models, the mean probability of tokens that are not stored; None if the teacher wrote texts."""
    cut: int = 0
    """The texts of the teacher that were cut at options.max_new_tokens."""


class LoadedTeacher:
    """The teacher of a job, whose folders are its inputs `model` and `tokenizer`. Every rank makes one, and joins the
    others by it. Raises UserError for a model of another task."""

    def __init__(self, job_dir: Path, job: Job, settings: TeacherSettings, events: Events) -> None:
        from training.distributed import ranks
        from training.models import loading

        self.device = ranks.join_group()
        loading.make_deterministic()
        self.settings = settings
        self.folder, self._tokenizer_folder = (Path(job.inputs[name]) for name in ("model", "tokenizer"))
        self.task_type = task_types.load(settings.task, settings.options)
        self.batch_size = settings.rows_at_once
        self._blocks, self._events = job_dir / BLOCKS, events
        self._computed, self._spent_s = 0, 0.0
        name, advice = settings.teacher, "name a teacher of this task."
        require_task(self.task_type, settings.task, self.folder, name, "teacher", FIELD, advice)
        with self._in_field():
            self.tokenizer = loading.load_tokenizer(self._tokenizer_folder, self.folder)

    def load_encoder(self) -> Encoder:
        """The encoder of texts by the teacher's tokenizer."""
        from training.tokenization.transformers_encoder import load_encoder

        with self._in_field():
            return load_encoder(self._tokenizer_folder, self.folder, self.settings.max_length)

    def compute_files(
        self,
        splits: Mapping[str, pa.Table],
        compute: Callable[[PreTrainedModel, pa.Table, Report], pa.Table | None],
        rows_in_block: int,
        prepare: Callable[[PreTrainedModel], None] = lambda network: None,
    ) -> dict[str, list[Path]]:
        """The blocks of each split, as `training.jobs.blocks.compute_files`. Then the ranks part.

        Args:
            compute: Gets the network, which is loaded if a block is missing, and the rows of a block.
            prepare: Changes the network before its first block.
        """
        from training.distributed import ranks
        from training.models import loading

        sizes = [len(rows) for rows in splits.values()]
        before = dict(zip(splits, accumulate(sizes, initial=0), strict=False))

        @cache
        def load_network() -> PreTrainedModel:
            with self._in_field():
                network = loading.load_trained(self.task_type, self.folder)
                prepare(network)
            return network.to(self.device)

        def compute_block(split: str, first: int, block: pa.Table) -> pa.Table | None:
            network, began = load_network(), time.monotonic()
            report = progress_of_rows(self._events, split, before[split] + first, sum(sizes))
            found = compute(network, block, report)
            self._computed += len(block)
            self._spent_s += time.monotonic() - began
            return None if rank() else found

        files = compute_files(self._blocks, splits, compute_block, rows_in_block)
        ranks.leave_group()
        return files

    def forward(
        self,
        network: PreTrainedModel,
        rows: TokenRows,
        collate: Collate,
        read: Callable[[PreTrainedModel, ModelOutput, Batch], pa.RecordBatch],
        report: Report,
    ) -> pa.Table:
        """What `read` takes of the network's outputs for the rows, as `training.engine.inference.compute`."""
        from training.engine.inference import compute

        precision = self.settings.mixed_precision
        return compute(self.task_type, network, rows, collate, self.batch_size, precision, read, report)

    def result(self, rows: int, **more: Any) -> TeacherResult:
        """The result of the program for so many rows."""
        rate = self._computed / max(self._spent_s, 1e-9)
        return TeacherResult(rows=rows, rows_per_second=round(rate, 1), computed=self._computed, **more)

    @contextmanager
    def _in_field(self) -> Iterator[None]:
        """Inside, problems of the model and its tokenizer get the teacher's name and field; those of lengths keep
        theirs."""
        try:
            yield
        except UserError as error:
            problems = []
            for problem in error.problems:
                changes = {"message": f"the teacher {self.settings.teacher}: {problem.message}"}
                if not problem.where.startswith(("tokens.", "options.")):
                    changes |= {"kind": "training", "where": FIELD}
                problems.append(problem.model_copy(update=changes))
            raise UserError(problems) from error
