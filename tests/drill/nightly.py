"""Nights of a model in production: predictions over a folder that grows, a shift, a retraining, another champion.

Each night is a run of the deployment `batch-predict/small` by the worker of `finetune up`. Its event of a shift starts
`retrain/small`, whose training data have got labelled rows of the new kind meanwhile.
"""

from __future__ import annotations

import csv
import random
import time
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import yaml

from flows.reports.tables import align
from tests.drill.promises import require
from tests.flows.small import BAD, FILLER, GOOD, write_project
from tests.machine import Machine, wait_until

END_WITHIN_S = 900.0
DAY_ROWS = 200
HEAD = ["night", "rows", "predicted now", "compared", "drift", "version of all rows", "the event starts", "champion"]
OTHER_GOOD, OTHER_BAD = ["gut", "prima", "toll", "schön", "klasse"], ["schlecht", "mies", "öde", "lahm", "fad"]
OTHER_FILLER = ["der", "Film", "war", "sehr", "und", "ein", "Stück", "Spieler", "Szene", "mit", "etwas", "von", "es"]
KINDS = [(FILLER, {"pos": GOOD, "neg": BAD}), (OTHER_FILLER, {"pos": OTHER_GOOD, "neg": OTHER_BAD})]


def write_texts(path: Path, rows: int, seed: int, mixed: bool) -> None:
    """A CSV file of texts with ids and labels; if mixed, half of them are of another language."""
    draw = random.Random(seed)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["id", "text", "label"])
        for number in range(rows):
            filler, words = KINDS[number % 2 if mixed else 0]
            label = draw.choice(["pos", "neg"])
            text = [draw.choice(filler) for _ in range(draw.randint(3, 16))] + [draw.choice(words[label])]
            draw.shuffle(text)
            table.writerow([f"{path.stem}-{number}", " ".join(text), label])


class Nights:
    """A machine with the three deployments of a model."""

    def __init__(self, machine: Machine) -> None:
        self.table = [HEAD]
        self._machine = machine
        self._folder, self._incoming = machine.home.parent / "labelled", machine.home.parent / "incoming"
        self._out = machine.home.parent / "predicted"
        self._incoming.mkdir()
        file = write_project(self._folder)
        self.label(mixed=False)
        (entry,) = yaml.safe_load(file.read_text())["deployments"]
        recipe = entry["parameters"]["recipe"]
        recipe["release"] |= {"gate": {"minimum": {"accuracy": 0.5}, "control": "all"}, "drift": {"min_rows": 100}}
        pool, one = {"name": "finetune"}, {"limit": 1, "collision_strategy": "CANCEL_NEW"}
        trigger = {
            "type": "event",
            "expect": ["finetune.drift"],
            "match": {"prefect.resource.id": "finetune.model.small", "finetune.drift": "drifted"},
            "parameters": {"reason": "{{ event.payload.summary }}"},
        }
        places = {"input": [str(self._incoming)], "output": str(self._out)}
        batch = {"model": "small", **places, "keep": ["id", "text"], "id": "id"}
        self._deployments = [
            {**entry, "work_pool": pool},
            {
                **entry,
                "entrypoint": "flows.retrain:retrain",
                "work_pool": pool,
                "concurrency_limit": one,
                "triggers": [trigger],
            },
            {
                "name": "small",
                "entrypoint": "flows.batch_predict:batch_predict",
                "work_pool": pool,
                "concurrency_limit": one,
                "parameters": {"prediction": batch},
            },
        ]

    def label(self, mixed: bool) -> None:
        """Labelled rows, among them those of the new kind if mixed."""
        write_texts(self._folder / "train.csv", 480 if mixed else 240, seed=1, mixed=mixed)
        write_texts(self._folder / "validation.csv", 160, seed=2, mixed=mixed)

    def deploy(self) -> None:
        """Deploys the three, and trains the first champion."""
        file = self._folder / "small.yaml"
        file.write_text(yaml.safe_dump({"deployments": self._deployments}))
        deployed = self._machine.finetune("deploy", str(file))
        require(deployed.returncode == 0, deployed.stdout + deployed.stderr)
        self._run("finetune/small")
        require(self.champion() == "1", "the first model is no champion")

    def night(self, day: int, mixed: bool, new: int, verdict: str, version: str, event_starts: str = "nothing") -> None:
        """A file arrives if there is a day, and the night's run predicts the folder. `new` is the number of rows that
        it predicts; `event_starts` is the name of the state in which a run ends that the event has started."""
        number = len(self.table)
        if day:
            write_texts(self._incoming / f"day-{day}.csv", DAY_ROWS, seed=10 + day, mixed=mixed)
        before = {run["id"] for run in self._started_by_events()}
        message = self._run("batch-predict/small")
        rows = ds.dataset(str(self._out), ignore_prefixes=["_", "."]).to_table().to_pylist()
        expected = sum(len(list(csv.DictReader(file.open()))) for file in self._incoming.glob("*.csv"))
        require(len({row["id"] for row in rows}) == len(rows) == expected, f"{len(rows)} rows instead of {expected}")
        versions = {row["version"] for row in rows}
        require(versions == {version}, f"night {number}: the rows are of versions {versions}, not {version}")
        require(f" {new:,} of them now" in message, f"night {number}: {message}, not {new} new rows")
        require(message.endswith(f"(drift: {verdict})"), f"night {number}: {message}, not {verdict}")
        ended = "nothing"
        if event_starts != "nothing":
            wait_until(lambda: self._ended(before), END_WITHIN_S)
            (run,) = self._ended(before)
            ended = run["state"]["name"]
            require(ended == event_starts, f"night {number}: retrain/small {ended}: {run['state']['message']}")
            require("drifted in" in run["parameters"]["reason"], f"its reason is {run['parameters']['reason']!r}")
        else:
            time.sleep(5.0)  # long enough for the server to start a run
            require(len(self._started_by_events()) == len(before), f"night {number}: an event has started a run")
        compared = DAY_ROWS if day else 0
        found = [str(number), f"{expected:,}", f"{new:,}", f"{compared}", verdict, version, ended, self.champion()]
        self.table.append(found)
        print(align(self.table)[-1], flush=True)

    def champion(self) -> str:
        """The number of the champion."""
        return str(self._machine.mlflow().get_model_version_by_alias("small", "champion").version)

    def looks(self) -> list[tuple[str, int, int, str]]:
        """Of each event of a comparison, in order: the version, the number of the look, its rows, the verdict."""
        events = sorted(self._machine.events("finetune.drift"), key=lambda event: str(event["occurred"]))
        payloads = [event["payload"] for event in events]
        return [(one["version"], one["look"], one["rows"]["new"], one["verdict"]) for one in payloads]

    def _run(self, deployment: str) -> str:
        """Has the worker run a deployment to its end. Returns the message of its state."""
        run = self._machine.start(deployment, {}) if deployment == "finetune/small" else self._start(deployment)
        wait_until(lambda: self._machine.state_of(run) in ("Completed", "Failed", "Crashed"), END_WITHIN_S)
        state = self._machine.api(f"flow_runs/{run}")["state"]
        require(state["name"] == "Completed", f"{deployment}: {state['name']}: {state['message']}")
        return str(state["message"])

    def _start(self, deployment: str) -> str:
        flow, name = deployment.split("/")
        found = self._machine.api(f"deployments/name/{flow}/{name}")
        return str(self._machine.api(f"deployments/{found['id']}/create_flow_run", state={"type": "SCHEDULED"})["id"])

    def _started_by_events(self) -> list[dict[str, Any]]:
        """The flow runs that automations have started."""
        found = self._machine.api("flow_runs/filter", sort="EXPECTED_START_TIME_ASC")
        return [run for run in found if run["created_by"] and run["created_by"]["type"] == "AUTOMATION"]

    def _ended(self, before: set[str]) -> list[dict[str, Any]]:
        later = [run for run in self._started_by_events() if run["id"] not in before]
        return [run for run in later if run["state"]["type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")]


def nightly(machine: Machine) -> None:
    """Seven nights. Raises Broken where one is not as promised."""
    machine.up()
    nights = Nights(machine)
    nights.deploy()
    nights.night(1, mixed=False, new=DAY_ROWS, verdict="steady", version="1")
    nights.night(2, mixed=False, new=DAY_ROWS, verdict="steady", version="1")
    # The shift, before anybody has labelled rows of it: there is nothing new to learn from.
    nights.night(3, mixed=True, new=DAY_ROWS, verdict="drifted", version="1", event_starts="Unchanged")
    nights.label(mixed=True)
    nights.night(4, mixed=True, new=DAY_ROWS, verdict="drifted", version="1", event_starts="Completed")
    require(nights.champion() == "2", "the model that has learnt from rows of the new kind is no champion")
    # The new champion predicts all rows again, and is compared with those of the night.
    nights.night(5, mixed=True, new=5 * DAY_ROWS, verdict="steady", version="2")
    nights.night(6, mixed=True, new=DAY_ROWS, verdict="steady", version="2")
    nights.night(0, mixed=True, new=0, verdict="undecided", version="2")
    found = nights.looks()
    expected = [
        ("small/1", 1, DAY_ROWS, "steady"),
        ("small/1", 2, DAY_ROWS, "steady"),
        ("small/1", 3, DAY_ROWS, "drifted"),
        ("small/1", 4, DAY_ROWS, "drifted"),
        ("small/2", 1, DAY_ROWS, "steady"),
        ("small/2", 2, DAY_ROWS, "steady"),
    ]
    require(found == expected, f"the looks are {found}")
    print(*align(nights.table), sep="\n")
