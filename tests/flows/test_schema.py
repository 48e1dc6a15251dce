"""The JSON Schema of deployment files, by which editors complete recipes."""

from __future__ import annotations

import copy
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from flows.cli.main import main
from training.recipe import Recipe
from training.recipe.overrides import read_yaml

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / f"deployments/schema/finetune-{version('finetune-flows')}.json"
FILES = sorted([*ROOT.glob("deployments/**/*.yaml"), *ROOT.glob("tests/benchmarks/recipes/*.yaml")])
SCHEMA: dict[str, Any] = json.loads(PUBLISHED.read_text()) if PUBLISHED.is_file() else {}


def mistakes(document: Any) -> list[str]:
    """Where the document differs from the schema."""
    return [error.json_path for error in jsonschema.Draft202012Validator(SCHEMA).iter_errors(document)]


@pytest.fixture
def document() -> Any:
    return copy.deepcopy(read_yaml(ROOT / "deployments/examples/translation.yaml"))


def test_the_published_schema_is_the_one_of_this_version(tmp_path: Path) -> None:
    """Made anew by `finetune schema --out deployments/schema/finetune-VERSION.json`."""
    assert main(["schema", "--out", str(tmp_path / "schema.json")]) == 0
    assert (tmp_path / "schema.json").read_text() == PUBLISHED.read_text()


def test_the_schema_is_printed_unless_a_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA
    with pytest.raises(SystemExit, match="2"):
        main(["schema", "--out", str(tmp_path / "nowhere" / "schema.json")])
    assert "argument --out: " in capsys.readouterr().err


@pytest.mark.parametrize("file", [str(file.relative_to(ROOT)) for file in FILES])
def test_every_deployment_file_names_the_schema_and_fits_it(file: str) -> None:
    first = (ROOT / file).read_text().splitlines()[0]
    named = first.removeprefix("# yaml-language-server: $schema=")
    assert ((ROOT / file).parent / named).resolve() == PUBLISHED
    assert mistakes(read_yaml(ROOT / file)) == []


@pytest.mark.parametrize(
    ("place", "field", "value"),
    [
        ("", "work_pol", {"name": "finetune"}),
        (".parameters", "overides", {}),
        (".parameters.recipe", "trainin", {}),
        (".parameters.recipe.training", "learning_rat", 1.0e-4),
        (".parameters.recipe.release.gate", "minimun", {"bleu": 20.0}),
        (".parameters.recipe.options", "max_target_lenght", 64),
    ],
)
def test_a_misspelt_field_does_not_fit(document: Any, place: str, field: str, value: Any) -> None:
    section = document["deployments"][0]
    for name in filter(None, place.split(".")):
        section = section.setdefault(name, {})
    section[field] = value
    assert mistakes(document) == [f"$.deployments[0]{place}"]


@pytest.mark.parametrize(("field", "value"), [("optim", "adamw"), ("learning_rate", -1.0), ("seed", "42")])
def test_a_value_that_a_field_does_not_take_does_not_fit(document: Any, field: str, value: Any) -> None:
    document["deployments"][0]["parameters"]["recipe"]["training"][field] = value
    assert mistakes(document) == [f"$.deployments[0].parameters.recipe.training.{field}"]


def test_every_field_of_the_recipe_has_its_description_for_the_editor() -> None:
    def described(field: dict[str, Any]) -> bool:
        target = SCHEMA["$defs"].get(field.get("$ref", "").rpartition("/")[2], {})
        return bool(field.get("description") or target.get("description"))

    sections = ["Recipe", *Recipe.model_json_schema()["$defs"]]
    fields = {(name, field): one for name in sections for field, one in SCHEMA["$defs"][name]["properties"].items()}
    assert [place for place, field in fields.items() if not described(field)] == []
