"""Token files: the token features of every split as Arrow files, with a report of their statistics."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from training.data.arrow_columns import text_sizes
from training.data.ipc_files import CORPUS, SPLITS, Spread, ipc_reader, ipc_writer, read_batches
from training.data.row_problems import ROWS_NAMED, shorten
from training.jobs.protocol import Result
from training.problems import Problem, UserError, user_code_errors
from training.recipe.tables.row_checks import REFUSED_BY_TEMPLATE
from training.tokenization.encoder import Encoder, load_fast_encoder
from training.tokenization.features import RefusedRows, find_beyond, read_ids
from training.tokenization.special_tokens import find_spelt

if TYPE_CHECKING:
    from training.recipe.column_types import Mask
    from training.recipe.tables.row_checks import Level
    from training.tokenization.features import Features

BYTES_AT_ONCE = 2**19
"""Bytes of text that are encoded together: enough for all cores. Encodings take about 100 bytes a token."""
TRUNCATED = "truncated"
FEW_LOST = 0.0005
"""The share of truncated tokens up to which there is no warning: tables have the number of such rows."""
FEW_UNKNOWN, MOST_UNKNOWN = 0.05, 0.5
"""The shares of unknown tokens above which there is a warning, and for training rows an error."""

Progress = Callable[[int, int], None]


class TokenizeResult(Result):
    """Numbers of all splits together."""

    rows: int
    tokens: int
    truncated: int
    """Rows that were cut."""
    lost: int
    """Tokens that were cut off."""


class Featurizer(Protocol):
    """The part of a task type that turns rows into token features: see training.task_types.task_type."""

    def features(self, encoder: Encoder, rows: pa.RecordBatch) -> Features: ...

    def token_rows(
        self, split: str, max_length: int, features: Iterator[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]: ...

    def is_rendered(self, rows: pa.RecordBatch) -> Mask: ...

    def tokenizer_problems(self, encoder: Encoder, columns: Collection[str]) -> Iterable[Problem]: ...


def tokenize(
    task_type: Featurizer,
    data: Path,
    tokenizer: Path,
    out: Path,
    max_length: int,
    level: Level = "warning",
    progress: Progress = lambda done, total: None,
    vocab_size: int | None = None,
) -> TokenizeResult:
    """Runs `write_tokens` with the tokenizer.json of the folder `tokenizer`. Raises UserError if it cannot be read."""
    return write_tokens(task_type, data, load_fast_encoder(tokenizer, max_length), out, level, progress, vocab_size)


def write_tokens(
    task_type: Featurizer,
    data: Path,
    encoder: Encoder,
    out: Path,
    level: Level,
    progress: Progress,
    vocab_size: int | None = None,
    splits: Sequence[str] = (*SPLITS, CORPUS),
    refusal_advice: str = f"To leave such rows out, set data.checks.{REFUSED_BY_TEMPLATE}: warning.",
) -> TokenizeResult:
    """Writes the token features of the splits in the folder `data` (see training.data.load_rows) to `out`.

    The encoder's `max_length` includes special tokens; of a pair the longer text is cut first. `progress` gets the rows
    done and the rows in total. `out` gets `<split>.arrow`, the task type's features without padding, and
    `log/report.json`, the statistics of each split and the warnings. `vocab_size` is the number of the model's tokens.
    Raises UserError if max_length leaves no room for a text, if rows are truncated and `level` is error, for rows that
    the chat template refuses, and for tokens that the model does not have or that are mostly unknown.
    """
    out.mkdir(parents=True, exist_ok=True)
    files = [path for split in splits if (path := data / f"{split}.arrow").is_file()]
    total, done = sum(map(_count_rows, files)), 0
    columns: dict[str, None] = {}
    by_split: dict[str, TokenStatistics] = {}
    refused: list[Problem] = []
    for path in files:
        statistics = by_split[path.stem] = TokenStatistics()
        # Not mapped: mapped pages count as memory of this process and grow with the rows.
        with user_code_errors(task_type), ipc_reader(path, mapped=False) as reader:
            columns |= dict.fromkeys(reader.schema.names)
            _require_room(encoder, "text_pair" in reader.schema.names)
            batches = map(reader.get_batch, range(reader.num_record_batches))
            features = (_tokens(task_type, encoder, batch, statistics, vocab_size) for batch in batches)
            blocks = task_type.token_rows(path.stem, encoder.max_length, features)
            try:
                first = next(blocks)
                with ipc_writer(out / path.name, first.schema) as writer:
                    for block in chain([first], blocks):
                        writer.write(block)
                        progress(done + statistics.rows, total)
            except RefusedRows:
                batches = map(reader.get_batch, range(reader.num_record_batches))
                refused += _refused_problems(task_type, encoder, batches, path.stem, refusal_advice)
        done += statistics.rows
    if refused:
        raise UserError(refused)
    problems = [] if level == "ignore" else list(truncation_problems(by_split, encoder.max_length, level))
    problems += emptied_problems(by_split, encoder.max_length)
    problems += vocabulary_problems(by_split, vocab_size)
    problems += [*remarked_problems(by_split), *wordless_problems(by_split), *unwritable_problems(by_split)]
    if any(problem.level == "error" for problem in problems):
        raise UserError(problems)
    problems += task_type.tokenizer_problems(encoder, columns)
    write_report(out / "log" / "report.json", by_split, problems)
    return TokenizeResult(
        rows=sum(statistics.rows for statistics in by_split.values()),
        tokens=sum(statistics.tokens for statistics in by_split.values()),
        truncated=sum(statistics.truncated for statistics in by_split.values()),
        lost=sum(statistics.lost for statistics in by_split.values()),
    )


def _require_room(encoder: Encoder, pairs: bool) -> None:
    special = encoder.special_tokens(pairs)
    if encoder.max_length <= special:
        message = f"{encoder.max_length} leaves no room for a text and its {special} special tokens: choose more."
        raise UserError.of("tokens", "tokens.max_length", message)


def _tokens(
    task_type: Featurizer,
    encoder: Encoder,
    block: pa.RecordBatch,
    statistics: TokenStatistics,
    vocab_size: int | None,
) -> pa.RecordBatch:
    """The token features of a block, copied: a slice would be written with up to 63 bytes of its neighbours in the
    larger buffer."""
    pieces = []
    for rows in _split(block):
        features = task_type.features(encoder, rows)
        pieces.append(features.numbered(statistics.rows))
        statistics.add(features, rows.num_rows)
        statistics.read(rows, task_type.is_rendered(rows), features, encoder, vocab_size)
    return pa.concat_batches(pieces)


def _split(block: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The rows in parts of about BYTES_AT_ONCE of text."""
    sizes = sum(text_sizes(column) for column in block.columns)
    ends = np.flatnonzero(np.diff(np.cumsum(sizes) // BYTES_AT_ONCE)) + 1
    for start, stop in pairwise([0, *ends.tolist(), block.num_rows]):
        yield block.slice(start, stop - start)


def _refused_problems(
    task_type: Featurizer, encoder: Encoder, blocks: Iterable[pa.RecordBatch], split: str, advice: str
) -> Iterator[Problem]:
    """The problem of a split's rows that have no features: their number, and the reason of the first."""
    rows, numbers, first = 0, list[int](), list[Problem]()
    for block in blocks:
        for part in _split(block):
            try:
                task_type.features(encoder, part)
            except RefusedRows as error:
                numbers += [rows + place + 1 for place in error.rows]
                first = first or [*error.problems]
            rows += part.num_rows
    named = ", ".join(map(str, numbers[:ROWS_NAMED])) + (", …" if len(numbers) > ROWS_NAMED else "")
    for problem in first:
        message = f"refuses {len(numbers):,} of {rows:,} rows of {split} ({named}). Row {numbers[0]}: it "
        message += f"{problem.message} {advice}"
        yield problem.model_copy(update={"message": message, "check": REFUSED_BY_TEMPLATE})


def _count_rows(path: Path) -> int:
    return sum(batch.num_rows for batch in read_batches(path))  # mapped: only the metadata of each batch is read


@dataclass
class TokenStatistics:
    """The statistics of a split."""

    rows: int = 0
    tokens: int = 0
    truncated: int = 0
    lost: int = 0
    """Truncated tokens."""
    longest: int = 0
    """Tokens of the longest text before truncation."""
    lengths: Spread = field(default_factory=Spread)
    targets: TokenStatistics | None = None
    """The statistics of target texts, if rows have such."""
    emptied: int = 0
    """Truncated rows without targets left."""
    remarks: Counter[str] = field(default_factory=Counter)
    """The numbers of rows by REMARKS."""

    wordless: int = 0
    """Words without a token that are not truncated."""
    first_wordless: str = ""

    unwritable: int = 0
    """Targets with a token for what the tokenizer cannot write."""

    spelt: int = 0
    """Rows whose texts spell special tokens, which are read as such."""
    spelt_as_text: int = 0
    """Rows whose messages spell special tokens, which are read as text."""
    first_spelt: str = ""
    read_tokens: int = 0
    unknown: int = 0
    """Those of the read tokens that stand for what the tokenizer does not know."""
    unknown_rows: int = 0
    illegible: int = 0
    """Rows of which the tokenizer does not know most tokens."""
    first_illegible: list[str] = field(default_factory=list)
    beyond: int = 0
    """Rows with tokens that the model does not have."""
    largest: int = 0

    def read(
        self, rows: pa.RecordBatch, is_rendered: Mask, features: Features, encoder: Encoder, vocab_size: int | None
    ) -> None:
        """Counts the special tokens in the texts of rows, and the unknown tokens and largest numbers in features."""
        spelt, first = find_spelt(rows, encoder.special_texts)
        self.spelt += int(np.count_nonzero(spelt & ~is_rendered))
        self.spelt_as_text += int(np.count_nonzero(spelt & is_rendered))
        self.first_spelt = self.first_spelt or first
        unknown = np.zeros(features.rows.num_rows, np.int64)
        for ids, row in read_ids(features.rows):
            self.read_tokens += len(ids)
            self.largest = max(self.largest, int(ids.max(initial=0)))
            if encoder.unk is not None:
                places = ids == encoder.unk
                self.unknown += int(np.count_nonzero(places))
                np.add.at(unknown, row[places], 1)
        self.unknown_rows += int(np.count_nonzero(unknown))
        special = encoder.special_tokens(pairs="text_pair" in rows.schema.names)
        illegible = np.flatnonzero(unknown > MOST_UNKNOWN * (features.rows.column("length").to_numpy() - special))
        self.illegible += len(illegible)
        if len(illegible) and len(self.first_illegible) < ROWS_NAMED:
            if "row" in features.rows.schema.names:
                illegible = np.unique(features.rows.column("row").to_numpy()[illegible])
            texts = rows.column(0).take(pa.array(illegible[:ROWS_NAMED])).to_pylist()
            self.first_illegible += map(shorten, texts[: ROWS_NAMED - len(self.first_illegible)])
        self.beyond += len(np.unique(find_beyond(features.rows, vocab_size)))

    def add(self, features: Features, rows: int) -> None:
        self.unwritable += features.unwritable
        self.wordless += len(features.wordless)
        self.first_wordless = self.first_wordless or next(iter(features.wordless), "")
        self._count(features.rows.column("length").to_numpy(), features.lost, rows, features.longest)
        self.remarks.update(features.remarks)
        if "targets" in features.rows.schema.names:
            targets = features.rows.column("targets").to_numpy()
            self.emptied += int(np.count_nonzero((targets == 0) & (features.lost > 0)))
            if features.lost_of_targets is not None:
                self.targets = self.targets or TokenStatistics()
                self.targets._count(targets, features.lost_of_targets, rows)

    def _count(
        self,
        lengths: npt.NDArray[np.int32],
        lost: npt.NDArray[np.int64],
        rows: int,
        longest: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self.rows += rows
        self.tokens += int(lengths.sum())
        self.truncated += int(np.count_nonzero(lost))
        self.lost += int(lost.sum())
        self.longest = max(self.longest, int((lengths + lost if longest is None else longest).max(initial=0)))
        self.lengths.add(lengths)


def truncation_problems(
    by_split: Mapping[str, TokenStatistics], max_length: int, level: Literal["error", "warning"]
) -> Iterator[Problem]:
    """The problems of truncated rows, of truncated targets, and of single rows whose targets are all cut off, by
    split."""

    def problem(where: str, message: str) -> Problem:
        return Problem(kind="tokens", where=where, message=message, check=TRUNCATED, level=level)

    truncated = [(split, "rows", "tokens.max_length", found) for split, found in by_split.items()]
    truncated += [(split, "targets", "options.max_target_length", found) for split, found in _targets(by_split).items()]
    for split, units, where, found in truncated:
        total = found.tokens + found.lost
        if found.truncated and (level == "error" or found.lost > FEW_LOST * total):
            limit = max_length if units == "rows" else found.lengths.summary()["max"]
            yield problem(
                where,
                f"{limit} cuts {found.truncated:,} of {found.rows:,} {units} of {split} "
                f"({found.truncated / found.rows:.1%}) and loses {found.lost:,} of {total:,} tokens "
                f"({found.lost / total:.1%}): {found.longest:,} would keep all, if the model takes as many. "
                f"If the cut is intended, set data.checks.{TRUNCATED} to ignore.",
            )
    for split, found in by_split.items():
        if 0 < found.emptied < found.rows:
            yield problem(
                "tokens.max_length",
                f"{max_length} cuts off all targets in {found.emptied:,} of {found.rows:,} rows "
                f"of {split}: they train nothing and count in no metric. Raise it, or remove these rows.",
            )


def emptied_problems(by_split: Mapping[str, TokenStatistics], max_length: int) -> Iterator[Problem]:
    """The problem of splits in which all targets are cut off: nothing is trained there, or no figure has a value."""
    for split, found in by_split.items():
        if found.emptied and found.emptied == found.rows:
            message = f"{max_length} cuts off all targets of {split}: raise it."
            yield Problem(kind="tokens", where="tokens.max_length", message=message, check=TRUNCATED)


REMARKS = {
    "joined": (
        "one token holds the end of the prompt and the start of the answer. It is trained on, but a prompt that is "
        "predicted has other tokens. End prompts (or those of the chat template) at the end of a word or line, and "
        "begin answers with the space: ' Paris'."
    ),
    "repeated": "both answers begin with the text of the prompt, which is taken off them.",
    "repeated_once": (
        "one answer begins with the text of the prompt and the other does not, so the model reads the prompt twice: "
        "remove it from that answer."
    ),
    "repeated_in_completion": (
        "the completion begins with the text of the prompt, so the model reads it twice: remove it from completions, "
        "unless the model should repeat its prompt."
    ),
    "same_tokens": (
        "both answers have the same tokens, cut at tokens.max_length or read alike by the tokenizer: such a pair "
        "teaches nothing and counts as wrong. Raise tokens.max_length, or remove these rows."
    ),
    "lost_lines": (
        "the text to write has line breaks, and the tokenizer reads them as spaces, as that of T5 does: the model "
        "writes one line. Mark the breaks by characters that it knows, or choose a model that keeps them."
    ),
    "lost_spaces": (
        "the text to write has tabs or several spaces in a row, and the tokenizer reads them as one space: the model "
        "writes one. Choose a model that keeps them, if they matter."
    ),
    "lost_capitals": (
        "the text to write has capital letters, and the tokenizer reads them as small ones: the model writes small "
        "ones. Choose a model that keeps them."
    ),
}
"""The message on rows with such a remark, after their number."""


def vocabulary_problems(by_split: Mapping[str, TokenStatistics], vocab_size: int | None) -> Iterator[Problem]:
    """The problems of tokens that the model does not have, unknown tokens, and special tokens in texts, by split."""
    for split, found in by_split.items():
        if found.beyond:
            message = (
                f"{found.beyond:,} of {found.rows:,} rows have tokens that the model does not have: its tokenizer "
                f"gives the number {found.largest:,}, and its embedding has {vocab_size:,} rows. Name the tokenizer's "
                "own model, or call resize_token_embeddings(len(tokenizer)) of this one and save it."
            )
            yield Problem(kind="tokens", where=split, message=message)
        share = found.unknown / max(1, found.read_tokens)
        if share > FEW_UNKNOWN or found.illegible:
            mostly = ""
            if found.illegible:
                mostly = f" In {found.illegible:,} they are most tokens: {', '.join(found.first_illegible)}"
                mostly += ", …." if found.illegible > len(found.first_illegible) else "."
            message = (
                f"{share:.1%} of {found.read_tokens:,} tokens, in {found.unknown_rows:,} of {found.rows:,} rows, stand "
                "for what the tokenizer does not know: the model cannot tell such texts apart. Choose a model for "
                f"their language and script.{mostly}"
            )
            level: Literal["error", "warning"] = "error" if share > MOST_UNKNOWN and split == "train" else "warning"
            yield Problem(kind="tokens", where=split, message=message, level=level)
        if found.spelt:
            message = (
                f"{found.spelt:,} of {found.rows:,} rows spell special tokens, such as {found.first_spelt!a}. The "
                "model reads them as marks of its own and not as text, so a text can end a turn or begin another: "
                "remove them unless they are meant."
            )
            yield Problem(kind="tokens", where=split, message=message, level="warning")
        if found.spelt_as_text:
            message = (
                f"{found.spelt_as_text:,} of {found.rows:,} rows spell special tokens in their messages, such as "
                f"{found.first_spelt!a}. They are read as text: only the chat template sets marks."
            )
            yield Problem(kind="tokens", where=split, message=message, level="warning")


def remarked_problems(by_split: Mapping[str, TokenStatistics]) -> Iterator[Problem]:
    """A warning for each remark in each split."""
    for split, found in by_split.items():
        for remark, count in found.remarks.items():
            if count:
                message = f"in {count:,} of {found.rows:,} rows, {REMARKS[remark]}"
                yield Problem(kind="tokens", where=split, message=message, level="warning")


def wordless_problems(by_split: Mapping[str, TokenStatistics]) -> Iterator[Problem]:
    """A problem for each split with words that the tokenizer drops, such as invisible characters."""
    for split, found in by_split.items():
        if found.wordless:
            words = "1 word has" if found.wordless == 1 else f"{found.wordless:,} words have"
            message = (
                f"{words} no token, such as {found.first_wordless!a}: their tags are not learned, and they count as "
                "O in metrics. Remove such words, and begin spans at the word after them."
            )
            yield Problem(kind="tokens", where=split, message=message, level="warning")


def unwritable_problems(by_split: Mapping[str, TokenStatistics]) -> Iterator[Problem]:
    """A problem for each split with targets that no model with this tokenizer can write."""
    for split, found in by_split.items():
        if found.unwritable:
            message = (
                f"{found.unwritable:,} of {found.rows:,} targets have characters that the tokenizer does not know, as "
                "that of T5 does not know { and }: the model cannot write them, and exact_match never counts them as "
                "right. Replace the characters, or choose a model that knows them."
            )
            yield Problem(kind="tokens", where=split, message=message, level="warning")


def _targets(by_split: Mapping[str, TokenStatistics]) -> dict[str, TokenStatistics]:
    return {split: statistics.targets for split, statistics in by_split.items() if statistics.targets}


def write_report(path: Path, by_split: Mapping[str, TokenStatistics], problems: list[Problem]) -> None:
    """Writes the statistics of each split and the warnings."""
    path.parent.mkdir(exist_ok=True)
    targets = _targets(by_split)
    report = {
        **_as_json(by_split),
        **({"targets": _as_json(targets)} if targets else {}),
        "problems": [problem.model_dump() for problem in problems],
    }
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _as_json(by_split: Mapping[str, TokenStatistics]) -> dict[str, Any]:
    counts = {
        name: {split: getattr(statistics, name) for split, statistics in by_split.items()}
        for name in ("rows", "tokens", "truncated", "lost")
    }
    lengths = {split: statistics.lengths for split, statistics in by_split.items()}
    return counts | {
        "length": {split: {**spread.summary(), "histogram": spread.histogram()} for split, spread in lengths.items()}
    }
