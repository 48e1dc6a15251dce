"""The plan of a batch prediction: the pinned version, the rows, and the shards that were predicted before."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tasks.cache import store
from tasks.cache.remote import Remote
from tasks.cache.stage import Listener
from tasks.prediction.row_files import RowFiles
from tasks.prediction.scan import Scan, Shard, list_files, scan_rows
from tasks.registry.prediction_job import ModelSpec, find_model
from tasks.stages.predict_shard import predict_shard
from training.recipe import BatchPrediction


@dataclass(frozen=True)
class Prepared:
    """A batch prediction before anything is predicted."""

    prediction: BatchPrediction
    model: ModelSpec
    files: RowFiles
    scan: Scan
    keys: dict[str, str]
    """The key of each shard's artifact, by the shard's digest."""
    stored: frozenset[str]
    """The digests of the shards that were predicted before."""

    @property
    def new(self) -> list[Shard]:
        """The shards to predict, each once, in the order of the scan."""
        shards = {shard.digest: shard for shard in self.scan.shards if shard.digest not in self.stored}
        return list(shards.values())

    @property
    def new_rows(self) -> int:
        """The usable rows of these shards; rows of equal shards count once."""
        return sum(shard.usable for shard in self.new)


def prepare(prediction: BatchPrediction, remote: Remote, listener: Listener) -> Prepared:
    """Pins the version, reads all rows once, and looks up the stored shards. Raises UserError and MlflowFailed."""
    model = find_model(prediction.name, prediction.alias, prediction.version, prediction.task or "")
    rows = RowFiles(prediction, model)
    listed = list_files(prediction.input, prediction.output)
    scan = scan_rows(listed, rows.reader, rows.shard_rows, prediction.id, _report_files(listener))
    keys = shard_keys(model, prediction.batch_size, scan.shards)
    stored = frozenset(digest for digest, key in keys.items() if _is_stored(key, remote))
    return Prepared(prediction, model, rows, scan, keys, stored)


def shard_keys(model: ModelSpec, batch_size: int, shards: Iterable[Shard]) -> dict[str, str]:
    """The key of each shard's artifact, by its digest. All other inputs are looked up once."""
    keys: dict[str, str] = {}
    flat: dict[str, Any] | None = None
    for shard in shards:
        if flat is None:
            flat, _ = predict_shard.flat_inputs(model, batch_size, shard, None)
        keys[shard.digest] = predict_shard.key(flat | {"rows": shard.digest})
    return keys


def _report_files(listener: Listener) -> Callable[[int, int], None]:
    def report(done: int, total: int) -> None:
        event = {"kind": "progress", "done": done, "total": total, "unit": "files read"}
        listener.stage_events("predict", [event])

    return report


def _is_stored(key: str, remote: Remote) -> bool:
    try:
        return bool(store.find(predict_shard.name, key) or remote.find(predict_shard.name, key))
    except store.Damaged:  # the executor sets it aside
        return False
