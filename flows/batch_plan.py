"""The plan of a batch prediction: the pinned version, the rows, and the shards that were predicted before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tasks.cache import store
from tasks.cache.digests import digest_of
from tasks.cache.history import History
from tasks.cache.remote import Remote
from tasks.cache.stage import Listener
from tasks.prediction.drift_samples import Monitoring, find_monitoring
from tasks.prediction.input_rows import RowFiles, Scan, Shard, list_files, scan_rows
from tasks.registry.model_spec import ModelSpec, find_model, read_by, with_prompt
from tasks.stages.predict_shard import predict_shard
from training.jobs.protocol import Progress
from training.recipe import BatchPrediction


@dataclass(frozen=True)
class PreparedBatch:
    """A batch prediction before anything is predicted."""

    prediction: BatchPrediction
    model: ModelSpec
    files: RowFiles
    scan: Scan
    keys: dict[str, str]
    """The key of each shard's artifact, by the shard's digest."""
    stored: frozenset[str]
    """The digests of the shards that were predicted before."""
    monitoring: Monitoring | str | None = None
    """The new rows to compare with the version's profile, or the reason why they cannot be compared; None if they are
    not to be."""

    @property
    def new(self) -> list[Shard]:
        """The shards to predict, each once, in the order of the scan."""
        shards = {shard.digest: shard for shard in self.scan.shards if shard.digest not in self.stored}
        return list(shards.values())

    @property
    def new_rows(self) -> int:
        """The usable rows of these shards; rows of equal shards count once."""
        return sum(shard.usable for shard in self.new)


def prepare(prediction: BatchPrediction, remote: Remote, listener: Listener) -> PreparedBatch:
    """Pins the version, reads all rows once, and looks up the stored shards. Raises UserError and MlflowFailed."""
    found = find_model(prediction.name, prediction.alias, prediction.version, prediction.task or "")
    model = with_prompt(read_by(found, prediction.data), prediction.prompt)
    rows = RowFiles(prediction, model)
    remarks = list[str]()
    listed = list_files(prediction.input, prediction.output, rules=model.rules, remarks=remarks)
    artifacts, monitoring = _Artifacts(model, prediction.batch_size, remote), None
    if prediction.drift:
        compared = history_of(prediction).last_compared()
        monitoring = find_monitoring(model, prediction.task or "", compared, artifacts.has)
    on_shard = [monitoring.new_rows.add] if isinstance(monitoring, Monitoring) else []
    scan = scan_rows(listed, rows.reader, rows.shard_rows, rows.id, _report_files(listener), *on_shard)
    scan.remarks += remarks
    keys = {shard.digest: artifacts.key(shard) for shard in scan.shards}
    stored = frozenset(shard.digest for shard in scan.shards if artifacts.has(shard))
    return PreparedBatch(prediction, model, rows, scan, keys, stored, monitoring)


def history_name(prediction: BatchPrediction) -> str:
    """The name of the history of the runs into this output: no recipe can have one with a space."""
    return f"batch {prediction.name} {digest_of(prediction.output)[:8]}"


def history_of(prediction: BatchPrediction) -> History:
    """The history of the runs into this output."""
    return History(history_name(prediction))


class _Artifacts:
    """The artifacts of shards: their keys, and whether they are stored. Each shard, and all that their keys share, is
    looked up once."""

    def __init__(self, model: ModelSpec, batch_size: int, remote: Remote) -> None:
        self._model, self._batch_size, self._remote = model, batch_size, remote
        self._flat: dict[str, Any] | None = None
        self._keys: dict[str, str] = {}
        self._has: dict[str, bool] = {}

    def key(self, shard: Shard) -> str:
        """The key of the shard's artifact."""
        if self._flat is None:
            self._flat, _ = predict_shard.flat_inputs(self._model, self._batch_size, shard, None)
        if shard.digest not in self._keys:
            self._keys[shard.digest] = predict_shard.key(self._flat | {"rows": shard.digest})
        return self._keys[shard.digest]

    def has(self, shard: Shard) -> bool:
        """Whether the shard was predicted before."""
        if shard.digest not in self._has:
            self._has[shard.digest] = _is_stored(self.key(shard), self._remote)
        return self._has[shard.digest]


def _report_files(listener: Listener) -> Callable[[int, int], None]:
    def report(done: int, total: int) -> None:
        event: Progress = {"kind": "progress", "done": done, "total": total, "unit": "files read"}
        listener.stage_events("predict", [event])

    return report


def _is_stored(key: str, remote: Remote) -> bool:
    try:
        return bool(store.find(predict_shard.name, key) or remote.find(predict_shard.name, key))
    except store.Damaged:  # the executor sets it aside
        return False
