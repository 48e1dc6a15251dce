"""The commands that list runs and show their records: `runs`, `show`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import yaml

from flows.cli.shared import COMPLETED, add_json_argument, add_limit_argument, write_json
from flows.reports.tables import align, fit_to_terminal, terminal_width, wrap
from tasks.registry import lineage
from tasks.registry.lineage import RECIPE_WITHOUT_DEFAULTS
from tasks.reports.formatting import format_count, format_score, format_size, format_value
from tasks.reports.model_reports import OUT_OF_FOLD
from tasks.reports.row_reports import tabulate_mixture
from tasks.tracking.mlflow_run import list_runs

HEAD = ["run", "recipe", "started, UTC", "time", "state", "verdict", "version", "judged by"]
LABEL = 14
DIGITS = 12  # of a digest; --json has all
Facts = Iterator[tuple[str, str]]


def add_runs_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="only runs of this recipe")
    add_limit_argument(parser, "how many")
    add_json_argument(parser, "the list, with ids and intervals in full,")


def runs(arguments: argparse.Namespace) -> int:
    """List runs, newest first, with state, judged metric, verdict and version."""
    runs = list_runs(arguments.recipe, arguments.limit)
    write_json(arguments.json, runs)
    print(*tabulate_runs(runs), sep="\n")
    return COMPLETED


def tabulate_runs(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines of a table of runs."""
    return fit_to_terminal(align([HEAD, *map(_cells, runs)]) if runs else ["There is no run yet."])


def _cells(run: Mapping[str, Any]) -> list[str]:
    judged, seconds = run["judged"], run["seconds"]
    return [
        run["flow_run_id"][:8],
        " ".join(filter(None, [run["recipe"], run["part"]])),
        f"{datetime.fromtimestamp(run['started_ms'] / 1000, UTC):%m-%d %H:%M}",
        "" if seconds is None else f"{seconds:,.0f} s",
        run["state"],
        run["verdict"] or "",
        run["version"] or "",
        f"{judged['metric']} {format_score(judged)}" if judged else "",
    ]


def add_show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        metavar="NAME/VERSION|NAME@ALIAS|RUN",
        help="a registered version; or a run by the first digits of its id; or a recipe's name for its last run",
    )
    add_json_argument(parser, "the whole record")


def show(arguments: argparse.Namespace) -> int:
    """Show where a model comes from: run, data, base model, training, code, stages and recipe."""
    record = lineage.find_record(arguments.name)
    with lineage.damage(f"{arguments.name}, or one of its tags,"):
        lines = [*_lines(record, terminal_width())]
    write_json(arguments.json, record)
    print("\n".join(lines))
    return COMPLETED


def _lines(record: Mapping[str, Any], width: int) -> Iterator[str]:
    yield _title(record)
    sections = {
        "": _overview,
        **_monitoring(record),
        "data": _data,
        "base model": _base_model,
        "training": _training,
        "code": _code,
    }
    for name, facts in sections.items():
        if name:
            yield f"\n{name}"
        for label, text in facts(record):
            yield from wrap(text, width, f"  {label:<{LABEL - 2}}  ", " " * (LABEL + 2))
    yield "\nstages"
    yield from (f"  {line}" for line in align(_stages(record)))

    yield "\nrecipe, with pinned versions, without defaults"
    recipe = yaml.safe_dump(record[RECIPE_WITHOUT_DEFAULTS], sort_keys=False, allow_unicode=True, width=width - 2)
    yield from (f"  {line}" for line in recipe.splitlines())


def _title(record: Mapping[str, Any]) -> str:
    registered, run = record.get("registered"), record["run"]
    if registered is None:
        return f"{record['recipe']['name']}, flow run {run['flow_run_id']}"
    return ", ".join([f"{registered['name']} version {registered['version']}", *registered["aliases"]])


def _overview(record: Mapping[str, Any]) -> Facts:
    run, verdict, version = record["run"], record["verdict"], record["version"]
    if registered := record.get("registered"):
        yield "registered", format_time(registered["registered"])
    elif version:
        yield "registered", f"{version['name']} version {version['version']}"
    yield "run", f"{run['state']}, began {format_time(run['began'])}, recorded {format_time(run['written'])}"
    yield "flow run", run["flow_run_id"]
    yield "MLflow run", run["mlflow_run_id"] or "unknown"
    for name, file in (record["model"] or {"files": {}})["files"].items():
        if name.endswith(".safetensors"):
            yield "weights", f"{name}, {file['bytes']:,} bytes"
            yield "", f"sha256 {file['sha256']}"
    if verdict:
        yield "verdict", f"{verdict['decision']}: {verdict['reason']}"
    folds = {OUT_OF_FOLD: found} if (found := record.get("out_of_fold")) else {}
    for split, figures in {**(record["metrics"] or {}), **folds}.items():
        yield split, ", ".join(f"{name} {format_score(figure)}" for name, figure in figures.items())
    if teacher := record.get("teacher"):
        for name, one in (("this model", teacher["student"]), ("its teacher", teacher["teacher"])):
            place = int(name == "its teacher")
            values = [f"{metric} {format_value(found[place])}" for metric, found in teacher["figures"].items()]
            size = (
                f"{one['parameters']:,} parameters, {format_size(one['bytes'])}, {one['rows_per_second']:,.0f} rows/s"
            )
            yield name, ", ".join([*values, size])
    if publication := record["publication"]:
        yield "published", f"{publication['repo']} at {publication['revision']}, commit {publication['commit']}"


def _monitoring(record: Mapping[str, Any]) -> dict[str, Callable[[Mapping[str, Any]], Facts]]:
    """The section on drift and on rows whose labels arrived later; empty without any."""
    registered = record.get("registered") or {}
    return {"after the release": _later} if registered.get("evaluations") or registered.get("drift") else {}


def _later(record: Mapping[str, Any]) -> Facts:
    for entry in record["registered"]["evaluations"]:
        values = ", ".join(f"{name} {format_score(score)}" for name, score in entry["metrics"].items())
        below = f"; outside of the gate's bounds: {', '.join(entry['below'])}" if entry["below"] else ""
        yield f"evaluation {entry['number']}", f"{format_time(entry['time'])}, {entry['rows']:,} rows: {values}{below}"
    if drift := record["registered"]["drift"]:
        differences = f" in {', '.join(drift['differences'])}" if drift["differences"] else ""
        yield (
            "last drift",
            f"{format_time(drift['time'])}, {drift['rows']['new']:,} rows: {drift['verdict']}{differences}",
        )


def _data(record: Mapping[str, Any]) -> Facts:
    data, lock, rows = record["recipe"]["data"], record["lock"], record["rows"]
    if sets := lock.get("data_sets"):
        yield from _sets(data["mix"], sets, (rows or {}).get("mixture", []))
    else:
        yield "source", _source(data)
    if lock["data_hub"]:
        yield "commit", lock["data_hub"]["commit"]
    if lock["data_fingerprint"]:
        yield "fingerprint", lock["data_fingerprint"]
    for split, files in lock["data_files"].items():
        for file in files:
            yield from _file(split, file)
    if corrections := lock.get("corrections"):
        yield from _file("corrections", corrections)
    if rows:
        counts = [f"{name.removesuffix('_rows')} {n:,}" for name, n in rows["figures"].items() if name[-5:] == "_rows"]
        labels = f"; {format_count(len(rows['labels']), 'label')}" if rows["labels"] else ""
        yield "rows", f"{', '.join(counts)}{labels}"
        yield "digest", rows["digest"]


def _sets(entries: Sequence[Mapping[str, Any]], pinned: Mapping[str, Any], table: Sequence[Mapping[str, Any]]) -> Facts:
    """The sets of a mixture: the source of each, its pinned content, and its rows in an epoch."""
    for index, (entry, (name, found)) in enumerate(zip(entries, pinned.items(), strict=True)):
        yield "dataset", f"{name}: {_source(entry)}"
        if found["hub"]:
            yield "commit", found["hub"]["commit"]
        if found["fingerprint"]:
            yield "fingerprint", found["fingerprint"]
        for split, files in found["files"].items():
            for file in files:
                yield from _file(split, file)
        if table:
            row = tabulate_mixture(table)[index]
            seen = f"{row['rows an epoch']} rows by {row['passes']} passes of {row['train rows']}"
            yield "in an epoch", f"{seen}, {row['share']} of the mixture"


def _source(data: Mapping[str, Any]) -> str:
    return " ".join(filter(None, [data["source"], data["path"], data["config"]]))


def _base_model(record: Mapping[str, Any]) -> Facts:
    model, lock = record["recipe"]["model"], record["lock"]
    if champion := lock.get("started_from"):
        yield "champion", f"{champion['name']} version {champion['version']}"
        yield "digest", champion["model"]
    elif version := lock.get("model_version"):
        yield "registry", f"{version['name']} version {version['version']}"
        yield "digest", version["model"]
    elif model["source"] == "scratch":
        yield "from scratch", f"configuration of {model['config']['model_type']}, seed {model['seed']}"
    else:
        yield model["source"], model["path"]
    if lock["model_hub"]:
        yield "commit", lock["model_hub"]["commit"]
    for name, file in lock["model_files"].items():
        yield from _file(name, file)
    if version := lock.get("teacher_version"):
        yield "teacher", f"{version['name']} version {version['version']}"
        yield "digest", version["model"]
    elif teacher := record["recipe"]["training"].get("teacher"):
        yield "teacher", f"{teacher['source']} {teacher['path']}"
        if commit := lock.get("teacher_hub"):
            yield "commit", commit["commit"]
        for name, file in lock.get("teacher_files", {}).items():
            yield from _file(name, file)


def _training(record: Mapping[str, Any]) -> Facts:
    machine, figures, compute = record["environment"], record["training"], record["recipe"]["compute"]
    if figures:
        batch = f"micro-batches of {format_count(figures['micro_batch_size'], 'row')}"
        yield "steps", f"{figures['steps']:,}, {batch}, loss {figures['train_loss']:.4f}"
    yield "processes", f"{compute['num_processes']}, {compute['strategy']}, precision {compute['mixed_precision']}"
    if machine:
        gpus = ", ".join(machine["gpus"]) or "no GPU"
        yield (
            "machine",
            f"{machine['processor']}, {format_count(machine['cores'], 'core')}, {gpus}; {machine['system']}",
        )
        yield "threads", f"{machine['threads']} for each process"


def _code(record: Mapping[str, Any]) -> Facts:
    code = record["code"]
    if git := code["git"]:
        yield "git commit", git["commit"] + (", with uncommitted changes" if git["dirty"] else "")
    yield "digest", f"{code['digest']} of {format_count(len(code['files']), 'file')}"
    libraries = {**record["project"], **{n: v for n, v in record["libraries"].items() if n != "python"}}
    yield "versions", ", ".join(f"{name} {version}" for name, version in libraries.items())


def _file(label: str, file: Mapping[str, Any]) -> Facts:
    size = f", {file['size_bytes']:,} bytes" if file["size_bytes"] is not None else ""
    yield label, f"{file['path']}{size}"
    yield "", f"sha256 {file['sha256']}"


def _stages(record: Mapping[str, Any]) -> list[list[str]]:
    table = [["stage", "key", "digest", "state", "inputs"]]
    for stage in record["stages"]:
        counts = f"{len(stage['inputs'])}, and {format_count(len(stage['code']), 'file')} of code"
        key, digest = ((stage[part] or "")[:DIGITS] for part in ("key", "digest"))
        table.append([stage["name"], key, digest, stage["state"], counts if digest else ""])
    return table


def format_time(time: str | None) -> str:
    """`2026-11-21 19:40 UTC`"""
    return f"{time[:16].replace('T', ' ')} UTC" if time else "unknown"
