"""The pages of Prefect and MLflow on which a team looks at its runs, and what each must say."""

from __future__ import annotations

import base64
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tasks.prefect import servers
from tests.ui.browser import Missing, Page, browser
from training.recipe import Recipe

NAME = "demo · bert from scratch · lr 5e-4"
WIDE, TALL = 1360, 1100  # pixels
# MLflow's sidebar of a person who trains models, and no assistant in front of the run.
VISITED = """
localStorage.setItem("mlflow.assistant.fab.autoOpenedOnFirstLoad_v1", "true");
localStorage.setItem("mlflow.workflowType_v1", '"machine_learning"');
"""

# Where the form of Prefect's UI keeps what a person types into it.
LOGGED_IN = 'localStorage.setItem("prefect-password", %s);'


def look(prefect: str, mlflow: str, pictures: Path) -> None:
    """Opens them all and keeps a picture of each. Raises Missing where one does not say what it should.

    Args:
        prefect: the address of its UI, where the demo has run.
        mlflow: that of MLflow's.
        pictures: the folder for them.
    """
    pictures.mkdir(exist_ok=True)
    (run,) = _ask(prefect, "flow_runs/filter", {"flow_runs": {"name": {"any_": [NAME]}}})
    chosen = {"artifacts": {"flow_run_id": {"any_": [run["id"]]}}}
    artifacts = {artifact["key"]: artifact for artifact in _ask(prefect, "artifacts/filter", chosen)}
    with browser() as page:
        page.do("Page.addScriptToEvaluateOnNewDocument", source=VISITED + LOGGED_IN % json.dumps(_login()))
        page.do("Network.enable")
        page.do("Network.setExtraHTTPHeaders", headers={"Authorization": f"Basic {_login()}"})  # for MLflow
        _form(page, f"{prefect}/deployments/deployment/{run['deployment_id']}/run", pictures)
        _run(page, f"{prefect}/runs/flow-run/{run['id']}", pictures)
        for key, texts in _TABLES.items():
            page.open(f"{prefect}/artifacts/artifact/{artifacts[key]['id']}", *texts)
            page.picture(pictures / f"{key}.webp")
        links = {
            key: artifact["data"].partition("](")[2][:-1]
            for key, artifact in artifacts.items()
            if artifact["type"] == "markdown"
        }
        _tracked(page, links["finetune-mlflow-run"], f"{prefect}/runs/flow-run/{run['id']}", pictures)
        _registered(page, links["finetune-registered-version"], pictures)


_TABLES = {
    "finetune-verdict": ("promote", "validation.accuracy", "≥ 0.75"),
    "finetune-figures": ("95 % interval", "accuracy", "recall"),
    "finetune-data-report": ("characters (min, median, max)", "validation", "sqlalchemy"),
}


def _form(page: Page, url: str, pictures: Path) -> None:
    """The form for a run: every field of the recipe with its text."""
    page.size(WIDE, TALL)
    page.open(url, "Parameters", "All that makes the model.")
    for section in ("Hub", "Lora"):  # optional, and empty in the demo
        page.click(section)
    page.says(*_texts(Recipe))
    page.scroll_to("Num Train Epochs")
    page.picture(pictures / "prefect-form.webp")


def _run(page: Page, url: str, pictures: Path) -> None:
    """A run: its name, its stages, its log, what it made."""
    page.open(url, NAME, "Completed", "12 Task runs")
    page.says("fit: step ", "fit: ran, ", "gate: ran, 0 s  promote", "register: ran, ", "demo version 1: champion")
    page.click("Artifacts")
    page.says("finetune-verdict", "finetune-figures", "finetune-mlflow-run", "finetune-registered-version")
    page.picture(pictures / "prefect-run.webp")


def _tracked(page: Page, url: str, flow_run: str, pictures: Path) -> None:
    """The MLflow run: what came of it, its curves, the load of the machine, its data."""
    page.open(url, NAME, "Finished", "demo version 1", "promote: accuracy 0.", "validation (judged)")
    links = page.run("[...document.querySelectorAll('a')].map(one => one.href)")
    if flow_run not in links:
        raise Missing(f"{url} does not link {flow_run}")
    page.picture(pictures / "mlflow-run.webp")
    page.click("Model metrics")
    page.type("Search metric charts", "fit/(train|eval)_(loss|accuracy)")
    page.says("fit/train_loss", "fit/eval_loss", "fit/eval_accuracy")
    page.picture(pictures / "mlflow-metrics.webp")
    page.click("System metrics")
    page.says("cpu_utilization_percentage")
    page.click("Artifacts")
    page.says("load_data", "fit", "score", "recipe.yaml")


def _registered(page: Page, url: str, pictures: Path) -> None:
    """The version in the registry: what it is, how good, and the run that made it."""
    page.open(url, "Version 1", NAME, "champion", "The label that it recognises worst is")
    page.picture(pictures / "mlflow-version.webp")


def _texts(section: type[BaseModel]) -> Iterator[str]:
    """Each field's description, those of the sections in it too."""
    for field in section.model_fields.values():
        yield str(field.description).replace("`", "")  # Markdown
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _texts(kind)


def _login() -> str:
    return base64.b64encode(servers.auth_string().encode()).decode()


def _ask(prefect: str, path: str, what: dict[str, Any]) -> list[Any]:
    headers = {"Content-Type": "application/json", "Authorization": f"Basic {_login()}"}
    request = urllib.request.Request(f"{prefect}/api/{path}", json.dumps(what).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return list(json.load(answer))
