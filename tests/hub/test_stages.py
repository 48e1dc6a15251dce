"""Rows and weights of the Hub: each failure is one message, and nothing is stored in part."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.hub.server import CUT, Hub
from tests.hub.sst2 import sst2_files
from tests.hub.stages import Step, run_stages
from tests.task_types import make_world
from tests.training import tiny
from training import task_types
from training.models.loading import export, load_base, load_for_training, load_tokenizer
from training.models.pooling import CONFIG, Pooling, pooling_of
from training.models.repository_files import text_prompts

pytestmark = pytest.mark.slow

PINNED = "pinned"
"""Stands for the commit of the repository, which is not looked up: its troubles show when it is read."""
NOWHERE = "f" * 40


def rows(path: str = "me/rows", **data: Any) -> Step:
    return "load_data", {"data": {"path": path, **data}, "model": {}}


def weights(path: str = "me/model", **model: Any) -> Step:
    return "load_model", {"data": {}, "model": {"path": path, **model}}


# What is at fault: the steps, of which the last one fails; then its problem's task type, field, and words of the
# message.
FAULTS: dict[str, tuple[list[Step], str, str, list[str]]] = {
    "no such configuration": (
        [rows(config="sst3")],
        *("data", "data.config", ["'sst3' of 'me/rows'", "'cola', 'sst2'"]),
    ),
    "no such split": (
        [rows(splits={"train": "train", "validation": "dev"})],
        *("data", "data.splits.validation", ["'dev' of 'me/rows'", "'train', 'validation'"]),
    ),
    "rows that are no Parquet": ([rows("me/bad")], "data", "data.path", ["'me/bad' at", "not readable", "Parquet"]),
    "nothing to read": ([rows("me/empty", config=None)], "data", "data.path", ["'me/empty'", "data files"]),
    "private rows": ([rows("me/secret", revision=PINNED)], "data", "data.path", ["'me/secret'", "HF_TOKEN"]),
    "gated rows": ([rows("me/gated", revision=PINNED)], "data", "data.path", ["'me/gated'", "gated", "HF_TOKEN"]),
    "no such commit of rows": ([rows(revision=NOWHERE)], "data", "data.path", ["'me/rows'", NOWHERE, "revision"]),
    "rows cut": ([rows("me/cut")], "network", "data.path", ["'me/cut'", "check the network"]),
    "rows of a Hub that is out of order": (
        [rows("me/down", revision=PINNED)],
        *("network", "data.path", ["'me/down'", "500", "the fault is the Hub's. Run the same command again later."]),
    ),
    "rows of another commit": (
        [rows("me/other", revision=PINNED), rows("me/other")],
        *("network", "data.path", ["'me/other'", "stored here are of commit"]),
    ),
    "pickled weights alone": (
        [weights("me/pickled", revision=PINNED)],
        *("model", "model.path", ["'me/pickled' at", "no *.safetensors"]),
    ),
    "gated weights": ([weights("me/gated", revision=PINNED)], "hub", "model.path", ["'me/gated' is gated", "HF_TOKEN"]),
    "no such commit of weights": ([weights(revision=NOWHERE)], "hub", "model.revision", ["no revision", NOWHERE]),
    "weights cut": ([weights("me/cut")], "network", "model.path", ["'me/cut'", "check the network"]),
}
WELL: dict[str, list[Step]] = {
    "rows": [rows()],
    "rows of train alone": [rows("me/train-alone")],
    "weights cut once": [weights("me/once")],
}


@dataclass(frozen=True)
class Came:
    """The outcomes of all cases, in one home."""

    home: Path
    outcomes: dict[str, Any]
    heavy: list[str]
    older: list[Any]
    """Of the older of two commits of a data set: what was read first, and what without the Hub in another home."""


@pytest.fixture(scope="module")
def came(tmp_path_factory: pytest.TempPathFactory) -> Came:
    folder = tmp_path_factory.mktemp("stages")
    cases = {**{name: steps for name, (steps, *_) in FAULTS.items()}, **WELL}
    with Hub() as hub:
        pinned = _make_repos(hub)
        newer = hub.commit("dataset", "me/other", sst2_files(train_rows=8))
        once = iter([CUT])

        def fault(method: str, path: str) -> int | None:
            if f"me/other/resolve/{newer}" in path:
                return 403
            if method == "HEAD" and "me/down/" in path:
                return 500
            if method == "GET" and path.endswith((".parquet", ".safetensors")):
                return CUT if "me/cut/" in path else next(once, None) if "me/once/" in path else None
            return None

        hub.fault = fault
        written = [[_whole(step, pinned) for step in steps] for steps in cases.values()]
        env = hub.environment(folder / "hf")
        outcomes, heavy = run_stages(folder / "home", written, env)
        stage, written_alone = rows("me/moved", revision=PINNED)
        older = _whole((stage, {**written_alone, "model": {"revision": PINNED}}), pinned)
        read, _ = run_stages(folder / "first", [[older]], env)
        hub.commit("dataset", "me/moved", sst2_files(train_rows=8))
        run_stages(folder / "first", [[_whole(rows("me/moved"), pinned)]], env)
    away, _ = run_stages(folder / "fresh", [[older]], env)
    return Came(folder / "home", dict(zip(cases, outcomes, strict=True)), heavy, [*read, *away])


def _make_repos(hub: Hub) -> dict[tuple[str, str], str]:
    """TaskType and name of each repository to its commit."""
    weights = (992).to_bytes(8, "little") + b"{}".ljust(992)
    good = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": weights}
    pickled = {"config.json": b"{}", "tokenizer.json": b"{}", "pytorch_model.bin": b"pickle"}
    bad = {**sst2_files(), "sst2/train-00000-of-00001.parquet": b"PAR1, and then nothing that belongs to it, PAR1"}
    files = {
        ("dataset", f"me/{name}"): sst2_files() for name in ("rows", "cut", "other", "secret", "gated", "moved", "down")
    }
    files |= {("dataset", "me/bad"): bad, ("dataset", "me/empty"): {}}
    files |= {("dataset", "me/train-alone"): _train_alone()}
    files |= {("model", f"me/{name}"): good for name in ("model", "cut", "once", "gated")}
    files |= {("model", "me/pickled"): pickled}
    closed = {"me/secret": {"private": True}, "me/gated": {"gated": True}}
    return {(task, name): hub.repo(task, name, held, **closed.get(name, {})) for (task, name), held in files.items()}


def _train_alone() -> dict[str, bytes]:
    files = {name: content for name, content in sst2_files().items() if "validation" not in name}
    card = files["README.md"].decode().splitlines(keepends=True)
    return files | {"README.md": "".join(line for line in card if "split: validation" not in line).encode()}


def _whole(step: Step, pinned: dict[tuple[str, str], str]) -> Step:
    """The step with its whole recipe, and with commits in place of PINNED."""
    stage, changes = step
    data = {"source": "hub", "path": "me/rows", "config": "sst2", "text": ["sentence"], "label": "label"}
    data, model = {**data, **changes["data"]}, {"source": "hub", "path": "me/model", **changes["model"]}
    for task, section in (("dataset", data), ("model", model)):
        if section.get("revision") == PINNED:
            section["revision"] = pinned[task, section["path"]]
    return stage, {"name": "test", "task": "sequence-classification", "data": data, "model": model}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_failure_is_reported_in_one_message(came: Came, fault: str) -> None:
    _, task, where, words = FAULTS[fault]
    ((found_kind, found_where, message),) = came.outcomes[fault]
    assert (found_kind, found_where) == (task, where), message
    assert all(word in message for word in words) and "\n" not in message, message


def test_a_download_that_breaks_once_is_mended_by_the_client_and_nothing_half_is_stored(came: Came) -> None:
    assert [name for name, outcome in came.outcomes.items() if isinstance(outcome, str)] == list(WELL)
    stored = list(came.home.glob("artifacts/*/*"))
    # The third: the rows of one commit, which were read before those of another were requested.
    assert sorted(path.parent.name for path in stored) == ["load_data"] * 3 + ["load_model"]
    assert all((path / "manifest.json").is_file() for path in stored)


def test_an_older_commit_is_read_from_the_cache_of_the_clients_while_the_hub_is_down(came: Came) -> None:
    read, away = came.older
    assert isinstance(read, str) and away == read


def test_a_data_set_without_a_validation_split_has_one_held_out(came: Came) -> None:
    reports = [json.loads(file.read_text()) for file in came.home.glob("artifacts/load_data/*/log/report.json")]
    (cut,) = (report for report in reports if report["held_out"])
    assert cut["held_out"] == {"validation": 0.1} and sum(cut["rows"].values()) == 160
    for file in came.home.glob("artifacts/load_data/*/slices.json"):
        assert json.loads(file.read_text()) == {"kept": ["idx"], "left_out": {}}
        with pa.ipc.open_file(file.with_name("validation.slices.arrow")) as rows:
            numbers = rows.read_all()["idx"].to_pylist()
        assert all(number.isdecimal() for number in numbers) and len(set(numbers)) == len(numbers)


def test_neither_rows_nor_weights_load_torch_into_the_process_of_the_flow(came: Came) -> None:
    assert came.heavy == ["datasets"]


def _embedder(folder: Path) -> dict[str, bytes]:
    """A repository as SentenceTransformer.save of sentence-transformers 6.2 writes it."""
    task = task_types.load("embedding")
    tiny.export_untrained(make_world("embedding", folder / "world") / "base/output", folder / "model", task, [])
    config = json.loads((folder / "model/config.json").read_text())
    settings = json.loads((folder / "model/tokenizer_config.json").read_text()) | {"model_max_length": 20}
    room = "sentence_transformers"
    steps = [
        ("", f"{room}.base.modules.transformer.Transformer"),
        ("1_Pooling", f"{room}.sentence_transformer.modules.pooling.Pooling"),
        ("2_Normalize", f"{room}.base.modules.normalize.Normalize"),
    ]
    written = {
        "config.json": {name: value for name, value in config.items() if name != CONFIG},
        "tokenizer_config.json": settings,
        "modules.json": [
            {"idx": number, "name": str(number), "path": path, "type": kind}
            for number, (path, kind) in enumerate(steps)
        ],
        "1_Pooling/config.json": {"embedding_dimension": 32, "pooling_mode": "cls", "include_prompt": True},
        "2_Normalize/config.json": {"module_input_name": "sentence_embedding"},
        "config_sentence_transformers.json": {"prompts": {"query": "red ", "document": "tall "}},
        "sentence_bert_config.json": {"transformer_task": "feature-extraction"},
    }
    files = {file.name: file.read_bytes() for file in (folder / "model").iterdir() if file.is_file()}
    return {**files, **{name: json.dumps(content).encode() for name, content in written.items()}}


def test_a_model_of_sentence_transformers_keeps_its_pooling_and_prompts(tmp_path: Path) -> None:
    with Hub() as hub:
        hub.repo("model", "me/embedder", _embedder(tmp_path))
        recipe = {"name": "test", "task": "embedding", "tokens": {"max_length": 32}}
        recipe["data"] = {"source": "json", "path": str(tmp_path / "world/rows")}
        step = "load_model", {**recipe, "model": {"source": "hub", "path": "me/embedder"}}
        (digest,), _ = run_stages(tmp_path / "home", [[step]], hub.environment(tmp_path / "hf"))
    assert isinstance(digest, str), digest
    (stored,) = tmp_path.glob("home/artifacts/load_model/*")
    network = load_base(task_types.load("embedding"), stored / "model", seed=0)
    assert pooling_of(network.config, stored / "model") == Pooling("cls", normalize=True)
    assert text_prompts(stored / "tokenizer") == {"query": "red ", "document": "tall "}
    # Trained, it says so itself.
    task, trained = task_types.load("embedding"), tmp_path / "trained"
    tokenizer = load_tokenizer(stored / "tokenizer", stored / "model")
    export(load_for_training(task, stored / "model", [], tokenizer, seed=0), stored / "tokenizer", trained)
    assert json.loads((trained / "config.json").read_text())[CONFIG] == {"pooling": "cls", "normalize": True}
    files = task.published_files(trained, max_length=24)
    assert json.loads(files["config_sentence_transformers.json"])["prompts"] == {"query": "red ", "document": "tall "}
    assert json.loads(files["sentence_bert_config.json"])["max_seq_length"] == 24
