"""`finetune serve`: a real server, the real client of OpenAI's API, and models whose answers are known."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from flows.cli.main import main
from tasks.serving import response_bodies
from tasks.serving.server import ServeOptions, _listen
from tasks.tracking.connection import MODEL_TAG, connect
from tests.flows.forked import code_with_forked_programs, finetune
from tests.flows.served import ROOT, Server, add_version, register, store_model
from tests.flows.small import FinishedRun, environment
from tests.fork_server import NEW_PYTHON
from tests.processes import argv
from tests.training.counting import write_assistant, write_classifier
from tests.waiting import wait_until
from training.jobs.processes import descendants

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "count", "parameters": {"type": "object", "properties": {}}}}
]


def user(text: str) -> Any:
    return {"role": "user", "content": text}


@pytest.fixture(scope="module")
def counter_home(tmp_path_factory: pytest.TempPathFactory, fresh_database: Path) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("counter")
    home = folder / "home"
    home.mkdir(mode=0o700)
    (home / "mlflow.db").write_bytes(fresh_database.read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FINETUNE_HOME", str(home))
        register(write_assistant(folder / "model"), max_new_tokens=3)
        yield home


@pytest.fixture(scope="module")
def counter(counter_home: Path) -> Iterator[Server]:
    with Server(counter_home, "counter") as server:
        yield server


@pytest.fixture(scope="module")
def api(counter: Server) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{counter.url}/v1",
        api_key=counter.token,
        max_retries=0,
        http_client=httpx.Client(trust_env=False),
    )


# Rows


def test_rows_have_the_predictions_of_finetune_predict_and_an_unusable_row_its_error(
    finished: FinishedRun, server: dict[str, str], tmp_path: Path
) -> None:
    texts = ["the film was superb", "a dull and grim plot", "fine"]
    file, out, record = tmp_path / "rows.jsonl", tmp_path / "out.jsonl", tmp_path / "recorded"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = ["--input", str(file), "--output", str(out), "--no-drift"]
    run = finetune(finished.home, "predict", "small", *words, **server)
    assert run.returncode == 0, run.stderr
    expected = [json.loads(line) for line in out.read_text().splitlines()]
    rows: list[Any] = [{"text": text} for text in texts] + [{"text": " "}, {"text": 4}]
    with Server(finished.home, "small", "--record", str(record)) as served:
        answer = served.client.post("/predict", json={"rows": rows}).json()
        wrong = served.client.post("/predict", json={"rows": [{"txt": "fine"}]})
    assert answer["model"] == "small/1"
    for given, stored in zip(answer["predictions"][:3], expected, strict=True):
        assert given["label"] == stored["label"]
        assert given["probability"] == pytest.approx(stored["probability"], abs=1e-5)
    assert answer["predictions"][3:] == [
        {"error": "has no text in column 'text'"},
        {"error": "holds int in column 'text' where a text belongs: 4"},
    ]
    assert wrong.status_code == 400 and "has no column 'text': it has txt" in wrong.json()["error"]["message"]
    recorded = [json.loads(line) for file in record.iterdir() for line in file.read_text().splitlines()]
    assert [row["text"] for row in recorded] == texts
    assert all(row["served_by"] == "small/1" and row["prediction"]["label"] for row in recorded)


@pytest.mark.slow
def test_recorded_rows_are_compared_by_drift_and_with_labels_evaluated(
    finished: FinishedRun, server: dict[str, str], tmp_path: Path
) -> None:
    home, record, out = (
        shutil.copytree(finished.home, tmp_path / "home", symlinks=True),
        tmp_path / "r",
        tmp_path / "out",
    )
    rows = [*csv.DictReader((finished.file.parent / "validation.csv").open(newline=""))]
    with Server(home, "small", "--record", str(record)) as served:
        asked = [{"text": row["text"]} for row in rows]
        assert served.client.post("/predict", json={"rows": asked}).status_code == 200
    drift = finetune(home, "drift", "small", "--input", str(record), "--json", str(out), **server)
    assert drift.returncode == 0, drift.stdout + drift.stderr
    assert json.loads(out.read_text())["drift"]["rows"] == {"reference": 60, "new": len(rows)}
    labels = {row["text"]: row["label"] for row in rows}
    for file in record.iterdir():
        recorded = [json.loads(line) for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps({**row, "label": labels[row["text"]]}) + "\n" for row in recorded))
    evaluated = finetune(home, "evaluate", "small", "--input", str(record), "--json", str(out), **server)
    assert evaluated.returncode == 0, evaluated.stdout + evaluated.stderr
    found = json.loads(out.read_text())["evaluation"]
    expected = finished.result["metrics"]["validation"]["accuracy"]["value"]
    assert found["rows"] == len(rows) and found["metrics"]["accuracy"]["value"] == pytest.approx(expected)


# OpenAI's API, by its client


def test_an_answer_has_the_form_and_the_counts_of_openais_api(api: openai.OpenAI) -> None:
    assert [model.id for model in api.models.list()] == ["counter"]
    answer = api.chat.completions.create(model="counter", messages=[user("eight")])
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason, answer.model) == ("nine", "stop", "counter/1")
    assert answer.usage and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (1, 2)
    short = api.chat.completions.create(model="counter", messages=[user("one")], max_tokens=2, temperature=0)
    assert (short.choices[0].message.content, short.choices[0].finish_reason) == ("two three", "length")
    cut = api.chat.completions.create(model="counter", messages=[user("one")], max_tokens=9, stop=["five", "six"])
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("two three four ", "stop")


def test_status_lists_a_server_until_it_ends(counter_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Server(counter_home, "counter@champion") as server:
        assert main(["status"]) == 1
        lines = capsys.readouterr().out.splitlines()
        assert f"serve counter@champion  {server.url}  answers" in lines
        assert lines[-1] == "Nothing of `finetune up` runs over this home."
    assert main(["status"]) == 1
    assert server.url not in capsys.readouterr().out


def test_status_of_a_recipe_prints_no_variables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "counter", "--env"]) == 2
    assert capsys.readouterr().err == "NAME: is for runs of a recipe: leave it out, or --env and --password.\n"


def test_the_printed_command_asks_the_model(counter: Server) -> None:
    command = counter.printed.partition("Ask it:")[2].strip()
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout
    assert json.loads(answer).get("model") == "counter/1", command + answer


def test_a_stream_has_the_words_as_they_come_and_the_counts_at_its_end(api: openai.OpenAI) -> None:
    parts = [
        *api.chat.completions.create(
            model="counter", messages=[user("five")], max_tokens=9, stream=True, stream_options={"include_usage": True}
        )
    ]
    words = [part.choices[0].delta.content for part in parts if part.choices]
    assert words == ["", "six ", "seven ", "eight ", "nine", None]
    assert parts[-2].choices[0].finish_reason == "stop"
    assert parts[-1].usage and parts[-1].usage.completion_tokens == 5


def test_a_stream_holds_back_what_may_be_the_beginning_of_a_stop(api: openai.OpenAI) -> None:
    parts = api.chat.completions.create(
        model="counter", messages=[user("five")], max_tokens=9, stream=True, stop="eight nine"
    )
    assert "".join(part.choices[0].delta.content or "" for part in parts) == "six seven "


def test_texts_are_continued(api: openai.OpenAI) -> None:
    answer = api.completions.create(model="counter", prompt=["one two", "seven"])
    assert [choice.text for choice in answer.choices] == ["three four five", "eight nine"]
    assert [choice.finish_reason for choice in answer.choices] == ["length", "stop"]
    streamed = api.completions.create(model="counter", prompt="seven", stream=True)
    assert "".join(part.choices[0].text for part in streamed) == "eight nine"


def test_an_answer_can_call_a_tool_whole_and_in_a_stream(api: openai.OpenAI) -> None:
    whole = api.chat.completions.create(model="counter", messages=[user("tool")], tools=TOOLS)
    (call,) = whole.choices[0].message.tool_calls or ()
    assert call.type == "function" and (call.function.name, json.loads(call.function.arguments)) == ("count", {"to": 3})
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (None, "tool_calls")
    parts = [*api.chat.completions.create(model="counter", messages=[user("tool")], tools=TOOLS, stream=True)]
    assert not any(part.choices[0].delta.content for part in parts)
    (streamed,) = [part.choices[0].delta.tool_calls for part in parts if part.choices[0].delta.tool_calls]
    assert streamed and streamed[0].function and streamed[0].function.name == "count"
    assert parts[-1].choices[0].finish_reason == "tool_calls"
    back = [user("tool"), whole.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "seven"}]
    after = api.chat.completions.create(model="counter", messages=back, tools=TOOLS)
    assert after.choices[0].message.content == "eight nine"


def test_a_seed_and_a_temperature_give_the_same_answer_twice(api: openai.OpenAI) -> None:
    def ask() -> str | None:
        answer = api.chat.completions.create(
            model="counter", messages=[user("one")], temperature=1.9, seed=7, max_tokens=9
        )
        return answer.choices[0].message.content

    assert ask() == ask()


def test_a_request_that_cannot_be_answered_is_refused_by_its_field(api: openai.OpenAI) -> None:
    def refused(**fields: Any) -> str:
        request: dict[str, Any] = {"model": "counter", "messages": [user("one")]} | fields
        with pytest.raises(openai.APIStatusError) as caught:
            api.chat.completions.create(**request)
        return f"{caught.value.status_code} {caught.value.param} {caught.value.code} {caught.value.message}"

    assert refused(model="gpt-4").startswith("404 model model_not_found")
    assert "n: 2 has no effect on this model" in refused(n=2)
    assert "response_format" in refused(response_format={"type": "json_object"})
    assert "400 messages" in refused(messages=[]) and "it has no message" in refused(messages=[])
    assert "the last message is the assistant's" in refused(messages=[{"role": "assistant", "content": "one"}])
    assert refused(messages=[user("one " * 65)]).startswith("400 messages context_length_exceeded")
    assert "temperature" in refused(temperature=3)


# The guard


def test_a_request_needs_the_token_a_name_of_this_machine_and_a_body_that_fits(counter: Server) -> None:
    def status(path: str = "/predict", **options: Any) -> int:
        return httpx.post(counter.url + path, trust_env=False, **options).status_code

    token = {"Authorization": f"Bearer {counter.token}"}
    assert status(json={}) == 401
    assert status(json={}, headers={"Authorization": "Bearer no"}) == 401
    assert status(json={}, headers=token | {"Host": "example.com"}) == 403
    assert status(json={}, headers=token | {"Origin": "https://example.com"}) == 403
    assert status(content=b"x" * (16 * 2**20 + 1), headers=token) == 413
    assert status(json={}, headers=token) == 400
    assert httpx.get(counter.url + "/health", trust_env=False).json()["status"] == "ok"
    assert httpx.get(counter.url + "/metrics", trust_env=False).status_code == 401
    page = httpx.get(counter.url, trust_env=False).text
    assert "<code>POST /v1/chat/completions</code>" in page and counter.token not in page
    figures = counter.client.get("/metrics").text
    assert 'finetune_version{model="counter",version="1"} 1.0' in figures
    for refused in (400, 401, 403, 413):
        assert f'finetune_requests_total{{path="/predict",status="{refused}"}}' in figures


def test_the_description_has_the_forms_of_answers_and_the_paths_that_need_the_token(counter: Server) -> None:
    described = httpx.get(counter.url + "/openapi.json", trust_env=False).json()
    paths = {
        "/predict": "PredictionsBody",
        "/v1/models": "ModelsBody",
        "/v1/chat/completions": "ChatCompletion",
        "/v1/completions": "Completion",
        "/health": "HealthBody",
    }
    for path, form in paths.items():
        (operation,) = described["paths"][path].values()
        schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
        assert schema["$ref"].endswith(f"/{form}"), path
        assert operation["security"] == ([] if path == "/health" else [{"token": []}])
        assert "422" not in operation["responses"]
    forms = described["components"]["schemas"]
    answers = {
        "PredictionsBody": counter.client.post("/predict", json={"rows": [{"talk": "one"}]}).json(),
        "ModelsBody": counter.client.get("/v1/models").json(),
        "HealthBody": counter.client.get("/health").json(),
        "Completion": counter.client.post("/v1/completions", json={"model": "counter", "prompt": "one"}).json(),
        "ChatCompletion": counter.client.post(
            "/v1/chat/completions", json={"model": "counter", "messages": [user("one")]}
        ).json(),
        "ErrorBody": counter.client.post("/v1/completions", json={}).json(),
    }
    for form, answer in answers.items():
        assert {*answer} == {*forms[form]["properties"]} == {*forms[form]["required"]}, form
        getattr(response_bodies, form).model_validate(answer)


# Clients that go away, promotions, deaths


def test_a_server_for_other_machines_leaves_localhost_to_no_other_user() -> None:
    options = ServeOptions("counter", host="0.0.0.0", port=0)
    with _listen(options) as listening, pytest.raises(OSError):
        socket.create_server(("::1", listening.getsockname()[1]), family=socket.AF_INET6).close()


def test_a_client_that_goes_away_ends_its_generation(counter: Server) -> None:
    body = json.dumps({"model": "counter", "messages": [user("on")], "max_tokens": 4000, "stream": True})
    for stream in ("true", "false"):
        with socket.create_connection(("127.0.0.1", httpx.URL(counter.url).port or 0)) as connection:
            sent = body.replace("true", stream).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {counter.token}\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(sent)}\r\n\r\n"
            connection.sendall(head.encode() + sent)
            wait_until(lambda: counter.client.get("/health").json()["waiting"] == 1)
        wait_until(lambda: counter.client.get("/health").json()["waiting"] == 0)
    answer = counter.client.post("/v1/completions", json={"model": "counter", "prompt": "eight"}, timeout=60)
    assert answer.json()["choices"][0]["text"] == "nine"


@pytest.mark.slow
def test_a_promotion_loses_no_request_and_a_version_that_does_not_load_changes_nothing(
    counter_home: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FINETUNE_HOME", str(counter_home))
    client = connect()
    digest = client.get_model_version("counter", "1").tags[MODEL_TAG]
    newer, broken = add_version(digest, max_new_tokens=1), add_version("0" * 64, max_new_tokens=1)
    with Server(counter_home, "counter") as server:
        stop, answers = threading.Event(), list[tuple[int, str, str]]()

        def ask() -> None:
            while not stop.is_set():
                found = server.client.post("/v1/completions", json={"model": "counter", "prompt": "one"})
                body = found.json()
                answers.append((found.status_code, body["model"], body["choices"][0]["text"]))

        with ThreadPoolExecutor(4) as threads:
            for _ in range(4):
                threads.submit(ask)
            try:
                client.set_registered_model_alias("counter", "champion", broken)
                server.says(f"Version {broken} is not loaded")
                server.says("Version 1 goes on answering")
                assert server.client.get("/health").json()["problem"]
                client.set_registered_model_alias("counter", "champion", newer)
                server.says(f"counter version {newer} answers, in place of version 1.")
                wait_until(lambda: answers[-1][1] == f"counter/{newer}")
            finally:
                client.set_registered_model_alias("counter", "champion", "1")
                stop.set()
        assert {answer for answer in answers} == {
            (200, "counter/1", "two three four"),
            (200, f"counter/{newer}", "two"),
        }
        server.says(f"counter version 1 answers, in place of version {newer}.")


@pytest.mark.slow
def test_a_version_with_a_chat_template_answers_conversations_once_it_is_promoted(
    home: Path, fresh_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = tmp_path / "home"
    texts.mkdir(mode=0o700)
    (texts / "mlflow.db").write_bytes(fresh_database.read_bytes())
    monkeypatch.setenv("FINETUNE_HOME", str(texts))
    register(write_assistant(tmp_path / "texts", template=None), max_new_tokens=3)
    key = "f" * 40
    newer = add_version(store_model(write_assistant(tmp_path / "talks"), key), key=key, max_new_tokens=3)
    with Server(texts, "counter") as server:

        def ask() -> Any:
            return server.client.post("/v1/chat/completions", json={"model": "counter", "messages": [user("eight")]})

        assert ask().status_code == 400 and "counter has no chat template" in ask().json()["error"]["message"]
        connect().set_registered_model_alias("counter", "champion", newer)
        server.says(f"counter version {newer} answers")
        assert ask().json()["choices"][0]["message"]["content"] == "nine"


@pytest.mark.slow
def test_a_program_that_is_killed_is_started_again_and_a_server_that_is_stopped_answers_first(
    counter_home: Path, tmp_path: Path
) -> None:
    before = {*(counter_home / "jobs").glob("serve-*")}
    with Server(counter_home, "counter/1") as server:
        below = descendants(server.process.pid)
        (program,) = [pid for pid in below if not descendants(pid)]
        os.kill(program, signal.SIGKILL)
        server.says("The program of version 1 has ended. The program was killed")
        answer = server.client.post("/v1/completions", json={"model": "counter", "prompt": "eight"})
        assert answer.json()["choices"][0]["text"] == "nine"

        def ask() -> str:
            body = {"model": "counter", "prompt": "on", "max_tokens": 400}
            return str(server.client.post("/v1/completions", json=body).json()["choices"][0]["text"])

        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(ask)
            wait_until(lambda: server.client.get("/health").json()["waiting"] == 1)
            below = descendants(server.process.pid)
            server.process.terminate()
            assert waiting.result() == " ".join(["on"] * 400)
        assert server.process.wait(60) == 0
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below))
        assert {*(counter_home / "jobs").glob("serve-*")} == before


@pytest.mark.slow
def test_a_version_that_fails_on_an_answered_row_does_not_take_over(
    home: Path, fresh_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "home"
    rows.mkdir(mode=0o700)
    (rows / "mlflow.db").write_bytes(fresh_database.read_bytes())
    monkeypatch.setenv("FINETUNE_HOME", str(rows))
    kind = "sequence-classification"
    register(write_classifier(tmp_path / "good", shift=1), kind)
    key = "f" * 40
    failing = add_version(store_model(write_classifier(tmp_path / "failing", 1, positions=2), key), kind, key)
    with Server(rows, "counter") as server:

        def ask() -> Any:
            return server.client.post("/predict", json={"rows": [{"talk": "one two three"}]}).json()

        assert ask()["predictions"][0]["label"] == "four"
        connect().set_registered_model_alias("counter", "champion", failing)
        server.says(f"Version {failing} is not loaded: It fails on a request that was answered before")
        assert ask()["model"] == "counter/1"


@pytest.mark.slow
def test_a_server_that_is_stopped_while_it_loads_ends_without_a_traceback(counter_home: Path) -> None:
    code = code_with_forked_programs("from flows.cli.main import main; sys.exit(main())")
    argv = [NEW_PYTHON, "-c", code, "serve", "counter", "--port", "0"]
    before = {*(counter_home / "jobs").glob("serve-*")}
    server = subprocess.Popen(argv, cwd=ROOT, env=environment(counter_home), stderr=subprocess.PIPE, text=True)
    assert server.stderr
    printed = server.stderr.readline()
    while "loading counter version 1" not in printed:
        printed = server.stderr.readline()
    below = descendants(server.pid)
    server.terminate()
    assert server.wait(30) == 0 and "Traceback" not in server.stderr.read()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below))
    assert {*(counter_home / "jobs").glob("serve-*")} == before


@pytest.mark.slow
def test_the_job_of_a_killed_server_goes_at_the_next_start_and_by_finetune_store(counter_home: Path) -> None:
    before = {*(counter_home / "jobs").glob("serve-*")}

    def killed() -> set[Path]:
        with Server(counter_home, "counter/1") as server:
            below = descendants(server.process.pid)
            server.process.kill()
            server.process.wait()
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below))
        return {*(counter_home / "jobs").glob("serve-*")}

    (first,) = killed() - before
    (second,) = killed() - before
    assert second != first
    removed = finetune(counter_home, "store", "--remove", "--yes")
    assert removed.returncode == 0 and not second.exists(), removed.stdout + removed.stderr


# Mistakes


def test_mistakes_are_one_message(counter_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "counter", "--port", str(port)]) == 2
    assert f"--port: 127.0.0.1:{port} cannot be used" in capsys.readouterr().err
    assert main(["serve", "contour"]) == 2
    assert "no model 'contour' is registered" in capsys.readouterr().err
    assert main(["serve", "counter", "--batch-size", "0", "--record-share", "2"]) == 2
    printed = capsys.readouterr().err
    assert "--batch-size: 0 is given" in printed and "--record-share: 2 is given" in printed


@pytest.mark.parametrize("engine", ["--format gguf", "--engine vllm"])
def test_options_that_another_engine_would_ignore_are_refused(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["serve", "counter", *engine.split(), "--batch-size", "8", "--record", str(tmp_path)]
    assert main([*given, "--vllm", "--seed 1"]) == 2
    printed = capsys.readouterr().err
    for option in ("--batch-size", "--record"):
        assert f"{option}: is not possible with {engine.removesuffix(' gguf')}: leave one of them out." in printed
    assert ("--vllm: is for --engine vllm, not for --format" in printed) == (engine == "--format gguf")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "int8",
            "'int8' is for vLLM on a GPU: `finetune export helper@next int8 --out FOLDER`, then `vllm serve FOLDER`",
        ),
        (
            "onnx",
            "'onnx' is for programs of your own, by the file of `finetune export helper@next onnx --out FOLDER`:",
        ),
        ("guff", "'guff' is no format of exports that is served: choose from gguf, gguf-f16, "),
    ],
)
def test_a_format_that_is_not_served_is_one_message_with_what_is_and_the_way_for_the_others(
    name: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "helper@next", "--format", name]) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert f"--format: {expected}" in printed and "gguf-q4_k_m" in printed and printed.count("--format:") == 1


# vLLM, by a program in its place

VLLM = """\
#!{python}
import json, os, signal, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

options = dict(zip(sys.argv[3::2], sys.argv[4::2]))
folder, name = Path(sys.argv[2]), sys.argv[4]
assert (folder / "model.safetensors").exists() and (folder / "tokenizer.json").exists()
assert "--max-model-len" in sys.argv and "VLLM_API_KEY" not in " ".join(sys.argv)


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *words): pass

    def do_GET(self):
        self.answer(b"", "text/plain")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.headers["Authorization"] == "Bearer " + os.environ["VLLM_API_KEY"]
        if body.get("stream"):
            self.answer(b'data: {{"choices": []}}\\n\\ndata: [DONE]\\n\\n', "text/event-stream")
        else:
            self.answer(json.dumps({{"model": name, "asked": body}}).encode(), "application/json")

    def answer(self, body, kind):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # a program without a handler is killed, after a grace period
port = sys.argv[sys.argv.index("--port") + 1]
ThreadingHTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
"""


@pytest.mark.slow
def test_vllm_gets_the_exported_folder_and_the_requests_and_follows_the_alias(
    counter_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text(VLLM.format(python=sys.executable))
    program.chmod(0o755)
    newer = add_version(connect().get_model_version("counter", "1").tags[MODEL_TAG], max_new_tokens=1)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    with Server(counter_home, "counter", "--engine", "vllm", "--vllm", "--max-model-len 64", PATH=path) as server:
        body = {"model": "counter", "messages": [user("one")]}
        answer = server.client.post("/v1/chat/completions", json=body)
        assert answer.json() == {"model": "counter/1", "asked": body}
        assert "[DONE]" in server.client.post("/v1/completions", json=body | {"stream": True}).text
        assert server.client.post("/v1/load_lora_adapter", json={}).status_code == 404
        connect().set_registered_model_alias("counter", "champion", newer)
        try:
            server.says(f"counter version {newer} answers, in place of version 1.")
            started = {pid: argv(pid) for pid in descendants(server.process.pid)}
            (stand_in,) = [
                pid
                for pid, words in started.items()
                if str(program) in words and any(word.endswith(f"/{newer}") for word in words)
            ]
            os.kill(stand_in, signal.SIGKILL)
            server.says("has ended.")
            assert server.client.post("/v1/chat/completions", json=body).json()["model"] == f"counter/{newer}"
        finally:
            connect().set_registered_model_alias("counter", "champion", "1")
        below = descendants(server.process.pid)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below))
    assert [*(counter_home / "jobs").glob("vllm-*")] == []


# Requests that no client of OpenAI's sends


def test_a_request_that_cannot_be_passed_on_fails_alone_and_a_server_can_still_be_stopped(counter_home: Path) -> None:
    with Server(counter_home, "counter/1") as server:

        def ask(content: str) -> httpx.Response:
            body = f'{{"model": "counter", "messages": [{{"role": "user", "content": {content}}}]}}'
            return server.client.post("/v1/chat/completions", content=body)

        assert ask('"\\ud800"').status_code == 400
        assert ask("[" * 230 + "]" * 230).status_code == 400
        assert server.client.post("/v1/chat/completions", content="{").status_code == 400
        for body, message in {
            "{": "body: is no JSON: EOF",
            "[]": "body: Input should be an object",
            '{"rows": [1]}': "rows.0: Input should be an object",
            '{"rows": [], "row": 1}': "row: Extra inputs are not permitted",
        }.items():
            answer = server.client.post("/predict", content=body)
            assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text
        weird = {"model": "counter", "messages": [{"role": ["user"], "content": "one"}]}
        assert server.client.post("/v1/chat/completions", json=weird).status_code == 400
        parts = {"model": "counter", "messages": [user([{"type": "text", "text": "eight"}])]}
        answer = server.client.post("/v1/chat/completions", json=parts)
        assert answer.json()["choices"][0]["message"]["content"] == "nine"
        assert server.client.get("/nowhere").json()["error"]["message"] == "Not Found"
        server.process.terminate()
        assert server.process.wait(60) == 0
