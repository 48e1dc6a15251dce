"""The pages of Prefect and MLflow for a run, and the texts that each must show."""

from __future__ import annotations

import base64
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tasks import servers
from tests.ui.browser import Missing, Page, browser
from training.recipe import Lora, Recipe
from training.recipe.fields import Hub

NAME = "demo · bert from scratch · lr 5e-4"
WIDE, TALL = 1360, 1100  # pixels
# MLflow's sidebar for model training, and no assistant in front of the run.
VISITED = """
localStorage.setItem("mlflow.assistant.fab.autoOpenedOnFirstLoad_v1", "true");
localStorage.setItem("mlflow.workflowType_v1", '"machine_learning"');
"""

# The login form of Prefect's UI keeps the password here.
LOGGED_IN = 'localStorage.setItem("prefect-password", %s);'


def look(prefect: str, mlflow: str, pictures: Path) -> None:
    """Opens each page and saves its picture. Raises Missing if a page lacks a text.

    Args:
        prefect: the address of Prefect's UI, after a run of the demo.
        mlflow: the address of MLflow's UI.
        pictures: the folder for them.
    """
    pictures.mkdir(exist_ok=True)
    (run,) = _query(prefect, "flow_runs/filter", {"flow_runs": {"name": {"any_": [NAME]}}})
    chosen = {"artifacts": {"flow_run_id": {"any_": [run["id"]]}}}
    artifacts = {artifact["key"]: artifact for artifact in _query(prefect, "artifacts/filter", chosen)}
    with browser() as page:
        page.do(
            "Page.addScriptToEvaluateOnNewDocument", source=VISITED + LOGGED_IN % json.dumps(_login(servers.PREFECT))
        )
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
        # For MLflow's pages alone: it would replace the login that Prefect's pages send.
        page.do("Network.enable")
        page.do("Network.setExtraHTTPHeaders", headers={"Authorization": f"Basic {_login(servers.MLFLOW)}"})
        _tracked(page, links["finetune-mlflow-run"], f"{prefect}/runs/flow-run/{run['id']}", pictures)
        _registered(page, links["finetune-registered-version"], pictures)


def try_served_model(address: str, token: str) -> None:
    """Asks a served classifier through the form of its page. Raises Missing if the page shows no prediction."""
    with browser() as page:
        page.open(address, "Try it", "POST /predict")
        page.type("the token", token)
        page.click("Ask", '"predictions"', '"label"')


_TABLES = {
    "finetune-verdict": ("promote", "validation.accuracy", "≥ 0.75"),
    "finetune-figures": ("95 % interval", "accuracy", "recall"),
    "finetune-data-report": ("characters (min, median, max)", "validation", "sqlalchemy"),
}


def _form(page: Page, url: str, pictures: Path) -> None:
    """The form for a run: every field of the recipe with its text."""
    page.size(WIDE, TALL)
    page.open(url, "Parameters", "All that makes the model.")
    for section in (Hub, Lora):  # optional, and empty in the demo
        page.click(section.__name__, *_texts(section))
    page.wait_for(*_texts(Recipe))
    page.scroll_to("Num Train Epochs")
    page.picture(pictures / "prefect-form.webp")


def _run(page: Page, url: str, pictures: Path) -> None:
    """A flow run: its name, stages, log and artifacts."""
    page.open(url, NAME, "Completed", "12 Task runs")
    page.wait_for("fit: step ", "fit: ran, ", "gate: ran, 0 s  promote", "register: ran, ", "demo version 1: champion")
    page.click(
        "Artifacts", "finetune-verdict", "finetune-figures", "finetune-mlflow-run", "finetune-registered-version"
    )
    page.picture(pictures / "prefect-run.webp")


def _tracked(page: Page, url: str, flow_run: str, pictures: Path) -> None:
    """The MLflow run: its verdict, curves, load of the machine and files."""
    page.open(url, NAME, "Finished", "demo version 1", "promote: accuracy 0.", "validation (judged)")
    links = page.run("[...document.querySelectorAll('a')].map(one => one.href)")
    if flow_run not in links:
        raise Missing(f"{url} does not link {flow_run}")
    page.picture(pictures / "mlflow-run.webp")
    page.click("Model metrics")
    page.type("Search metric charts", "fit/(train|eval)_(loss|accuracy)")
    page.wait_for("fit/train_loss", "fit/eval_loss", "fit/eval_accuracy")
    page.picture(pictures / "mlflow-metrics.webp")
    page.click("System metrics", "cpu_utilization_percentage")
    page.click("Artifacts", "load_data", "fit", "score", "recipe.yaml")


def _registered(page: Page, url: str, pictures: Path) -> None:
    """The version in the registry: its description, figures and run."""
    page.open(url, "Version 1", NAME, "champion", "The label that it recognises worst is")
    page.picture(pictures / "mlflow-version.webp")


def _texts(section: type[BaseModel]) -> Iterator[str]:
    """The description of each field, and of the fields of nested sections."""
    for field in section.model_fields.values():
        yield str(field.description).replace("`", "")  # Markdown
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _texts(kind)


def _login(server: str) -> str:
    return base64.b64encode(f"{servers.USER}:{servers.ensure_password(server)}".encode()).decode()


def _query(prefect: str, path: str, body: dict[str, Any]) -> list[Any]:
    headers = {"Content-Type": "application/json", "Authorization": f"Basic {_login(servers.PREFECT)}"}
    request = urllib.request.Request(f"{prefect}/api/{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return list(json.load(response))
