"""The output of a batch prediction: a folder of parts with a manifest, or one file; on this machine or at a URL.

    part-<input file>-<shard>-<digest>.parquet    the rows of a shard; the digest is that of all that makes the part
    _SUCCESS                                      the manifest, JSON: counts, and each part with its size and sha256

Parts appear whole. The manifest is removed before the first change and written last: a folder with a manifest is
complete. A part of the last manifest that is still wanted and unchanged is not written again, and parts that are no
longer wanted are removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from tasks.cache.digests import Digests, digest_of
from tasks.home import home
from tasks.locks import exclusive_lock
from tasks.prediction.input_rows import Scan, Shard
from tasks.registry.model_spec import ModelSpec
from training.data.casting import Values
from training.data.conversation_forms import as_tools
from training.data.file_systems import display_name, filesystem, is_url, local_path, name_of
from training.data.prediction_files import SUFFIXES, WRITTEN, KeptColumns, Stamp, Writer
from training.data.prediction_rows import Rows
from training.evaluation.stored_calibration import REVIEW
from training.jobs.protocol import fsync, sha256
from training.local_files import open_regular, read_whole
from training.problems import NETWORK, UserError
from training.recipe import BatchPrediction
from training.tokenization.tool_calls import parse_message

MANIFEST = "_SUCCESS"
_PART = re.compile(r"part-.*-\d{5,}-[0-9a-f]{16}\.(parquet|csv|jsonl)")
TRIES, RETRY_S = 4, 0.5
"""Of a request to a file system at a URL; the pause doubles each time."""

Result = TypeVar("Result")


class Output(ABC):
    """A folder of parts, or one file."""

    @abstractmethod
    def lacks(self, shard: Shard) -> bool:
        """Whether the shard's rows have yet to be written."""

    @abstractmethod
    def write(self, shard: Shard, rows: Rows, predictions: pa.Table, predicted_at_s: int) -> None:
        """Writes the shard's rows. Shards come in the order of the scan."""

    @property
    @abstractmethod
    def review(self) -> int | None:
        """The rows for a person; None if the version marks none."""

    @abstractmethod
    def finish(self, counts: Mapping[str, Any]) -> None:
        """Makes the output complete. `counts` are for the manifest."""


@contextlib.contextmanager
def open_output(prediction: BatchPrediction, model: ModelSpec, scan: Scan, keys: Mapping[str, str]) -> Iterator[Output]:
    """The output of a run, which no other run of this home writes meanwhile. `keys` are those of the shards, by digest.

    Raises UserError for a folder with other files, and if another run writes there.
    """
    output = local_path(prediction.output)
    location = output if is_url(output) else str(Path(output).expanduser().absolute())
    locks = home() / "locks"
    locks.mkdir(mode=0o700, exist_ok=True)
    with (
        exclusive_lock(locks / f"output-{digest_of(location)[:32]}.lock") as locked,
        tempfile.TemporaryDirectory(prefix="finetune-") as aside,
    ):
        if not locked:
            raise UserError.of(
                "option",
                "output",
                f"another run writes to {display_name(location)}: wait for its end, or name another output.",
            )
        if prediction.is_single_file:
            above, _, name = location.rpartition("/")
            with contextlib.closing(
                _SingleFile(_open_folder(above, Path(aside)), name, prediction, model, scan)
            ) as one:
                yield one
        else:
            yield _Folder(_open_folder(location, Path(aside)), prediction, model, scan, keys)


class _OutputFolder(ABC):
    """A folder for files that appear whole."""

    where: str

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """The bytes of each file by its name, and -1 for a folder. Hidden ones are left out."""

    @abstractmethod
    def staged(self, name: str) -> Path:
        """The file to write, before `publish`."""

    @abstractmethod
    def publish(self, staged: Path, name: str) -> None:
        """Gives a written file its name."""

    @abstractmethod
    def read(self, name: str) -> bytes | None:
        """The content of a small file; None without one."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Removes a file, which may be absent."""

    def is_unchanged(self, name: str, entry: Mapping[str, Any]) -> bool:
        """Whether a file of this size has the content of the manifest's entry, as far as this is known without reading
        it over a network."""
        return True


class _LocalFolder(_OutputFolder):
    def __init__(self, folder: Path) -> None:
        self._folder, self.where = folder, display_name(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError.of(
                "option", "output", f"{self.where} cannot be made ({error.strerror}): name another folder."
            ) from error
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UserError.of(
                "option", "output", f"{self.where} cannot be written to: change its mode, or name another folder."
            )
        for left in folder.glob(".part-*.aside"):  # of a killed run: no other one writes here
            left.unlink(missing_ok=True)
        fsync(folder)  # a run that was killed may have given the manifest its name and not yet synced it

    def sizes(self) -> dict[str, int]:
        entries = [entry for entry in os.scandir(self._folder) if not entry.name.startswith(".")]
        return {entry.name: entry.stat().st_size if entry.is_file() else -1 for entry in entries}

    def staged(self, name: str) -> Path:
        return self._folder / f".part-{secrets.token_hex(4)}.aside"

    def publish(self, staged: Path, name: str) -> None:
        os.replace(staged, self._folder / name)
        fsync(self._folder)

    def read(self, name: str) -> bytes | None:
        try:
            with open_regular(self._folder / name) as file:  # others may write here
                return read_whole(file)
        except OSError:
            return None

    def remove(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)
        fsync(self._folder)

    def is_unchanged(self, name: str, entry: Mapping[str, Any]) -> bool:
        return Digests(home()).of(self._folder / name) == entry["sha256"]


class _RemoteFolder(_OutputFolder):
    """A folder at a URL: an object of a bucket appears whole."""

    def __init__(self, url: str, aside: Path) -> None:
        self._url, self._aside, self.where = url.rstrip("/"), aside, display_name(url)
        self._system, path = filesystem(self._url)
        self._path = path.rstrip("/")

    def sizes(self) -> dict[str, int]:
        def list_files() -> list[dict[str, Any]]:
            self._system.invalidate_cache()
            try:
                found: list[dict[str, Any]] = self._system.ls(self._path, detail=True)
            except FileNotFoundError:
                return []
            return found

        entries = {name_of(entry["name"].rstrip("/")): entry for entry in self._try(list_files)}
        return {
            name: entry["size"] if entry["type"] == "file" else -1
            for name, entry in entries.items()
            if name and not name.startswith(".") and entry["name"].rstrip("/") != self._path
        }

    def staged(self, name: str) -> Path:
        return self._aside / name

    def publish(self, staged: Path, name: str) -> None:
        self._try(lambda: self._system.put_file(str(staged), f"{self._path}/{name}"))
        staged.unlink()

    def read(self, name: str) -> bytes | None:
        def read() -> bytes | None:
            try:
                return bytes(self._system.cat_file(f"{self._path}/{name}"))
            except FileNotFoundError:
                return None

        return self._try(read)

    def remove(self, name: str) -> None:
        def remove() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._system.rm_file(f"{self._path}/{name}")

        self._try(remove)

    def _try(self, request: Callable[[], Result]) -> Result:
        for number in range(TRIES):
            try:
                return request()
            except UserError:
                raise
            except Exception as error:
                if number == TRIES - 1 or isinstance(error, PermissionError):
                    reason = " ".join(str(error).split())[:200] or type(error).__name__
                    message = f"cannot be written ({reason}): check the network and the credentials, then run the same "
                    message += "command again. Nothing is predicted twice."
                    raise UserError.of(NETWORK, self.where, message) from error
                time.sleep(RETRY_S * 2**number)
        raise AssertionError("the last try returns or raises")


def _open_folder(location: str, aside: Path) -> _OutputFolder:
    return _RemoteFolder(location, aside) if is_url(location) else _LocalFolder(Path(location))


class _Folder(Output):
    def __init__(
        self, folder: _OutputFolder, prediction: BatchPrediction, model: ModelSpec, scan: Scan, keys: Mapping[str, str]
    ) -> None:
        self._folder, self._model, self._kept = folder, model, scan.kept
        self._form, self._escape_formulas = prediction.format or "parquet", prediction.escape_formulas
        self._embedding_type = prediction.embedding_type
        form: list[str] = [self._form, "escape_formulas"] if self._escape_formulas else [self._form]
        if self._embedding_type != "float32":
            form.append(self._embedding_type)
        self._names = {
            (shard.file, shard.number): _part_name(shard, form, model, scan.kept, keys) for shard in scan.shards
        }
        self._shards = {self._names[shard.file, shard.number]: shard for shard in scan.shards}
        present = folder.sizes()
        if foreign := [name for name in sorted(present) if name != MANIFEST and not _PART.fullmatch(name)]:
            message = f"{folder.where} has files of something else, such as {foreign[0]}: name an empty folder."
            raise UserError.of("option", "output", message)
        self._stale = {name for name in present if name != MANIFEST} - self._shards.keys()
        self._manifest = _parse_manifest(folder.read(MANIFEST)) if MANIFEST in present else {}
        self._has_manifest = MANIFEST in present
        self._entries: dict[str, dict[str, Any]] = {
            entry["name"]: entry
            for entry in self._manifest.get("parts", ())
            if entry["name"] in self._shards
            and present.get(entry["name"]) == entry["bytes"]
            and folder.is_unchanged(entry["name"], entry)
        }

    def lacks(self, shard: Shard) -> bool:
        return self._names[shard.file, shard.number] not in self._entries

    def write(self, shard: Shard, rows: Rows, predictions: pa.Table, predicted_at_s: int) -> None:
        name = self._names[shard.file, shard.number]
        staged = self._folder.staged(name)
        options: dict[str, Any] = {"escape_formulas": self._escape_formulas, "as_message": _message_form(self._model)}
        with Writer(staged, self._form, self._kept, embedding_type=self._embedding_type, **options) as writer:
            writer.write(rows, predictions, _stamp(self._model, shard, predicted_at_s))
        entry = {
            "name": name,
            "input_file": display_name(shard.file),
            "rows": shard.rows,
            "bytes": staged.stat().st_size,
            "sha256": sha256(staged),
            **({} if (review := count_review(predictions)) is None else {"review": review}),
        }
        self._begin_changes()
        self._folder.publish(staged, name)
        self._entries[name] = entry

    @property
    def review(self) -> int | None:
        return _sum_known(entry.get("review") for entry in self._entries.values())

    def finish(self, counts: Mapping[str, Any]) -> None:
        if self._has_manifest and not self._stale and self._manifest.get("rows") == counts["rows"]:
            return  # nothing has changed
        self._begin_changes()
        for name in sorted(self._stale):
            self._folder.remove(name)
        manifest = {**counts, "parts": [self._entries[name] for name in self._names.values()]}
        staged = self._folder.staged(MANIFEST)
        staged.write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        fsync(staged)
        self._folder.publish(staged, MANIFEST)

    def _begin_changes(self) -> None:
        if self._has_manifest:
            self._folder.remove(MANIFEST)
            self._has_manifest = False


class _SingleFile(Output):
    def __init__(
        self, folder: _OutputFolder, name: str, prediction: BatchPrediction, model: ModelSpec, scan: Scan
    ) -> None:
        self._folder, self._name, self._model = folder, name, model
        self._staged = folder.staged(name)
        form = prediction.format or WRITTEN[Path(name).suffix]
        delimiter = "\t" if name.endswith(".tsv") else ","
        escape, as_message = prediction.escape_formulas, _message_form(model)
        self._reviews = list[int | None]()
        kind = prediction.embedding_type
        self._writer = Writer(self._staged, form, scan.kept, delimiter, escape, as_message, kind)

    def lacks(self, shard: Shard) -> bool:
        return True

    def write(self, shard: Shard, rows: Rows, predictions: pa.Table, predicted_at_s: int) -> None:
        self._writer.write(rows, predictions, _stamp(self._model, shard, predicted_at_s))
        self._reviews.append(count_review(predictions))

    @property
    def review(self) -> int | None:
        return _sum_known(self._reviews)

    def finish(self, counts: Mapping[str, Any]) -> None:
        self._writer.__exit__(None)
        self._folder.publish(self._staged, self._name)

    def close(self) -> None:
        self._writer.__exit__(KeyboardInterrupt)
        self._staged.unlink(missing_ok=True)


def count_review(predictions: pa.Table) -> int | None:
    """The rows for a person among the predictions of a shard; None if the version marks none."""
    return int(pc.sum(predictions[REVIEW]).as_py() or 0) if REVIEW in predictions.column_names else None


def _sum_known(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _part_name(shard: Shard, form: Sequence[str], model: ModelSpec, kept: KeptColumns, keys: Mapping[str, str]) -> str:
    """The name of a shard's file. `form` is its format, and the options that change what is written."""
    identity = digest_of(
        {
            "content": shard.content,
            "file": shard.file,
            "predictions": keys[shard.digest],
            "model": [model.name, model.version, model.digest],
            "kept": kept.described(),
            "format": form[0] if len(form) == 1 else [*form],
        }
    )
    stem = re.sub(r"[^A-Za-z0-9_.-]", "_", name_of(shard.file).partition(".")[0])[:40]
    return f"part-{stem}-{shard.number:05}-{identity[:16]}{SUFFIXES[form[0]]}"


def _message_form(model: ModelSpec) -> Callable[[Values, str], Mapping[str, Any]]:
    """The form of an answer in OpenAI's output file, which reads calls of its row's tools from its text."""
    columns = [*model.columns]

    def as_message(values: Values, text: str) -> Mapping[str, Any]:
        declared = values[columns.index("tools")] if "tools" in columns else None
        tools = json.loads(declared) if declared else None
        if tools is None and "prompt" in columns:
            prompt = json.loads(values[columns.index("prompt")])
            tools = prompt.get("tools") if isinstance(prompt, dict) else None
        return parse_message(text, as_tools(tools) if tools else ())

    return as_message


def _stamp(model: ModelSpec, shard: Shard, predicted_at_s: int) -> Stamp:
    return Stamp(model.name, model.version, model.digest, predicted_at_s, display_name(shard.file))


def _parse_manifest(content: bytes | None) -> dict[str, Any]:
    try:
        manifest = json.loads(content or b"{}")
        assert all({"name", "bytes", "sha256"} <= entry.keys() for entry in manifest["parts"])
    except (ValueError, KeyError, TypeError, AssertionError, AttributeError):
        return {}
    return dict(manifest)
