"""What `finetune check` does after the rows are read: the tokenizer alone, without the model's weights. No stage, and
nothing is stored."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tasks.cache import settings
from tasks.cache.refs import Lock
from tasks.hub.client import told
from tasks.tracking.reports import read_report
from training import task_types
from training.models.repository_files import CHAT_TEMPLATE, TOKENIZER_FILES, part_of
from training.problems import Problem, UserError, full_disk
from training.recipe import Recipe
from training.recipe.rules.column_rules import source_columns
from training.tokenization.chat_templates import require_template

PREFIX = ".check-"
JUST_MADE_S = 60.0  # nobody holds a folder in the instant after it was made

Progress = Callable[[int, int], None]


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """An empty folder on the home's disk, which has room for rows; gone after the block, however that ends.

    Raises UserError in place of whatever error came of a full disk.
    """
    home = settings.home()
    for left in home.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), _held(left):  # a check that was killed has let go of its folder
            if time.time() - left.stat().st_mtime > JUST_MADE_S:
                shutil.rmtree(left, ignore_errors=True)
    try:
        making = tempfile.TemporaryDirectory(dir=home, prefix=PREFIX, ignore_cleanup_errors=True)
        with making as folder, _held(Path(folder)):
            yield Path(folder)
    except Exception as error:
        if full := full_disk(home, error):
            raise full from error
        raise


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Keeps others from taking the folder for a dead check's. Raises OSError where one that lives holds it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def tokenizer_of(recipe: Recipe, lock: Lock, rows: Path, out: Path) -> Path:
    """A folder with the tokenizer that a run would have: the model's own, or one learnt from the training rows.

    `lock` are of the tokenizer; `rows` is what `load_rows` filled. Weights are neither downloaded nor read.
    Raises UserError where there is none, or none that can be had now.
    """
    model = recipe.model
    if model.source == "scratch":
        return _learnt(recipe, rows, out)
    if lock.model_hub is not None:
        folder = _downloaded(str(model.path), lock.model_hub.commit)
    else:
        folder = Path(str(model.path)).expanduser().absolute()
    if not (folder / "tokenizer.json").is_file():
        message = f"{model.path} has no tokenizer.json, and what else holds its tokens only a run reads."
        raise UserError([Problem(kind="model", where="model.path", message=message)])
    return folder


def counts_as_a_run(recipe: Recipe, tokenizer: Path) -> bool:
    """Whether a run surely counts the same tokens: it takes a champion's tokenizer where it starts from one, and lets
    the tokenizer's class in transformers speak, where it has a say."""
    from training.models.repository_files import uses_tokenizer_json

    if recipe.model.start_from == "champion":
        return False
    return recipe.model.source == "scratch" or uses_tokenizer_json(tokenizer, tokenizer)


def count_tokens(recipe: Recipe, tokenizer: Path, rows: Path, out: Path, progress: Progress) -> dict[str, Any]:
    """The report on the rows' tokens. Raises UserError with every problem."""
    from training.tokenization.token_files import tokenize

    if recipe.model.chat_template is not None:
        tokenizer = _with_template(tokenizer, Path(recipe.model.chat_template).expanduser(), out.with_name("spoken"))
    level = recipe.data.checks.get("truncated", "warning")
    tokenize(
        task_types.load(**recipe.task_and_options), rows, tokenizer, out, recipe.tokens.max_length, level, progress
    )
    return read_report(out)


def _with_template(tokenizer: Path, template: Path, out: Path) -> Path:
    """The folder `out`, filled with the tokenizer's files and this chat template. Raises UserError for one that is
    none."""
    require_template(template)
    out.mkdir()
    for file in tokenizer.iterdir():
        if part_of(file.name) == "tokenizer":
            shutil.copyfile(file, out / file.name)
    shutil.copyfile(template, out / CHAT_TEMPLATE)
    return out


def _learnt(recipe: Recipe, rows: Path, out: Path) -> Path:
    from training.programs.create_model import SPECIAL, learner, texts

    asked = source_columns(recipe)
    learn, size = learner(writes=asked.task_type.generates_text), (recipe.model.config or {})["vocab_size"]
    learnt = learn(lambda: texts(rows / "train.arrow", asked.texts), size)
    out.mkdir()
    learnt.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps(SPECIAL))  # which a chat template knows by name
    return out


def _downloaded(name: str, commit: str) -> Path:
    """The tokenizer's files of a commit, in the clients' own cache."""
    from huggingface_hub import snapshot_download

    with told("model", name, commit):
        return Path(snapshot_download(name, revision=commit, allow_patterns=[*TOKENIZER_FILES], ignore_patterns="*/*"))
