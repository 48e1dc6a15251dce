"""Rows of data sets of the Hugging Face Hub, read by `datasets`, whose version 5 runs no code of a repository."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from training.data.ipc_files import BLOCK_ROWS
from training.data.readers import Block, match_columns, source_error
from training.data.sources import split_names
from training.problems import UserError

if TYPE_CHECKING:
    from datasets import Dataset, DatasetBuilder

    from training.data.readers import ExtraColumns
    from training.recipe import Data
    from training.recipe.source_columns import SourceColumns


def hub_splits(wanted: SourceColumns, pinned: Mapping[str, Any]) -> dict[str, str]:
    """Returns the Hub's name of each split. Without data.splits, validation and test are left out if the data set has
    none; validation is then held out of train."""
    names = split_names(wanted.data, wanted.evaluated)
    there = {"train", *(_find_builder(wanted.data, pinned).info.splits or {})}
    return names if wanted.data.splits is not None else {split: split for split in names if split in there}


def names_of_splits(data: Data, pinned: Mapping[str, Any]) -> list[str]:
    """Returns the names of all splits of a data set of the Hub. Raises UserError if it has several subsets and none is
    named, of which `datasets` would take the first."""
    builder = _find_builder(data, pinned)
    subsets = list(builder.builder_configs)
    if data.config is None and len(subsets) > 1 and "default" not in subsets:
        raise UserError.of("option", "--config", f"{data.path} has several subsets: choose from {', '.join(subsets)}.")
    return list(builder.info.splits or {})


def read_hub(wanted: SourceColumns, split: str, pinned: Mapping[str, Any], slices: ExtraColumns) -> Iterator[Block]:
    """A split of a data set of the Hub, at the pinned commit."""
    data = wanted.data
    name, commit = split_names(data, wanted.evaluated)[split], pinned["commit"]
    try:
        found = _find_builder(data, pinned).as_dataset(split=name)
    except ValueError as error:
        raise source_error(f"data.splits.{split}", f"{name!r} of {data.path!r} at {commit[:12]}: {error}") from error
    yield from from_dataset(found, wanted, f"{data.path} ({name})", slices)


def _find_builder(data: Data, pinned: Mapping[str, Any]) -> DatasetBuilder:
    if Path(data.path).exists():
        # `datasets` would read the folder instead.
        message = f"{data.path!r} is also a file or folder here: choose the source csv, json, parquet or arrow for it."
        raise UserError.of("data", "data.path", message)
    return _hub_builder(data.path, data.config, pinned["commit"])


@lru_cache(maxsize=1)  # for all splits: an unreachable Hub is waited for once
def _hub_builder(path: str, config: str | None, commit: str) -> DatasetBuilder:
    """Downloads a data set of the Hub.

    Raises UserError for a mistake in the recipe or the data set, else the errors of the Hub's clients.
    """
    import datasets
    from datasets.data_files import EmptyDatasetError
    from datasets.exceptions import DatasetNotFoundError, DatasetsError

    at = f"{path!r} at {commit[:12]}"
    try:
        builder = datasets.load_dataset_builder(path, config, revision=commit)
    except DatasetNotFoundError as error:
        next_step = "Check the name and the revision, and set HF_TOKEN if it is private or gated"
        raise source_error("data.path", f"{str(error).rstrip('.')}. {next_step}") from error
    except (DatasetsError, EmptyDatasetError) as error:
        raise source_error("data.path", f"{at} is not readable: {error}") from error
    except ValueError as error:  # no such configuration, or several to choose from
        raise source_error("data.config", f"{config!r} of {at}: {error}") from error
    if builder.hash != commit:  # without an answer of the Hub, `datasets` uses the last commit that it read
        stored = _stored_builder(path, config, commit)
        if stored is None:
            raise ConnectionError(f"the rows of {path!r} that are stored here are of commit {str(builder.hash)[:12]}")
        builder = stored
    try:
        builder.download_and_prepare()
    except DatasetsError as error:
        raise source_error("data.path", f"{at} is not readable: {error.__cause__ or error}") from error
    return builder


def _stored_builder(path: str, config: str | None, commit: str) -> DatasetBuilder | None:
    """Returns exactly this commit from the cache of `datasets`; None if it is not cached, or if several configurations
    are and none is named."""
    from datasets.config import HF_DATASETS_CACHE
    from datasets.naming import camelcase_to_snakecase
    from datasets.packaged_modules.cache.cache import Cache

    *owner, name = path.split("/")
    folder = Path(HF_DATASETS_CACHE, "___".join([*owner, camelcase_to_snakecase(name)]))
    found = [info.parent for info in folder.glob(f"{config or '*'}/*/{commit}/dataset_info.json")]
    if len(found) != 1:
        return None
    config, version, _ = found[0].parts[-3:]
    return Cache(repo_id=path, dataset_name=name, config_name=config, version=version, hash=commit)


def from_dataset(dataset: Dataset, wanted: SourceColumns, where: str, slices: ExtraColumns) -> Iterator[Block]:
    """The rows of a `datasets.Dataset`, from its Arrow tables."""
    schema = dataset.features.arrow_schema
    table_of = dataset.with_format("arrow")

    def read(columns: list[str]) -> Iterator[pa.Table]:
        yield from table_of.select_columns(columns).iter(BLOCK_ROWS)

    def label_names(column: str) -> tuple[str, ...]:
        feature = dataset.features[column]
        return tuple(getattr(getattr(feature, "feature", feature), "names", None) or ())

    names = dataset.column_names
    kinds = [schema.field(name).type for name in names]
    yield from _blocks(read, names, kinds, label_names, wanted, where, slices, dataset.num_rows)


def from_table(table: pa.Table, wanted: SourceColumns, where: str, slices: ExtraColumns) -> Iterator[Block]:
    """The rows of an Arrow table."""

    def read(columns: list[str]) -> Iterator[pa.Table]:
        yield from (table.slice(start, BLOCK_ROWS) for start in range(0, table.num_rows, BLOCK_ROWS))

    names, kinds = table.column_names, table.schema.types
    yield from _blocks(read, names, kinds, lambda column: (), wanted, where, slices, table.num_rows)


def _blocks(
    read: Callable[[list[str]], Iterator[pa.Table]],
    names: Sequence[str],
    kinds: Sequence[pa.DataType],
    label_names: Callable[[str], tuple[str, ...]],
    wanted: SourceColumns,
    where: str,
    slices: ExtraColumns,
    total: int,
) -> Iterator[Block]:
    named = match_columns(wanted, names, where)
    others = slices.of_file(names, kinds)
    known = label_names(named[wanted.labels.source_name]) if wanted.labels else ()
    done = 0
    for table in read(list(dict.fromkeys([*named.values(), *others.values()]))):
        arrays = {ours: table.column(theirs).combine_chunks() for ours, theirs in named.items()}
        values = {
            ours: slices.of_array(table.column(theirs).combine_chunks(), label_names(theirs))
            for ours, theirs in others.items()
            if slices.reads(ours)
        }
        numbers = np.arange(done + 1, done + 1 + table.num_rows, dtype=np.int64)
        done += table.num_rows
        yield Block(where, pa.RecordBatch.from_pydict(arrays), numbers, known, (), done / total, values)
