"""The program in which a teacher writes the targets of training rows: `python -m training.programs.teacher_texts JOB`,
usually through `accelerate launch`.

inputs     model, tokenizer (the teacher's folders, which may be one), data (train.arrow)
settings   training.programs.loaded_teacher.TeacherSettings
output     train.arrow: the rows with the texts that the teacher generates as their targets
result     training.programs.loaded_teacher.TeacherResult

Nothing is sampled. The texts are generated in blocks of rows (training/jobs/blocks.py), which are named by the rows
without their targets. The processes take the batches of a block in turns; one process writes the same bytes as several
with as many threads each.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from training.data.ipc_files import read_table, write_table
from training.jobs.blocks import ROWS_IN_BLOCK
from training.jobs.program import run_program
from training.jobs.protocol import OUTPUT, Events, Job, rank
from training.programs.loaded_teacher import LoadedTeacher, Report, TeacherResult, TeacherSettings
from training.task_types.causal_lm import CausalLM
from training.task_types.task_type import TaskType, WritesTargets

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TEXT, CUT = "text", "cut"
ROWS_AT_ONCE = 16
"""Not a field of the recipe: another number would round logits otherwise, and each text is stored once."""


def main(job_dir: Path, job: Job, events: Events) -> TeacherResult:
    """Generates the targets of all rows."""
    from training.distributed import ranks
    from training.models import loading

    settings = TeacherSettings.model_validate(job.settings)
    teacher = LoadedTeacher(job_dir, job, settings, events)
    task_type: TaskType = teacher.task_type
    assert isinstance(task_type, WritesTargets)
    encoder, at_once = teacher.load_encoder(), teacher.batch_size
    stored = read_table(Path(job.inputs["data"]) / "train.arrow")
    prompts = pa.Table.from_batches([task_type.unanswered(batch) for batch in stored.to_batches()])

    def prepare(network: PreTrainedModel) -> None:
        if isinstance(task_type, CausalLM):  # training would turn off the cache, which generation needs
            task_type.set_end_tokens(network, teacher.tokenizer)
        else:
            task_type.prepare(network, teacher.tokenizer)

    def compute(network: PreTrainedModel, block: pa.Table, report: Report) -> pa.Table | None:
        found: dict[int, tuple[list[str], list[bool]]] = {}
        with loading.autocast(teacher.device, settings.mixed_precision):
            for start in range(at_once * ranks.rank(), len(block), at_once * ranks.world_size()):
                (rows,) = block.slice(start, at_once).combine_chunks().to_batches()
                found[start] = task_type.write_targets(network, teacher.tokenizer, encoder, rows)
                if rank() == 0:
                    report(min(start + at_once * ranks.world_size(), len(block)))
        for of_rank in ranks.all_gather(found):
            found |= of_rank
        texts = [text for start in sorted(found) for text in found[start][0]]
        cut = [is_cut for start in sorted(found) for is_cut in found[start][1]]
        return pa.table({TEXT: pa.array(texts, pa.string()), CUT: pa.array(cut, pa.bool_())})

    cut = 0
    for split, blocks in teacher.compute_files({"train": prompts}, compute, ROWS_IN_BLOCK, prepare).items():
        found = pa.concat_tables(map(read_table, blocks))
        texts, done = found[TEXT].to_pylist(), 0
        answered = list[pa.RecordBatch]()
        for batch in stored.to_batches():
            answered.append(task_type.with_targets(batch, texts[done : done + batch.num_rows]))
            done += batch.num_rows
        write_table(job_dir / OUTPUT / f"{split}.arrow", answered, stored.schema)
        if cut := sum(found[CUT].to_pylist()):
            events.warning(
                f"{cut:,} of {len(texts):,} answers of {settings.teacher} reached options.max_new_tokens and were cut: "
                "they are targets as they are. Raise it if answers are longer; else the teacher does not end its texts."
            )
    return teacher.result(len(prompts), cut=cut)


if __name__ == "__main__":
    run_program(main)
