"""`finetune notify` and what the server does of it: real automations, a real block, a receiver on loopback."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.blocks.system import Secret
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.events import emit_event
from prefect.runtime import flow_run
from prefect.states import Completed, Running

from flows.cli.main import main
from flows.reports.result import build_verdict_event
from tasks.prefect import automations, events
from tests.flows.small import write_project
from tests.waiting import wait_until
from training.recipe import load

pytestmark = pytest.mark.slow

Post = dict[str, str]


@pytest.fixture
def receiver() -> Iterator[tuple[str, list[Post]]]:
    """An address on loopback, and what was posted to it."""
    posts: list[Post] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/secret-path", posts
    server.shutdown()


@pytest.fixture(autouse=True)
def of_the_session(server: dict[str, str], home: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The tests' server, with the automations that it had before."""
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    yield
    with get_client(sync_client=True) as client:
        for one in client.read_automations():
            if one.name.startswith("finetune: "):
                client.delete_automation(one.id)


def test_a_verdict_and_a_failure_are_posted_each_as_one_readable_message(
    tmp_path: Path, server: dict[str, str], receiver: tuple[str, list[Post]], capsys: pytest.CaptureFixture[str]
) -> None:
    address, posts = receiver
    called = "custom-webhook/team"
    message = {"subject": "{{subject}}", "body": "{{body}}"}
    CustomWebhookNotificationBlock(name="team", url=address, json_data=message).save("team")
    assert main(["notify", called]) == 0
    assert capsys.readouterr().out.split() == ["failure", called, "verdict", called]
    recipe, score = load(write_project(tmp_path)), {"value": 0.9130, "low": 0.8941, "high": 0.9312}
    done: dict[str, Any] = {
        **{"metrics": {"validation": {"accuracy": score}}, "problems": [], "mlflow_run_id": "m", "flow_run_id": None},
        "verdict": {"decision": "promote", "reason": "it is better than sst2/2."},
        "model": {"registered": "small/3", "alias": "champion"},
    }

    @flow(name="finetune", flow_run_name="small · judged")
    def judges() -> None:
        run = str(flow_run.get_id())
        events.emit_verdict(recipe.name, build_verdict_event(recipe, {**done, "flow_run_id": run}, "small/2"))

    @flow(name="retrain", flow_run_name="small · broken")
    def fails() -> None:
        problem = {"kind": "data", "where": "data.path", "message": "there is no such file."}
        failed = {**done, "verdict": None, "model": None, "metrics": {}, "problems": [problem]}
        events.emit_verdict(recipe.name, build_verdict_event(recipe, failed, None))
        raise ValueError("data.path: there is no such file.")

    @flow(name="drift", flow_run_name="drift of small")
    def looks() -> None:
        raise ValueError("inputs: there is no such file.")

    judged = judges(return_state=True).state_details.flow_run_id
    broken = fails(return_state=True).state_details.flow_run_id
    wait_until(lambda: len(posts) >= 2)
    by_subject = {post["subject"]: post["body"].splitlines() for post in posts}
    verdict = by_subject["small: promoted, accuracy 0.9130 (0.894 to 0.931) on validation"]
    failure = by_subject["small · broken: failed"]
    assert verdict[:3] == ["it is better than sst2/2.", "Version: small/3", "Champion before: small/2"]
    link = f"Run: {server['PREFECT_API_URL'].removesuffix('/api')}/runs/flow-run"
    assert verdict[3] == f"{link}/{judged}"
    assert "data.path: there is no such file." in failure[0] and failure[1] == f"{link}/{broken}"
    assert failure[2:] == [f"Continue it: finetune resume {broken}"]
    drifted = looks(return_state=True).state_details.flow_run_id
    wait_until(lambda: len(posts) >= 3)
    assert posts[2]["body"].splitlines()[1:] == [f"{link}/{drifted}"]  # it is started again, and not resumed
    assert len(posts) == 3 and "secret-path" not in json.dumps(posts)


def test_notify_keeps_the_last_settings_and_leaves_a_disabled_automation_disabled(
    capsys: pytest.CaptureFixture[str],
) -> None:
    CustomWebhookNotificationBlock(name="a", url="http://127.0.0.1:9").save("one-team")
    Secret(value="hidden").save("no-notification")
    block = "custom-webhook/one-team"

    def printed(*arguments: str, code: int = 0) -> list[str]:
        assert main(["notify", *arguments]) == code
        output = capsys.readouterr()
        return (output.err if code else output.out).splitlines()

    assert printed() == ["There are no notifications: name a block."]
    assert printed(block, "--on", "failure") == [f"failure  {block}"]
    with get_client(sync_client=True) as client:
        made = {one.name: one for one in client.read_automations() if one.name.startswith("finetune: ")}
        assert made.keys() == {automations.DEAD, f"finetune: failure to {block}"}
        for one in made.values():
            client.pause_automation(one.id)
    assert printed(block) == [f"failure  {block}  disabled", f"verdict  {block}"]
    with get_client(sync_client=True) as client:
        again = {one.name: (one.id, one.enabled) for one in client.read_automations() if one.name in made}
    assert again == {name: (one.id, False) for name, one in made.items()}
    assert printed("--on", "verdict", block) == [f"verdict  {block}"]
    (wrong,) = printed("custom-webhook/one-taem", code=2)
    assert f"choose from {block}" in wrong and f"Did you mean '{block}'?" in wrong and "prefect block create" in wrong
    assert "is not a block that sends notifications" in printed("secret/no-notification", code=2)[0]
    assert "no notification is sent through 'slack-webhook/x'" in printed("slack-webhook/x", "--remove", code=2)[0]
    assert printed("--on", "failure", "--remove") == ["There was no notification."]
    assert printed("--remove") == [f"removed: verdict to {block}"]
    assert printed() == ["There are no notifications: name a block."]


def test_an_automation_with_the_name_of_an_earlier_version_is_renamed_and_stays_disabled() -> None:
    with get_client(sync_client=True) as client:
        with pytest.MonkeyPatch.context() as earlier:
            earlier.setattr(automations, "DEAD", automations.DEAD_BEFORE)
            automations.create_crash_automation(client)
        (before,) = client.read_automations_by_name(automations.DEAD_BEFORE)
        client.pause_automation(before.id)
        automations.create_crash_automation(client)
        (renamed,) = client.read_automations_by_name(automations.DEAD)
        assert (renamed.id, renamed.enabled) == (before.id, False)
        assert client.read_automations_by_name(automations.DEAD_BEFORE) == []


@flow(name="finetune")
def ours() -> None:
    """Never run."""


def begun(client: SyncPrefectClient) -> FlowRun:
    return client.create_flow_run(ours, state=Running())


def test_a_run_without_heartbeats_is_crashed_and_one_with_heartbeats_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automations, "SILENT_S", 10.0)
    monkeypatch.setattr(events, "ALIVE_EVERY_S", 1.0)
    with get_client(sync_client=True) as client:
        automations.create_crash_automation(client)
        silent, lively, ended = begun(client), begun(client), begun(client)
        with events.emit_heartbeats(str(lively.id)):
            with events.emit_heartbeats(str(silent.id)), events.emit_heartbeats(str(ended.id)):
                time.sleep(2)
            # Prefect's own, which the process had sent just before it died.
            emit_event("prefect.flow-run.heartbeat", {events.RESOURCE: f"prefect.flow-run.{silent.id}"})
            client.set_flow_run_state(ended.id, Completed(), force=True)
            wait_until(lambda: client.read_flow_run(silent.id).state_type == StateType.CRASHED)
            state = client.read_flow_run(silent.id).state
            assert state is not None and "Continue it with `finetune resume`" in str(state.message)
            # One that was taken for dead while the server was away, and goes on, may still say how it ended.
            client.set_flow_run_state(silent.id, Completed())
            assert client.read_flow_run(silent.id).state_type == StateType.COMPLETED
            assert client.read_flow_run(lively.id).state_type == StateType.RUNNING
            assert client.read_flow_run(ended.id).state_type == StateType.COMPLETED
