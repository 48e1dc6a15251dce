"""The key of load_data's artifact, and the rows that a chat template refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.cache.planner import differences
from tasks.cache.results import Lock, PinnedFile, PinnedRows
from tasks.reports.row_reports import read_report
from tasks.stages.load_data import load_data, load_data_settings, load_rows, needs_tokenizer
from tasks.stages.resolve import pin_data
from tests.arrow import read_arrow
from tests.training.task_types.test_sft import CHATML, words
from training import task_types
from training.problems import UserError
from training.recipe import parse
from training.tokenization.token_files import tokenize

FOLDER = {"source": "folder", "path": "base"}

pytestmark = pytest.mark.usefixtures("home")


def inputs(task: str, **data: Any) -> dict[str, Any]:
    data = {"source": "json", "path": "rows", **data}
    recipe = parse({"name": "own", "task": task, "data": data, "model": FOLDER})
    return load_data.flat_inputs(recipe, Lock())[0]


def test_rows_are_named_by_the_columns_that_their_kind_has_of_them() -> None:
    task = "tests.training.data.task_types:Tagging"
    plain, named = inputs(task), inputs(task, columns={"tags": "ner"})
    assert {name: named[name] for name in named if plain.get(name) != named[name]} == {"data.columns.tags": "ner"}
    assert (plain["task.columns.words"], plain["task.checks.uneven"]) == ("texts", "error")


def test_code_of_a_kind_names_rows_only_where_it_looks_at_them() -> None:
    looks = inputs("tests.training.data.task_types:Tagging")
    blind = inputs("tests.training.data.task_types:Lines", text=["text"])
    usual = inputs("sequence-classification", text=["text"], label="label")
    assert [name for name in looks if "task_types" in name and name.startswith("code.")] != []
    assert [name for one in (blind, usual) for name in one if "task_types" in name or "batching" in name] == []


@pytest.mark.parametrize("read", [{"quoting": "none"}, {"header": ["text", "label"]}, {"label_separator": ","}])
def test_how_a_table_is_read_is_in_the_key_of_its_rows(read: dict[str, Any]) -> None:
    plain = {"source": "csv", "text": ["text"], "label": "label"}
    task = "multi-label-classification"
    before, after = (inputs(task, **plain), inputs(task, **plain, **read))
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    assert changed and all(name.startswith(f"data.{field}") for name in changed for field in read)


def test_only_a_split_by_a_column_is_in_the_key() -> None:
    plain = {"source": "csv", "text": ["text"], "label": "label"}
    by_rows, by_group = {"by": "rows"}, {"by": "group", "column": "who"}
    before = inputs("sequence-classification", **plain)
    assert inputs("sequence-classification", **plain, split=by_rows) == before
    after = inputs("sequence-classification", **plain, split=by_group)
    changed = {name: after[name] for name in after if before.get(name) != after[name]}
    assert changed.items() >= {"split.by": "group", "split.column": "who"}.items()
    assert all(name.startswith("split.") for name in changed)


def test_names_of_labels_are_in_the_key_by_the_content_of_their_file(tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("bad\ngood\n")
    (tmp_path / "same.json").write_text('["bad", "good"]')
    (tmp_path / "other.txt").write_text("bad\nbest\n")
    plain = {"text": ["text"], "label": "label"}
    names, same, other = (
        inputs("sequence-classification", **plain, label_names=str(tmp_path / file))
        for file in ("names.txt", "same.json", "other.txt")
    )
    assert names == same != other


def test_a_mixture_is_named_by_each_set_with_its_share_and_its_files() -> None:
    def flat(weight: float, digest: str) -> tuple[dict[str, Any], dict[str, str]]:
        entries = [{"source": "json", "path": "a", "weight": 1.0}, {"source": "csv", "path": "b", "weight": weight}]
        data = {"text": ["text"], "label": "label", "mix": entries}
        recipe = parse({"name": "own", "task": "sequence-classification", "data": data, "model": FOLDER})
        pinned = {
            name: PinnedRows(files={"train": [PinnedFile(path=f"/{name}", sha256=content)]})
            for name, content in (("a", "1"), ("b", digest))
        }
        return load_data.flat_inputs(recipe, Lock(data_sets=pinned))

    (before, _), (after, names) = flat(1.0, "2"), flat(3.0, "3")
    assert differences(before, after, names) == ["b: /b changed", "mix.b.weight 1.0 → 3.0"]
    assert {"code.training/data/json_files.py", "code.training/data/csv_files.py"} < before.keys()


ASKS, OF_SYSTEM = {"role": "user", "content": "b"}, {"role": "system", "content": "c"}
SAYS, OTHER = {"role": "assistant", "content": "d"}, {"role": "assistant", "content": "e"}
ROWS: dict[str, Any] = {
    "sft": lambda prompt: {"messages": [*prompt, SAYS]},
    "preference": lambda prompt: {"prompt": prompt, "chosen": [SAYS], "rejected": [OTHER]},
    "reward-modeling": lambda prompt: {"prompt": prompt, "chosen": [SAYS], "rejected": [OTHER]},
    "kto": lambda prompt: {"prompt": prompt, "completion": [SAYS], "label": True},
}
COLUMNS: dict[str, Any] = {"sft": {"columns": {"messages": "messages"}}, "kto": {"label": "label"}}


@pytest.mark.parametrize("task", ROWS)
def test_rows_that_the_chat_template_refuses_are_left_out_of_every_split_and_counted_by_their_reason(
    task: str, tmp_path: Path
) -> None:
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    refuses += "{% if messages | length > 3 %}{{ raise_exception('too long') }}{% endif %}"
    tokenizer = words(tmp_path / "it", refuses + CHATML)
    (tmp_path / "chat.jinja").write_text(refuses + CHATML)
    good, ruled, long = [ASKS], [OF_SYSTEM, ASKS], [ASKS, SAYS, ASKS, SAYS, ASKS]
    prompts = {"train": [good, ruled, good, long, ruled], "validation": [ruled, good], "test": [good]}
    (tmp_path / "data").mkdir()
    for split, given in prompts.items():
        (tmp_path / f"data/{split}.jsonl").write_text("\n".join(json.dumps(ROWS[task](prompt)) for prompt in given))
    ignored = dict.fromkeys(("duplicates", "conflicting_labels", "shared_rows", "absent_label"), "ignore")

    def recipe_at(level: str) -> Any:
        checks = ignored | {"refused_by_template": level}
        data = {"source": "json", "path": str(tmp_path / "data"), "checks": checks, **COLUMNS.get(task, {})}
        model = {"source": "folder", "path": "base", "chat_template": str(tmp_path / "chat.jinja")}
        return parse({"name": "own", "task": task, "data": data, "model": model})

    recipe = recipe_at("warning")
    lock = pin_data(recipe, lambda done, total: None)
    assert needs_tokenizer(recipe, lock) and not needs_tokenizer(recipe_at("error"), lock)
    load_rows(load_data_settings(recipe, lock), tmp_path / "rows", lambda done, total: None, tokenizer)
    report = read_report(tmp_path / "rows")
    assert report["rows"] == {"train": 2, "validation": 1, "test": 1}
    assert report["left_out"] == {"train": 3, "validation": 1, "test": 0}
    why = "is refused by the model's chat template (it cannot write the conversation: {})"
    assert {(one["where"].rpartition("/")[2], one["message"]) for one in report["problems"]} == {
        ("train.jsonl row 2", why.format("no system") + " (2 rows like this: 2, 5): left out."),
        ("train.jsonl row 4", why.format("too long") + ": left out."),
        ("validation.jsonl row 1", why.format("no system") + ": left out."),
    }
    tokenize(task_types.load(**recipe.task_and_options), tmp_path / "rows", tokenizer, tmp_path / "tokens", 32)
    assert len(read_arrow(tmp_path / "tokens/validation.arrow")) == 1
    load_rows(load_data_settings(recipe_at("error"), lock), tmp_path / "all", lambda done, total: None)
    with pytest.raises(UserError, match=r"refuses 3 of 5 rows of train .*set data.checks.refused_by_template: warning"):
        tokenize(task_types.load(**recipe.task_and_options), tmp_path / "all", tokenizer, tmp_path / "none", 32)
