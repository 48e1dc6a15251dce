"""Token counts for `finetune check`, by the tokenizer alone: without the model's weights and the store."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasks.cache.results import Lock
from tasks.home import home
from tasks.hub.client import explain_read_errors
from tasks.registry import pinned_versions
from tasks.reports.row_reports import read_token_report
from training import task_types
from training.models.repository_files import CHAT_TEMPLATE, TOKENIZER_FILES, part_of, uses_tokenizer_json
from training.problems import UserError, full_disk
from training.recipe import Recipe
from training.recipe.rules.column_rules import source_columns
from training.tokenization.chat_templates import require_template
from training.tokenization.special_tokens import SPECIAL
from training.tokenization.token_files import Progress, tokenize

PREFIX = ".check-"
UNLOCKED_S = 60.0
"""Age in seconds up to which a folder without a lock may be one that another process has just created."""


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder on the home's disk, which has room for rows. Also removes the folders of killed checks.

    Raises UserError in place of an error that a full disk caused.
    """
    disk = home()
    for folder in disk.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), _lock(folder):  # the kernel has released the lock of a killed process
            if time.time() - folder.stat().st_mtime > UNLOCKED_S:
                shutil.rmtree(folder, ignore_errors=True)
    try:
        temporary = tempfile.TemporaryDirectory(dir=disk, prefix=PREFIX, ignore_cleanup_errors=True)
        with temporary as name, _lock(Path(name)):
            yield Path(name)
    except Exception as error:
        if full := full_disk(disk, error):
            raise full from error
        raise


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Raises OSError if another process holds the folder's lock."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def find_tokenizer(recipe: Recipe, lock: Lock, rows: Path, out: Path) -> Path:
    """A folder with the tokenizer of a run: the model's, in `out` if it is downloaded from the registry, or one that is
    trained on the rows and written to `out`.

    Args:
        lock: of the model, as `pin_model` returns it.
        rows: the folder that `load_rows` filled.

    Raises UserError if there is no tokenizer.json, or if the Hub does not answer.
    """
    folder = find_tokenizer_folder(recipe, lock, rows, out)
    if not (folder / "tokenizer.json").is_file():
        named = str(lock.model_version or recipe.model.path)
        message = f"{named} has no tokenizer.json, and only a run reads tokenizers in other formats."
        raise UserError.of("model", "model.path", message)
    return folder


def find_tokenizer_folder(recipe: Recipe, lock: Lock, rows: Path, out: Path) -> Path:
    """As `find_tokenizer`, with or without a tokenizer.json."""
    model = recipe.model
    if model.source == "scratch":
        return _train_tokenizer(recipe, rows, out)
    if lock.model_version is not None:
        return pinned_versions.find_tokenizer(lock.model_version, out, "model.path")
    if lock.model_hub is not None:
        from huggingface_hub import snapshot_download

        name, commit = str(model.path), lock.model_hub.commit
        with explain_read_errors("model", name, commit):
            patterns = [*TOKENIZER_FILES]
            return Path(snapshot_download(name, revision=commit, allow_patterns=patterns, ignore_patterns="*/*"))
    return Path(str(model.path)).expanduser().absolute()


def has_exact_counts(recipe: Recipe, tokenizer: Path) -> bool:
    """Whether a run counts the same tokens for certain. It does not if it starts from a champion with its own
    tokenizer, or if the tokenizer's class in transformers changes the tokens."""
    if recipe.model.start_from == "champion":
        return False
    return recipe.model.source == "scratch" or uses_tokenizer_json(tokenizer, tokenizer)


def count_tokens(
    recipe: Recipe, tokenizer: Path, rows: Path, out: Path, progress: Progress, vocab_size: int | None = None
) -> dict[str, Any]:
    """The report on the rows' tokens. Raises UserError with every problem."""
    if recipe.model.chat_template is not None:
        template = Path(recipe.model.chat_template).expanduser()
        tokenizer = add_template(tokenizer, template, out.with_name("with_template"))
    level = recipe.data.checks.get("truncated", "warning")
    task_type, longest = task_types.load(**recipe.task_and_options), recipe.tokens.max_length
    tokenize(task_type, rows, tokenizer, out, longest, level, progress, vocab_size)
    return read_token_report(out, getattr(task_type.options, "max_new_tokens", None))


def add_template(tokenizer: Path, template: Path, out: Path) -> Path:
    """Fills the new folder `out` with a tokenizer and this chat template. Returns the folder."""
    require_template(template)
    out.mkdir()
    for file in tokenizer.iterdir():
        if part_of(file.name) == "tokenizer":
            shutil.copyfile(file, out / file.name)
    shutil.copyfile(template, out / CHAT_TEMPLATE)
    return out


def _train_tokenizer(recipe: Recipe, rows: Path, out: Path) -> Path:
    from training.programs.create_model import learner, texts

    columns, size = source_columns(recipe), (recipe.model.config or {})["vocab_size"]
    train = learner(writes=columns.task_type.generates_text, sentinels=columns.task_type.sentinels)
    tokenizer = train(lambda: texts(rows / "train.arrow", columns.texts), size)
    out.mkdir()
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps(SPECIAL))  # the names that chat templates use
    return out
