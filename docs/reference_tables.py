"""The generated parts of the reference pages, as a Sphinx extension.

A page holds `<!-- generated: NAME -->`; the build replaces this line by the Markdown that `GENERATED[NAME]` returns. It
comes from the recipe's models, the parsers of the command line and the tables that the code itself uses.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from flows import pipeline
from flows.cli.main import COMMANDS, parser
from tasks.cache.stage import Stage
from tasks.reports.stage_summaries import STAGES
from training import task_types
from training.data import checks, leakage_checks
from training.evaluation.metrics import load_class
from training.recipe import BatchPrediction, Parameter, Recipe, Sweep, Training
from training.recipe.extra_arguments import ACCEPTED, arguments, set_by_project
from training.recipe.field_types import describe_field
from training.recipe.tables import row_checks as levels
from training.recipe.tables.formats import FORMATS
from training.recipe.tables.metrics import METRICS, TAGS, metrics_for
from training.recipe.tables.optimizers import OPTIMIZERS, REFUSED
from training.recipe.tables.searches import PRUNERS, SAMPLERS
from training.recipe.tables.strategies import STRATEGIES
from training.recipe.tables.task_types import TASK_TYPES

SECTION = "a section"
TYPES = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false", "null": "null"}
"""Plain types of JSON Schema, in words."""
MARK = re.compile(r"^<!-- generated: (.+) -->$", re.MULTILINE)


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *(list(map(str, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def one_line(text: str | None) -> str:
    """A docstring as one line."""
    return " ".join((text or "").split())


def first_paragraph(thing: object) -> str:
    """The first paragraph of a docstring, as one line."""
    return one_line((inspect.getdoc(thing) or "").partition("\n\n")[0])


# The recipe


def recipe() -> str:
    """A chapter for each section of the recipe, a definition for each field: type, default, description."""
    schema = Recipe.model_json_schema()
    return "\n\n".join(_sections(schema, schema["$defs"], ""))


def sweep() -> str:
    """The fields of a sweep and of its parameters, and the settings of samplers and pruners."""
    fields, parameter = Sweep.model_json_schema(), Parameter.model_json_schema()
    chapters = [
        *_sections({**fields, "$defs": {}}, fields["$defs"], "sweep"),
        *_sections(parameter, {}, "sweep.space.FIELD"),
    ]
    for title, searches in (("Samplers", SAMPLERS), ("Pruners", PRUNERS)):
        rows = [
            (f"`{name}`", ", ".join(f"`{one}: {yaml_value(value)}`" for one, value in settings.items()) or "none")
            for name, settings in searches.items()
        ]
        chapters.append(f"## {title}\n\n{table(('name', 'settings with their defaults'), rows)}")
    return "\n\n".join(chapters)


def batch_prediction() -> str:
    """A definition for each parameter of a batch prediction: type, default, description."""
    schema = BatchPrediction.model_json_schema()
    fields = schema["properties"].items()
    return "\n\n".join(_definition(name, field, name in schema["required"]) for name, field in fields)


def _sections(section: Mapping[str, Any], definitions: Mapping[str, Any], path: str) -> Iterator[str]:
    yield f"## {f'`{path}`' if path else 'Top level'}\n\n{one_line(section.get('description'))}"
    required = section.get("required", ())
    inner: list[tuple[str, str]] = []
    for name, field in section["properties"].items():
        field_path = f"{path}.{name}".lstrip(".")
        if target := _section_of(field):
            inner.append((target, field_path))
            field = {"description": definitions[target].get("description"), **field}
        yield _definition(field_path, field, name in required)
    for target, inner_path in inner:
        yield from _sections(definitions[target], definitions, inner_path)


def _definition(path: str, field: Mapping[str, Any], required: bool) -> str:
    words, section = type_in_words(field), _section_of(field)
    if section:
        words = words.replace(SECTION, f"[{SECTION}](#{re.sub('[._]', '-', path).lower()})")
    optional = "optional" if section and field.get("default") is not None else f"default {_default(field)}"
    return f"`{path}`\n: {words}; {'required' if required else optional}.\n\n  {one_line(field.get('description'))}"


def _section_of(field: Mapping[str, Any]) -> str | None:
    """The name of the model behind a field that is a section or a list of sections, or may be one."""
    choices = [field, *field.get("anyOf", ()), *field.get("allOf", ())]
    choices += [choice["items"] for choice in choices if isinstance(choice.get("items"), dict)]
    return next((choice["$ref"].rpartition("/")[2] for choice in choices if "$ref" in choice), None)


def _default(field: Mapping[str, Any]) -> str:
    empty: object = {"array": [], "object": {}}.get(field.get("type", ""))
    return f"`{yaml_value(field.get('default', empty))}`"


def yaml_value(value: object) -> str:
    """A plain value as a recipe writes it."""
    if isinstance(value, list):
        return f"[{', '.join(map(yaml_value, value))}]"
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


def type_in_words(schema: Mapping[str, Any]) -> str:
    """The values that a JSON schema allows, in words."""
    if "$ref" in schema or "allOf" in schema:
        return SECTION
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(type_in_words, schema["anyOf"])))
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"a list of {type_in_words(schema.get('items', {}))}"
    if schema.get("type") == "object":
        values = schema.get("additionalProperties")
        return f"a mapping to {type_in_words(values)}" if isinstance(values, dict) and values else "a mapping"
    return " ".join([TYPES.get(schema.get("type", ""), "any value"), *_range(schema)])


def _range(schema: Mapping[str, Any]) -> Iterator[str]:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {schema[name]:,}" for name, sign in signs.items() if name in schema]
    if bounds:
        yield ", ".join(bounds)


def training_arguments() -> str:
    """Every field of the installed TrainingArguments, and what a recipe does with it."""
    return table(("field", "in a recipe", ""), map(_argument, arguments()))


def _argument(name: str) -> tuple[str, str, str]:
    if name in Training.model_fields:
        return f"`{name}`", f"`training.{name}`", describe_field(Training, name)
    if reason := set_by_project(name):
        return f"`{name}`", "refused", reason
    return f"`{name}`", f"`training.extra.{name}`", ACCEPTED.get(name, "")


# The command line


def command_line() -> str:
    """A chapter for each subcommand: description, usage, arguments."""
    (commands,) = (action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    assert len(commands.choices) == len(COMMANDS)
    return "\n\n".join(_command(name, command.complete()) for name, command in commands.choices.items())


def _command(name: str, command: argparse.ArgumentParser) -> str:
    command.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=100)
    usage = " ".join(command.format_usage().removeprefix("usage: ").split()) + "\n"
    rows = [(_spelling(action), _help(action)) for action in command._actions if action.dest != "help"]
    description = one_line(command.description)
    return f"## finetune {name}\n\n{description}\n\n```text\n{usage}```\n\n{table(('argument', ''), rows)}"


def _spelling(action: argparse.Action) -> str:
    value = action.metavar or (f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest.upper())
    if not action.option_strings:
        return f"`{value}`"
    argument = {0: "", "?": f" [{value}]"}.get(action.nargs or "", f" {value}")
    return f"`{', '.join(action.option_strings)}{argument}`"


def _help(action: argparse.Action) -> str:
    return one_line((action.help or "") % {**vars(action), "prog": "finetune"})


# Tables of the code


def task_type_chapters() -> str:
    """A chapter for each task type: columns, class of transformers, metrics, options."""
    return "\n\n".join(_task_type(name, task_types.class_of(name)) for name in TASK_TYPES)


def _task_type(name: str, of: Any) -> str:
    columns = [
        (f"`{column}`", one.form, "may be left out" if one.optional else "") for column, one in of.columns.items()
    ]
    options = of.Options.model_json_schema()["properties"] if of.Options.model_fields else {}
    parts = [
        f"## `{name}`",
        f"{first_paragraph(of)} Class of transformers: `{of.auto_class}`; task of the Hub: `{of.hub_task}`.",
        table(("column", "form", ""), columns),
        f"Metrics: {', '.join(f'`{metric}`' for metric in of.metrics)}.",
    ]
    if options:
        rows = [
            (f"`{key}`", type_in_words(one), _default(one), one_line(one.get("description")))
            for key, one in options.items()
        ]
        parts.append(table(("option", "type", "default", ""), rows))
    return "\n\n".join(parts)


def metrics() -> str:
    """The metrics that a recipe may name."""
    return _metrics(METRICS, None)


def metrics_by_task_type() -> str:
    """The metrics that fit each task type."""
    rows = (
        (f"`{name}`", ", ".join(f"`{metric}`" for metric in task_types.class_of(name).metrics)) for name in TASK_TYPES
    )
    return table(("task type", "metrics"), rows)


def span_metrics() -> str:
    """The metrics of tagged words."""
    return _metrics(metrics_for(TAGS), TAGS)


def _metrics(names: Iterable[str], prediction_type: str | None) -> str:
    rows = (
        (
            f"`{name}`",
            load_class(name, prediction_type).describe(),
            "more" if METRICS[name].more_is_better else "less",
        )
        for name in names
    )
    return table(("metric", "", "better"), rows)


def formats() -> str:
    """The file sources, and the suffixes of their files."""
    rows = (
        (f"`{name}`", ", ".join(f"`{suffix}`" for suffix in one.suffixes) or "a folder with a folder of `.txt` a label")
        for name, one in FORMATS.items()
    )
    return table(("`data.source`", "suffixes"), rows)


def optimizers() -> str:
    """The optimizers that a recipe may name, then the refused ones with the reason."""
    offered = (
        (f"`{name}`", one.package or "none", ", ".join(f"`{field}`" for field in (*one.settings, *one.args)) or "none")
        for name, one in OPTIMIZERS.items()
    )
    refused = ((f"`{name}`", reason) for name, reason in REFUSED.items())
    return f"{table(('`training.optim`', 'package', 'settings'), offered)}\n\n{table(('refused', 'because'), refused)}"


def strategies() -> str:
    """The strategies, and the type of accelerate behind each, on CPUs and on GPUs."""
    rows = []
    for name, one in STRATEGIES.items():
        strategy = importlib.import_module(one.module)
        types = " / ".join(dict.fromkeys(strategy.DISTRIBUTED_TYPE.values()))
        rows.append((f"`{name}`", types, "yes" if strategy.UNPICKLES else "no"))
    return table(("`compute.strategy`", "type in accelerate", "checkpoints can run code"), rows)


def row_checks() -> str:
    """The checks of rows: level, description, and whether rows that cannot be used are left out."""
    found = (pair for module in (checks, leakage_checks) for pair in inspect.getmembers(module, inspect.isfunction))
    descriptions = {name: one_line(check.__doc__) for name, check in found}
    described = re.findall(r'^    "(\w+)": "\w+",  # (.+)$', inspect.getsource(levels), re.MULTILINE)
    descriptions |= {name: f"{words[0].upper()}{words[1:]}." for name, words in described}
    rows = (
        (f"`{name}`", level, descriptions[name], "left out" if name in checks.LEAVES_OUT else "kept")
        for name, level in levels.LEVELS.items()
    )
    return table(("check", "level", "finds", "its rows, if not `error`"), rows)


def checks_of_task_types() -> str:
    """The checks that task types add."""
    rows = (
        (f"`{name}`", f"`{check}`", level)
        for name in TASK_TYPES
        for check, level in task_types.class_of(name).checks.items()
    )
    return table(("task type", "check", "level"), rows)


def stages() -> str:
    """The stages in order: work, kind of output, inputs."""
    by_name = {one.name: one for one in vars(pipeline).values() if isinstance(one, Stage)}
    rows = (
        (
            f"`{name}`",
            one_line(one.description),
            "artifact" if one.cached else "action",
            one_line(one.key_description),
        )
        for name, one in ((name, by_name[name]) for name in STAGES)
    )
    return table(("stage", "work", "output", "inputs"), rows)


GENERATED: dict[str, Callable[[], str]] = {
    "recipe": recipe,
    "sweep": sweep,
    "batch prediction": batch_prediction,
    "training-arguments": training_arguments,
    "command-line": command_line,
    "task-types": task_type_chapters,
    "metrics": metrics,
    "metrics-by-task-type": metrics_by_task_type,
    "span-metrics": span_metrics,
    "formats": formats,
    "optimizers": optimizers,
    "strategies": strategies,
    "row-checks": row_checks,
    "checks-of-task-types": checks_of_task_types,
    "stages": stages,
}


def replaced(source: str) -> str:
    """A page with its generated parts in place of their marks."""
    return MARK.sub(lambda mark: GENERATED[mark[1]](), source)


def setup(app: Any) -> dict[str, bool]:
    """Registers the extension with Sphinx."""
    app.connect("source-read", _on_read)
    app.connect("env-get-outdated", _generated_pages)
    return {"parallel_read_safe": True}


def _on_read(_: Any, __: str, source: list[str]) -> None:
    source[0] = replaced(source[0])


def _generated_pages(_: Any, env: Any, *__: set[str]) -> list[str]:
    """The pages to build although their files have not changed: the code behind them may have."""
    return [name for name in env.found_docs if MARK.search(Path(env.doc2path(name)).read_text())]
