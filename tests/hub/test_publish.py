"""The stage publish over HTTP: the files that arrive, the model card, and the places without the access token."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard, parse_eval_result_entries

from tasks.cache.results import (
    Artifact,
    ComparedExport,
    Comparison,
    Lock,
    PinnedCommit,
    PinnedFile,
    PinnedRows,
    Verdict,
    Version,
)
from tasks.cache.stage import Work
from tasks.hub.client import EVAL_RESULTS
from tasks.registry.model_card import CardFacts, build_card, build_description
from tasks.registry.version_exports import released_exports
from tasks.stages.publish import publish
from tests.arrow import group
from tests.hub.server import Hub
from tests.made import COMPARISON, FITTED, LABELS, artifact, predictions
from training.data.load_rows import LoadDataResult
from training.problems import UserError
from training.recipe import Recipe, load, parse

REPO, ROWS, BASE = "tester/reviews", "me/rows", "me/base"
MODEL = {"config.json": b"{}", "model.safetensors": b"weights" * 100, "tokenizer.json": b"{}"}
LOCK = Lock(
    data_hub=PinnedCommit(name=f"{ROWS}@main", commit="d" * 40),
    model_hub=PinnedCommit(name=f"{BASE}@main", commit="b" * 40),
    mixed_precision="bf16",
    num_processes=2,
)
SCORES = {
    "validation": {
        "accuracy": {"value": 0.75, "low": 0.6, "high": 0.9},
        "f1_macro": {"value": 0.7, "low": None, "high": None},
    },
    "test": {
        "accuracy": {"value": 0.8, "low": 0.7, "high": 0.9},
        "roc_auc": {"value": float("nan"), "low": None, "high": None},
    },
}
EXPORTS = {
    name: {
        **{"bytes": 23_000_000, "rows_per_second": 400.0, "torch_rows_per_second": 200.0, "torch_precision": "bf16"},
        "released": released,
        "comparison": COMPARISON.model_dump() | {"champion": "the model", "margin": -0.01, "at_least": -0.004},
    }
    for name, released in (("onnx", False), ("onnx-int8", True), ("gguf-q8_0", True), ("int8", True))
}
RELEASED = {
    **{"onnx/model_quantized.onnx": b"bytes", "gguf/model-Q8_0.gguf": b"blocks"},
    **{"int8/model.safetensors": b"whole numbers", "int8/config.json": b"{}"},
}
"""The files of these exports."""
WHOLE = b'{"held_out": {}, "left_out": {"test": 0}, "filtered": {"test": 0}}'
"""A report on rows of which none are held out or left out."""
PROMOTE = Verdict(decision="promote", reason="it reaches every minimum.")


def recipe(**changes: Any) -> Recipe:
    hub = {"repo": REPO, "license": "apache-2.0", "tags": ["reviews"], **changes.pop("hub", {})}
    return parse(
        {
            "name": "reviews",
            "task": "sequence-classification",
            "data": {"source": "hub", "path": ROWS, "text": ["text"], "label": "label"},
            "model": {"source": "hub", "path": BASE},
            "training": {"learning_rate": 3e-5},
            "evaluation": {"splits": ["validation", "test"], "metrics": ["accuracy", "f1_macro", "roc_auc"]},
            "release": {"registry": "reviews", "hub": hub},
            **changes,
        }
    )


@pytest.fixture
def refs(home: Path) -> dict[str, Artifact]:
    """The results of the stages before it."""
    trained = {f"model/{name}": content for name, content in MODEL.items()} | {"log/loss.png": b"a picture"}
    rows = LoadDataResult(train_rows=8949, test_rows=6, labels=2, warnings=0)
    exports = {name: ComparedExport.model_validate(one) for name, one in EXPORTS.items()}
    return {
        "data": artifact("load_data", {"labels.json": LABELS, "log/report.json": WHOLE}, rows),
        "trained": artifact("fit", trained, FITTED, {"library.torch": "2.13.0", "training.seed": 42}),
        "predictions": predictions("test", [0, 0, 1, 1, 1, 1], [0, 0, 1, 0, 0, 1]),
        "scores": artifact("score", {"metrics.json": b"{}"}, SCORES),
        "exports": artifact("export", {"onnx/model.onnx": b"floats"} | RELEASED),
        "compared": artifact("compare_exports", {"log/exports.json": b"{}"}, exports),
    }


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as hub:
        for name, value in hub.environment(tmp_path / "hf", hub.token()).items():
            monkeypatch.setenv(name, value)
        yield hub


def run(
    refs: dict[str, Artifact], home: Path, name: str, verdict: Verdict = PROMOTE, taken: str | None = None
) -> tuple[Any, Work]:
    """The stage, as the run of this name calls it."""
    version = Version(name="reviews", version="1", taken=taken)
    inputs = (recipe(), LOCK, verdict, version, *refs.values())
    flat, _ = publish.flat_inputs(*inputs)
    work = Work(publish.key(flat), home / "runs" / name / "publish", name, stage="publish")
    return publish.make(work, *inputs), work


class Watched:
    """Looks at the command lines of all processes while the block runs."""

    def __init__(self) -> None:
        self.seen: set[bytes] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.02):
            for entry in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    self.seen.add(entry.read_bytes())
                except OSError:
                    continue


def test_a_promoted_model_is_published_once_and_its_token_stands_nowhere(
    hub: Hub, refs: dict[str, Artifact], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Watched() as watched:
        first, _ = run(refs, home, "first")
    files = {path: file.content for path, file in hub.repos["models", REPO].at("main").files.items()}
    readme, results = files.pop("README.md"), files.pop(EVAL_RESULTS)
    (entry,) = parse_eval_result_entries(yaml.safe_load(results))
    assert (entry.dataset_id, entry.task_id, entry.dataset_revision) == (ROWS, "default", "d" * 40)
    assert (entry.value, entry.notes) == (0.8, "accuracy on test, 95 % interval 0.7000 to 0.9000")
    assert files == MODEL | {"loss.png": b"a picture"} | RELEASED  # nothing else that only artifacts have
    assert hub.repos["models", REPO].private
    assert (first.repo, first.revision) == (REPO, "main") and first.url == f"{hub.url}/{REPO}/tree/main"
    assert first.commit == hub.repos["models", REPO].branches["main"]
    assert len(hub.repos["models", REPO].commits) == 2  # the Hub's own, and one for all files
    hub.requests.clear()
    again, _ = run(refs, home, "again")
    assert again == first and [request for request in hub.requests if not request.startswith("GET")] == []

    token = next(iter(hub._tokens)).encode()
    assert any(b"tasks.hub.push" in line for line in watched.seen)
    assert [line for line in watched.seen if token in line] == []
    stored = [path for path in home.rglob("*") if path.is_file()]
    assert len(stored) > 10 and [path for path in stored if token in path.read_bytes()] == []
    titles = "".join(commit.title for commit in hub.repos["models", REPO].commits.values())
    assert token not in readme + b"".join(files.values()) + titles.encode()


@pytest.mark.slow
def test_a_model_without_evaluation_results_removes_those_of_the_model_before(
    hub: Hub, refs: dict[str, Artifact], home: Path
) -> None:
    def published() -> set[str]:
        return {*hub.repos["models", REPO].at("main").files}

    run(refs, home, "first")
    assert EVAL_RESULTS in published()
    held_out = {"labels.json": b'["bad", "fine"]', "log/report.json": WHOLE.replace(b"{}", b'{"test": 6}', 1)}
    run(refs | {"data": artifact("load_data", held_out, refs["data"].result, key="h" * 40)}, home, "second")
    assert EVAL_RESULTS not in published()


def test_a_token_without_write_permission_is_reported_and_is_in_no_log(
    hub: Hub, refs: dict[str, Artifact], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = hub.token(write=False)
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UserError, match=r"^release\.hub\.repo: the Hub does not let this access token write") as raised:
        run(refs, home, "first")
    assert token not in str(raised.value) and hub.repos == {}
    stored = [path for path in home.rglob("*") if path.is_file()]
    assert any(path.parent.name == "logs" for path in stored)
    assert [path for path in stored if token.encode() in path.read_bytes()] == []


def test_a_model_that_was_not_promoted_is_not_published(hub: Hub, refs: dict[str, Artifact], home: Path) -> None:
    given, work = run(refs, home, "first", Verdict(decision="keep", reason="it may be chance."))
    assert given is None and work.state == "skipped" and hub.requests == []


def test_a_model_whose_alias_a_person_removed_is_not_published_again(
    hub: Hub, refs: dict[str, Artifact], home: Path
) -> None:
    given, work = run(refs, home, "first", taken="was champion until ann rolled back")
    assert given is None and work.state == "skipped" and hub.requests == []


def facts(
    refs: dict[str, Artifact], verdict: Verdict = PROMOTE
) -> tuple[Lock, Artifact, Artifact, Artifact, Artifact, Verdict]:
    return LOCK, refs["data"], refs["trained"], refs["predictions"], refs["scores"], verdict


def test_the_cards_links_go_to_the_hub_that_is_used(refs: dict[str, Artifact], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://ann:secret@mirror.test/")
    text = build_card(CardFacts(recipe(), *facts(refs)))
    for link in (f"[{BASE}](https://mirror.test/{BASE})", f"[{ROWS}](https://mirror.test/datasets/{ROWS})"):
        assert link in text
    assert "huggingface.co" not in text and "secret" not in text


def test_the_card_has_the_metrics_out_of_fold_beside_those_of_the_splits(refs: dict[str, Artifact]) -> None:
    folds = refs["scores"].model_copy(update={"result": {"train": {"f1": {"value": 0.625, "low": 0.5, "high": 0.75}}}})
    found = CardFacts(recipe(), *facts(refs))
    assert "| out of fold | f1" not in build_card(found)
    assert "| out of fold | f1 | 0.6250 | 0.5000 to 0.7500" in build_card(found._replace(scores_of_folds=folds))


def test_the_card_has_the_runs_warnings_of_the_model_and_none_of_its_comparison(refs: dict[str, Artifact]) -> None:
    of_model, of_rival = "its figures flatter the model.", "reviews/1 does not know the label new."
    comparison = Comparison.model_construct(warnings=[of_rival])
    judged = PROMOTE.model_copy(update={"comparison": comparison, "warnings": [of_model, of_rival]})
    text = build_card(CardFacts(recipe(), *facts(refs, judged)))
    assert f"Warning: {of_model}" in text and of_rival not in text
    partial = refs["trained"].model_copy(
        update={"result": refs["trained"].result.model_copy(update={"missing_weights": 12})}
    )
    text = build_card(CardFacts(recipe(), *facts(refs | {"trained": partial})))
    assert "Warning: 12 weights of the base model were not in its files, or had another shape there, and were" in text
    first, again = (
        publish.flat_inputs(recipe(), LOCK, verdict, None, *refs.values())[0]
        for verdict in (judged, PROMOTE.model_copy(update={"warnings": [of_model]}))
    )
    assert first == again != publish.flat_inputs(recipe(), LOCK, PROMOTE, None, *refs.values())[0]


def test_the_cards_metadata_is_what_the_hub_reads_with_intervals_where_there_are_any(refs: dict[str, Artifact]) -> None:
    card = ModelCard(build_card(CardFacts(recipe(), *facts(refs)))).data
    assert (card.license, card.library_name, card.pipeline_tag) == (
        "apache-2.0",
        "transformers",
        "text-classification",
    )
    assert (card.base_model, card.datasets, card.tags) == (BASE, [ROWS], ["reviews"])
    assert card.metrics == ["accuracy", "f1", "roc_auc"] and card.model_name == "reviews"
    found = {(r.dataset_split, r.metric_name): r for r in card.eval_results or ()}
    assert {place: r.metric_value for place, r in found.items()} == {
        ("validation", "accuracy"): 0.75,
        ("validation", "f1_macro"): 0.7,
        ("test", "accuracy"): 0.8,
    }
    judged = found["test", "accuracy"]
    assert judged.metric_args == {"confidence": 0.95, "low": 0.7, "high": 0.9}
    assert found["validation", "f1_macro"].metric_args is None
    assert (judged.dataset_type, judged.dataset_revision) == (ROWS, "d" * 40)


def test_the_card_has_figures_rows_limits_and_commands(refs: dict[str, Artifact], tmp_path: Path) -> None:
    slices = {"test": {"genre": [group("war", 4, accuracy=0.75), group("ho`rror", 12, accuracy=0.5)]}}
    (refs["scores"].path / "slices.json").write_text(json.dumps(slices))
    text = build_card(CardFacts(recipe(), *facts(refs)))
    for part in (
        "| **test** (judged) | accuracy | 0.8000 | 0.7000 to 0.9000 |",
        "| **test** (judged) | roc_auc | - | - |",
        f"[{ROWS}](https://huggingface.co/datasets/{ROWS}) at commit `{'d' * 40}`",
        "Rows: train 8,949, test 6.",
        "`good`: 2 of its 4 rows of test are right (50.0%)",
        "Worst by `genre` is `` genre=ho`rror accuracy 0.5000 (0.450 to 0.550), 12 rows ``.",
        "1,200 optimizer steps, 3 epochs; mean loss 0.4321.",
        "![Loss and evaluation by optimizer step](loss.png)",
        "torch 2.13.0",
    ):
        assert part in text
    (tmp_path / "recipe.yaml").write_text(text.partition("```yaml\n")[2].partition("```")[0])
    again = load(tmp_path / "recipe.yaml")
    lock = {"data.revision": "d" * 40, "model.revision": "b" * 40}
    lock |= {"compute.num_processes": 2, "compute.mixed_precision": "bf16"}
    assert again == parse(recipe().model_dump(exclude_unset=True), lock)
    description = build_description(CardFacts(recipe(), *facts(refs)))
    assert description in text and len(description) < 5000


def test_the_card_has_the_size_the_speed_and_the_loss_of_released_exports(refs: dict[str, Artifact]) -> None:
    released = released_exports({ref.stage: ref for ref in refs.values()})
    text = build_card(CardFacts(recipe(), *facts(refs), released))
    assert "Files: onnx-int8: `onnx/model_quantized.onnx`, gguf-q8_0: `gguf/model-Q8_0.gguf`, int8: `int8/" in text
    assert "| onnx-int8 | ONNX Runtime | 23.0 MB | 400 | 200 | 0.8710 | 0.8603 | 0.0040 | 0.01 |" in text
    assert ModelCard(text).data.tags == ["reviews", "onnx", "gguf", "compressed-tensors"]


def test_the_card_of_a_model_made_from_scratch_on_rows_of_a_function_names_neither_on_the_hub(
    refs: dict[str, Artifact],
) -> None:
    data = {"source": "python", "path": "my_rows:rows", "text": ["text"], "label": "label"}
    mine = recipe(data=data, model={"source": "scratch", "config": {"model_type": "bert", "vocab_size": 100}})
    text = build_card(CardFacts(mine, Lock(data_fingerprint="second edition"), *facts(refs)[1:]))
    metadata = yaml.safe_load(text.split("---\n")[1])
    assert not metadata.keys() & {"base_model", "datasets"}
    assert "The Python object `my_rows:rows`, fingerprint `second edition`." in text
    assert json.dumps(metadata["model-index"][0]["results"][0]["dataset"]) == (
        '{"name": "reviews", "type": "python", "split": "validation"}'
    )


def test_the_card_of_a_mixture_has_the_origin_and_the_share_of_every_set(refs: dict[str, Artifact]) -> None:
    sets = [{"source": "hub", "path": ROWS, "weight": 3}, {"source": "csv", "path": "forum.csv", "weight": 1}]
    mine = recipe(data={"text": ["text"], "label": "label", "mix": sets, "mix_seed": 7})
    pinned = {
        "rows": PinnedRows(hub=LOCK.data_hub),
        "forum": PinnedRows(files={"train": [PinnedFile(path="/a", sha256="e" * 64)]}),
    }
    table = [
        {"dataset": name, "rows": rows, "weight": weight, "mixed": 30 * weight, "passes": 30 * weight / rows}
        | {"share": weight / 4, "character_share": 0.5, "test": 5}
        for name, rows, weight in (("rows", 90, 3), ("forum", 60, 1))
    ]
    report = json.dumps({"mixture": table}).encode()
    data = artifact(
        "load_data",
        {"labels.json": LABELS, "log/report.json": report},
        LoadDataResult(train_rows=120, test_rows=10, labels=2, warnings=0),
    )
    lock = LOCK.model_copy(update={"data_hub": None, "data_sets": pinned})
    card = ModelCard(build_card(CardFacts(mine, lock, *facts({**refs, "data": data})[1:])))
    assert card.data.datasets == [ROWS]
    assert f"* `rows`: [{ROWS}](" in card.text and f"at commit `{'d' * 40}`." in card.text
    assert "* `forum`: Files (csv) with SHA-256 `eeeeeeeeeeee`." in card.text
    assert "| forum | 60 | 1 | 30 | 0.5 | 25.0% | 50.0% | 5 |" in card.text and "seed of the mixture is 7" in card.text
    kept = yaml.safe_load(card.text.partition("```yaml\n")[2].partition("```")[0])["deployments"][0]["parameters"][
        "recipe"
    ]
    assert [one.get("revision") for one in kept["data"]["mix"]] == ["d" * 40, None]
