"""Training on a mixture sees each row as often as promised: in one process and two, killed or not."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.arrow import read_arrow
from tests.training import tiny
from tests.training.data.task_types import CLASSIFICATION
from tests.training.data.test_load import write_json
from tests.training.forks import batches, finish, kill_when, within_a_step
from training.data.load_rows import load
from training.recipe import Data

ROWS, EPOCHS = 56, 2  # 20 of `ours` and 36 of `theirs`


@pytest.fixture(scope="module")
def texts(world: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The texts of a mixture's train rows, whose tokens are in the folder `mixed` of the world."""
    folder = tmp_path_factory.mktemp("sets")
    files = []
    for name, count in (("ours", 40), ("theirs", 16)):
        (folder / name).mkdir()
        words = [word for label in tiny.LABELS for word in tiny.WORDS[label]]
        rows = [(f"{name} {number} {words[number % len(words)]}", tiny.LABELS[number % 3]) for number in range(count)]
        write_json(folder / name, {"train": rows, "validation": [(f"{text} held", label) for text, label in rows[:6]]})
        files.append({split: [str(folder / name / f"{split}.jsonl")] for split in ("train", "validation")})
    mix = [{"source": "json", "path": name, "epochs": passes} for name, passes in (("ours", 0.5), ("theirs", 2.25))]
    data = Data.model_validate({"text": ["text"], "label": "label", "mix": mix})
    load(data, CLASSIFICATION, files, folder / "out")
    tokenizer = Tokenizer.from_file(str(world / "base/tokenizer/tokenizer.json"))
    for split in ("train", "validation"):
        table = read_arrow(folder / "out" / f"{split}.arrow")
        rows = [encoding.ids for encoding in tokenizer.encode_batch(table["text"].to_pylist())]
        tiny.write_tokens(world / "mixed", rows, table["label"].to_pylist(), split)
    return list(read_arrow(folder / "out" / "train.arrow")["text"].to_pylist())


def seen(job_dir: Path, texts: list[str], rows_a_step: int) -> list[Counter[str]]:
    """How often each text was trained on, epoch by epoch; a step that was trained again counts once."""
    steps = -(-ROWS // rows_a_step)
    found: list[Counter[str]] = [Counter() for _ in range(EPOCHS)]
    for (_, step, _), line in batches(job_dir).items():
        found[step // steps].update(texts[row] for row in line["rows"])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_each_row_of_a_mixture_is_seen_as_often_as_promised_in_every_epoch_also_by_killed_ranks(
    world: Path, texts: list[str], tmp_path: Path, processes: int
) -> None:
    settings = {"num_train_epochs": EPOCHS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    job_dir = tiny.fit_job(
        world, tmp_path / "job", tokens="mixed", processes=processes, checkpoint_interval_s=0.02, **settings
    )
    assert kill_when(job_dir, lambda: within_a_step(job_dir, 9 // processes), victim=processes - 1)
    assert finish(job_dir).state == "finished"
    whole = Counter(texts)
    assert seen(job_dir, texts, 6 * processes) == [whole, whole]
    ours = {text: count for text, count in whole.items() if text.startswith("ours ")}
    theirs = {text: count for text, count in whole.items() if text.startswith("theirs ")}
    assert len(ours) == 20 and set(ours.values()) == {1}
    assert len(theirs) == 16 and Counter(theirs.values()) == {2: 12, 3: 4}
