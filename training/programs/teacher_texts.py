"""The program in which a teacher writes the targets of training rows: `python -m training.programs.teacher_texts JOB`,
usually through `accelerate launch`.

inputs     model, tokenizer (the teacher's folders, which may be one), data (train.arrow)
settings   training.programs.teacher_outputs.TeacherSettings
output     train.arrow: the rows with the texts that the teacher generates as their targets
result     training.programs.teacher_outputs.TeacherResult

Nothing is sampled. The texts are generated in blocks of rows (training/jobs/blocks.py), which are named by the rows
without their targets. The processes take the batches of a block in turns; one process writes the same bytes as several
with as many threads each.
"""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from training import task_types
from training.data.ipc_files import in_blocks, ipc_writer
from training.jobs.blocks import BLOCKS, ROWS_IN_BLOCK, compute_columns
from training.jobs.program import run_program
from training.jobs.protocol import OUTPUT, Events, Job, rank
from training.programs.predict import progress_of_rows
from training.programs.predict_champion import require_task
from training.programs.teacher_outputs import FIELD, TeacherResult, TeacherSettings, in_field_of_teacher
from training.task_types.causal_lm import CausalLM
from training.task_types.task_type import TaskType, WritesTargets
from training.tokenization.transformers_encoder import load_encoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TEXT, CUT = "text", "cut"
ROWS_AT_ONCE = 16
"""Not a field of the recipe: another number would round logits otherwise, and each text is stored once."""


def main(job_dir: Path, job: Job, events: Events) -> TeacherResult:
    """Generates the targets of all rows."""
    import torch

    from training.distributed import ranks
    from training.models import loading

    device = ranks.join_group()
    loading.make_deterministic()
    settings = TeacherSettings.model_validate(job.settings)
    folder, tokenizer_folder = Path(job.inputs["model"]), Path(job.inputs["tokenizer"])
    task_type: TaskType = task_types.load(settings.task, settings.options)
    assert isinstance(task_type, WritesTargets)
    require_task(task_type, settings.task, folder, settings.teacher, "teacher", FIELD, "name a teacher of this task.")
    with in_field_of_teacher(settings.teacher):
        encoder = load_encoder(tokenizer_folder, folder, settings.max_length)
        tokenizer = loading.load_tokenizer(tokenizer_folder, folder)
    stored = pa.ipc.open_file(pa.memory_map(str(Path(job.inputs["data"]) / "train.arrow"))).read_all()
    prompts = pa.Table.from_batches([task_type.unanswered(batch) for batch in stored.to_batches()])
    at_once, computed, spent_s = -(-settings.batch_size // settings.micro_batch_divisor), 0, 0.0

    @cache
    def load_network() -> PreTrainedModel:
        with in_field_of_teacher(settings.teacher):
            network = loading.load_trained(task_type, folder)
            if isinstance(task_type, CausalLM):  # training would turn off the cache, which generation needs
                task_type.set_end_tokens(network, tokenizer)
            else:
                task_type.prepare(network, tokenizer)
        return network.to(device)

    def compute_block(split: str, first: int, block: pa.Table) -> pa.Table | None:
        nonlocal computed, spent_s
        network, report = load_network(), progress_of_rows(events, split, first, len(prompts))
        began = time.monotonic()
        found: dict[int, tuple[list[str], list[bool]]] = {}
        dtype = loading.DTYPES[settings.mixed_precision]
        with torch.autocast(device.type, dtype, enabled=settings.mixed_precision != "no"):
            for start in range(at_once * ranks.rank(), len(block), at_once * ranks.world_size()):
                (rows,) = block.slice(start, at_once).combine_chunks().to_batches()
                found[start] = task_type.write_targets(network, tokenizer, encoder, rows)
                if rank() == 0:
                    report(min(start + at_once * ranks.world_size(), len(block)))
        for of_rank in ranks.all_gather(found):
            found |= of_rank
        computed += len(block)
        spent_s += time.monotonic() - began
        texts = [text for start in sorted(found) for text in found[start][0]]
        cut = [is_cut for start in sorted(found) for is_cut in found[start][1]]
        return None if rank() else pa.table({TEXT: pa.array(texts, pa.string()), CUT: pa.array(cut, pa.bool_())})

    columns = compute_columns(job_dir / BLOCKS, {"train": prompts}, compute_block, ROWS_IN_BLOCK)
    ranks.leave_group()
    cut = 0
    for split, found in columns.items():
        texts, done = found[TEXT].to_pylist(), 0
        answered = list[pa.RecordBatch]()
        for batch in stored.to_batches():
            answered.append(task_type.with_targets(batch, texts[done : done + batch.num_rows]))
            done += batch.num_rows
        with ipc_writer(job_dir / OUTPUT / f"{split}.arrow", stored.schema) as writer:
            for batch in in_blocks(answered, stored.schema):
                writer.write(batch)
        if cut := sum(found[CUT].to_pylist()):
            events.warning(
                f"{cut:,} of {len(texts):,} answers of {settings.teacher} reached options.max_new_tokens and were cut: "
                "they are targets as they are. Raise it if answers are longer; else the teacher does not end its texts."
            )
    return TeacherResult(
        rows=len(prompts), rows_per_second=round(computed / max(spent_s, 1e-9), 1), computed=computed, cut=cut
    )


if __name__ == "__main__":
    run_program(main)
