"""The model card on the Hub and the description in the registry.

Runs with the same model, rows and recipe get the same texts.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from tasks.cache import store
from tasks.cache.results import Artifact, Lock, PinnedRows, Verdict, label_names
from tasks.hub.client import repository_url
from tasks.registry.lineage import resolve_names
from tasks.reports.formatting import Markdown, escape_markdown, format_code, format_markdown
from tasks.reports.model_reports import (
    describe_calibration,
    describe_teacher,
    find_worst_groups,
    name_out_of_fold,
    tabulate_exports,
    tabulate_scores,
    tabulate_teacher,
)
from tasks.reports.row_reports import read_report, tabulate_mixture
from training import task_types
from training.data.load_rows import LoadDataResult
from training.engine.fit_settings import FitResult
from training.evaluation.scores import ComparedExport, ComparedTeacher, SplitScores
from training.evaluation.stored_calibration import CalibrateResult
from training.recipe import Data, Recipe
from training.recipe.tables.exports import EXPORTS

CURVES = "loss.png"
"""The plot of the loss curve, under `log/` in an artifact of `fit`, and in the repository."""
CALIBRATION_PICTURES = ("calibrated_test.png", "risk_coverage_test.png")
"""Plots under `log/` in an artifact of `calibrate`, and in the repository."""
LIBRARY = "transformers"
_AVERAGES = ("_macro", "_micro", "_weighted")


class CardFacts(NamedTuple):
    """What a model card tells of."""

    recipe: Recipe
    lock: Lock
    data: Artifact[LoadDataResult]
    trained: Artifact[FitResult]
    predictions: Artifact
    scores: Artifact[SplitScores]
    verdict: Verdict
    exports: Mapping[str, ComparedExport] | None = None
    """The released ones."""
    calibrated: Artifact[CalibrateResult] | None = None
    scores_of_folds: Artifact[SplitScores] | None = None
    beside_teacher: Artifact[ComparedTeacher] | None = None


def build_card(facts: CardFacts) -> str:
    """Builds the model card: metadata, then Markdown."""
    from huggingface_hub import ModelCardData

    recipe, lock, exports, hub = facts.recipe, facts.lock, facts.exports, facts.recipe.release.hub
    assert hub is not None
    metadata = ModelCardData(
        license=hub.license,
        library_name=LIBRARY,
        pipeline_tag=task_types.load(**recipe.task_and_options).hub_task,
        base_model=recipe.model.path if lock.model_hub else None,
        datasets=[one.path for one, pinned in zip(recipe.data.sets, lock.sets, strict=False) if pinned.hub] or None,
        tags=[*dict.fromkeys([*hub.tags, *(EXPORTS[name].tag for name in exports or ())])] or None,
        metrics=sorted({_convert_metric(metric) for metrics in facts.scores.result.values() for metric in metrics}),
        model_name=hub.repo.partition("/")[2],
        eval_results=_build_results(recipe, lock, facts.scores),
    )
    sections = [
        f"# {hub.repo.partition('/')[2]}",
        *_build_sections(facts),
        *_show_pictures(facts.calibrated),
        f"## Training\n\n{_describe_training(facts.trained)}\n\n![Loss and evaluation by optimizer step]({CURVES})",
        f"## How to reproduce\n\n{_build_reproduction(recipe, lock, facts.trained)}",
    ]
    return f"---\n{metadata.to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n"


def _show_pictures(calibrated: Artifact[CalibrateResult] | None) -> list[str]:
    titles = ("Share of right predictions by probability", "Share of errors by the share of answered rows")
    pictures = zip(titles, CALIBRATION_PICTURES, strict=True)
    there = [
        f"![{title}]({name})" for title, name in pictures if calibrated and (calibrated.path / "log" / name).is_file()
    ]
    return ["\n\n".join(there)] if there else []


def build_description(facts: CardFacts) -> str:
    """Builds the description of a version in the registry: the model card without metadata, recipe and plot."""
    return "\n\n".join(_build_sections(facts))


def _build_sections(facts: CardFacts) -> Iterator[str]:
    recipe, lock, data, trained, predictions, scores, verdict, exports, calibrated, scores_of_folds, beside = facts
    labels = label_names(data)
    yield _build_introduction(recipe, lock, labels, trained, verdict)
    yield f"## Figures\n\n{format_metrics(recipe, scores, scores_of_folds)}"
    if calibrated:
        yield f"## Confidence\n\n{describe_calibration(calibrated.result)}"
    if exports:
        yield f"## Exports\n\n{_describe_exports(exports)}"
    if beside:
        yield f"## Teacher\n\n{format_markdown(tabulate_teacher(beside.result))}\n\n{describe_teacher(beside.result)}"
    yield f"## Data\n\n{_describe_rows(recipe, lock, data)}"
    yield f"## Limits\n\n{_describe_limits(recipe, trained, predictions, scores, labels, verdict)}"


def _build_introduction(
    recipe: Recipe, lock: Lock, labels: list[str], trained: Artifact[FitResult], verdict: Verdict
) -> str:
    if start := lock.start:
        base = f"version {start.version} of `{start.name}`" + (", which was the champion" if lock.started_from else "")
    elif lock.model_hub:
        url = repository_url("model", str(recipe.model.path))
        base = f"[{escape_markdown(str(recipe.model.path))}]({url}) at commit `{lock.model_hub.commit}`"
    else:
        base = "a model made from a configuration" if recipe.model.source == "scratch" else "a model in a folder"
    names = ", ".join(format_code(label) for label in labels[:20]) + (", …" if len(labels) > 20 else "")
    sentence = task_types.load(**recipe.task_and_options).card_sentence.format(
        text="pair of texts" if len(recipe.data.sets[0].text or ()) > 1 else "text",
        labels=f"{len(labels)} labels: {names}",
    )
    chosen = f" Its settings are those of {selection}." if (selection := verdict.selection) else ""
    return f"{sentence}. Fine-tuned from {base}.{chosen}\n\nDigest of the model: `{trained.parts['model']}`."


def format_metrics(
    recipe: Recipe, scores: Artifact[SplitScores], scores_of_folds: Artifact[SplitScores] | None = None
) -> str:
    """Formats the metrics of each split, and those out of fold, with their intervals as a table."""
    table = tabulate_scores(scores.result | (name_out_of_fold(scores_of_folds.result) if scores_of_folds else {}))
    titles: dict[str, str] = {recipe.judged_split: Markdown(f"**{escape_markdown(recipe.judged_split)}** (judged)")}
    return format_markdown([{**row, "split": titles.get(row["split"], row["split"])} for row in table])


def _describe_exports(exports: Mapping[str, ComparedExport]) -> str:
    files = ", ".join(f"{name}: `{EXPORTS[name].file}`" for name in exports)
    table = format_markdown(
        [{name: cell for name, cell in row.items() if name != "released"} for row in tabulate_exports(exports)]
    )
    return f"Files: {files}. Speeds are those of the CPU, on the same rows.\n\n{table}"


def _describe_rows(recipe: Recipe, lock: Lock, data: Artifact[LoadDataResult]) -> str:
    sections = recipe.data.sets
    origins = [_describe_origin(one, pinned) for one, pinned in zip(sections, lock.sets, strict=True)]
    origin = origins[0]
    if recipe.data.mix is not None:
        listed = zip(recipe.data.set_names, origins, strict=True)
        origin = "A mixture of:\n\n" + "\n".join(f"* {format_code(name)}: {text}." for name, text in listed)
        table = format_markdown(tabulate_mixture(read_report(data.path)["mixture"]))
        origin += f"\n\n{table}\n\nThe seed of the mixture is {recipe.data.mix_seed}"
    counts = data.result.rows
    rows = ", ".join(f"{split} {n:,}" for split, n in counts.items())
    return f"{origin}.\n\nRows: {rows}. Digest of the rows: `{data.digest}`."


def _describe_origin(data: Data, pinned: PinnedRows) -> str:
    """Describes the source of one set of rows."""
    if pinned.hub:
        link = f"[{escape_markdown(data.path)}]({repository_url('dataset', data.path)})"
        configuration = f", configuration {format_code(data.config)}" if data.config else ""
        return f"{link} at commit `{pinned.hub.commit}`{configuration}"
    if pinned.files:
        digests = [f"`{pin.sha256[:12]}`" for files in pinned.files.values() for pin in files]
        more = f" and {len(digests) - 10} more" if len(digests) > 10 else ""
        return f"Files ({data.source}) with SHA-256 {', '.join(digests[:10])}{more}"
    mark = f", fingerprint {format_code(pinned.fingerprint)}" if pinned.fingerprint else ""
    return f"The Python object {format_code(data.path)}{mark}"


def _describe_limits(
    recipe: Recipe,
    trained: Artifact[FitResult],
    predictions: Artifact,
    scores: Artifact[SplitScores],
    labels: list[str],
    verdict: Verdict,
) -> str:
    sentences = [*_describe_worst_label(recipe, predictions, labels)]
    groups = find_worst_groups(recipe, scores.path)
    sentences += [f"Worst by {format_code(name)} is {format_code(group)}." for name, group in groups.items()]
    sentences.append(f"Texts are cut after {recipe.tokens.max_length} tokens.")
    sentences.append("On rows unlike these, nothing was measured.")
    warnings = [*verdict.own_warnings]
    if missing := trained.result.missing_weights:
        warnings.append(
            f"{missing:,} weights of the base model were not in its files, or had another shape there, and were drawn "
            "at random before training."
        )
    return "\n\n".join([" ".join(sentences), *(f"Warning: {escape_markdown(warning)}" for warning in warnings)])


def _describe_worst_label(recipe: Recipe, predictions: Artifact, labels: list[str]) -> Iterator[str]:
    """A sentence on the label with the lowest recall, if each row has one label."""
    split = recipe.judged_split
    file = predictions.path / f"{split}.parquet"
    schema = pq.read_schema(file)
    types = [schema.field(name).type for name in ("label", "prediction") if name in schema.names]
    if len(types) < 2 or not all(map(pa.types.is_integer, types)):
        return
    table = pq.read_table(file, columns=["label", "prediction"])
    references, predicted = table["label"].to_numpy(), table["prediction"].to_numpy()
    rows = np.bincount(references, minlength=len(labels))
    right = np.bincount(references[references == predicted], minlength=len(labels))
    recalls = {i: right[i] / rows[i] for i in range(len(labels)) if rows[i]}
    worst = min(recalls, key=lambda i: (recalls[i], i))
    counts = f"{right[worst]:,} of its {rows[worst]:,} rows of {split} are right ({recalls[worst]:.1%})"
    yield f"The label that it recognises worst is {format_code(labels[worst])}: {counts}."


def _describe_training(trained: Artifact[FitResult]) -> str:
    found = trained.result
    duration = f"{found.steps:,} optimizer steps, {found.epochs:g} epochs"
    return f"{duration}; mean loss {found.train_loss:.4f}."


def _build_reproduction(recipe: Recipe, lock: Lock, trained: Artifact[FitResult]) -> str:
    inputs = store.inputs_of("fit", trained.key) or {}
    versions = {name.removeprefix("library."): v for name, v in inputs.items() if name.startswith("library.")}
    versions["finetune-flows"] = importlib.metadata.version("finetune-flows")
    entry = {
        "name": recipe.name,
        "entrypoint": "flows.finetune:finetune",
        "parameters": {"recipe": pin_recipe(recipe, lock)},
    }
    document = yaml.safe_dump({"deployments": [entry]}, sort_keys=False, allow_unicode=True)
    return (
        "Save this as `recipe.yaml`; `finetune run recipe.yaml` trains the same model from the same rows, byte for "
        f"byte where the hardware and the versions are the same.\n\n```yaml\n{document}```\n\n"
        f"Versions: {', '.join(f'{name} {version}' for name, version in sorted(versions.items()))}."
    )


def pin_recipe(recipe: Recipe, lock: Lock) -> dict[str, Any]:
    """Returns the recipe's fields that differ from their defaults, with revisions and `auto` values resolved."""
    values = recipe.model_dump(mode="json", exclude_defaults=True)
    resolve_names(values, lock)
    return values


def _build_results(recipe: Recipe, lock: Lock, scores: Artifact[SplitScores]) -> list[Any]:
    """The metrics with their intervals for the card's metadata. NaN and infinite values are left out."""
    from huggingface_hub import EvalResult

    data = recipe.data
    return [
        EvalResult(
            task_type=task_types.load(**recipe.task_and_options).hub_task,
            dataset_type=data.path if lock.data_hub else data.source,  # `mix` for a mixture
            dataset_name=data.path if lock.data_hub else recipe.name,
            dataset_config=data.config,
            dataset_split=split,
            dataset_revision=lock.data_hub.commit if lock.data_hub else None,
            metric_type=_convert_metric(metric),
            metric_name=metric,
            metric_value=value,
            metric_args=_build_interval(figure),
        )
        for split, metrics in scores.result.items()
        for metric, figure in metrics.items()
        if (value := _keep_finite(figure["value"])) is not None
    ]


def _convert_metric(metric: str) -> str:
    """Returns the Hub's name of a metric: f1 for f1_macro."""
    return next((metric.removesuffix(suffix) for suffix in _AVERAGES if metric.endswith(suffix)), metric)


def _build_interval(figure: Mapping[str, Any]) -> dict[str, float] | None:
    low, high = _keep_finite(figure["low"]), _keep_finite(figure["high"])
    return None if low is None or high is None else {"confidence": 0.95, "low": low, "high": high}


def _keep_finite(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None
