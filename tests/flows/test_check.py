"""`finetune check`: its messages about rows, and the stages that it does not run."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import termios
from pathlib import Path

import pytest

from flows.cli.main import main
from tasks.home import MARK
from tests.flows.forked import code_with_forked_programs, finetune
from tests.flows.small import environment, write_project
from tests.fork_server import NEW_PYTHON
from tests.hub.server import Hub
from tests.made import NO_WEIGHTS
from training.programs.create_model import train_wordpiece

ROOT = Path(__file__).parents[2]
BAD = "text,label\ngood film,pos\ngood film,pos\n,pos\nbad film,\n"
DOUBLED = "text,label\ngood film,pos\ngood film,pos\nbad film,neg\n"


@pytest.fixture
def file(tmp_path: Path, home: Path, model_unchecked: None) -> Path:
    """The small recipe; check works in the home of this test."""
    return write_project(tmp_path / "project")


def write_model(folder: Path) -> Path:
    """A model's folder whose vocabulary only its class in transformers can read."""
    folder.mkdir()
    for name, content in {"config.json": b"", "model.safetensors": NO_WEIGHTS, "vocab.txt": b""}.items():
        (folder / name).write_bytes(content)
    return folder


def check(file: Path, *arguments: str, rows: str | None = None) -> int:
    """The exit code; `rows` stand in place of the training rows."""
    if rows is not None:
        (file.parent / "train.csv").write_text(rows)
    return main(["check", str(file), *arguments])


def test_rows_labels_and_tokens_are_shown_and_nothing_is_stored(
    file: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(file) == 0
    printed = capsys.readouterr()
    head, train, validation = printed.out.splitlines()[:3]
    assert head.split() == ["split", "rows", "characters", "tokens"]
    assert train.startswith("train        240  12 to 84, median 45  6 to 19, median 12")
    assert validation.split()[:2] == ["validation", "60"]
    assert "neg      123  51.2%  █████▏          33  55.0%  █████▌" in printed.out
    assert printed.out.endswith("\n\nNo problems.\n") and printed.err == ""
    assert {path.name for path in home.iterdir()} == {"digests.db", MARK}


def test_rows_by_which_the_gate_can_promote_nothing_or_only_large_gains_are_said(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (file.parent / "validation.csv").read_text().splitlines()
    (file.parent / "validation.csv").write_text("\n".join(rows[:31]))
    assert check(file) == 0
    printed = capsys.readouterr().out
    assert "30 rows of validation are few: the gate finds only gains of 0.21 and more in accuracy" in printed
    assert printed.endswith("\n\nNo problems.\n")
    (file.parent / "validation.csv").write_text("\n".join(rows[:11]))
    assert check(file) == 0
    printed = capsys.readouterr().out
    assert "warning  release.gate: 10 rows of validation promote no model: release.gate.min_rows is 20." in printed


def test_metrics_and_floors_that_do_not_fit_the_rows_are_reported_below_the_rows_and_their_tokens(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["evaluation.metrics=[accuracy, mse]", "evaluation.slices=[label, length_bucket]"]
    settings += ["release.gate.floors={label=good: {accuracy: 0.5}, length_bucket=1-2 tokns: {accuracy: 0.5}}"]
    assert check(file, *(word for one in settings for word in ("--set", one))) == 2
    printed = capsys.readouterr().out
    assert "train        240  12 to 84, median 45  6 to 19, median 12" in printed
    assert "error    evaluation.metrics[1]: 'mse' needs numbers, and the label 'neg' is not one: " in printed
    assert (
        "error    release.gate.floors.label=good: label has no group 'good' in validation: choose from neg, pos.\n"
        "error    release.gate.floors.length_bucket=1-2 tokns: length_bucket has no group '1-2 tokns' in validation: "
        "choose from 6-"
    ) in printed
    assert printed.endswith("\n\n3 errors.\n")


def test_a_metric_of_the_second_label_is_reported_where_most_rows_have_it_unless_the_recipe_names_the_order(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "text,label\n" + "".join(f"film {n},{'neg' if n % 5 == 0 else 'pos'}\n" for n in range(20))
    assert check(file, "--set", "evaluation.metrics=[accuracy, f1]", rows=rows) == 0
    message = "f1: computed for 'pos', the label of 16 of 20 rows: for 'neg', set data.label_names: [pos, neg]."
    assert f"warning  evaluation.metrics: {message}" in capsys.readouterr().out
    assert (
        check(file, "--set", "evaluation.metrics=[accuracy, f1]", "--set", "data.label_names=[neg, pos]", rows=rows)
        == 0
    )
    assert "computed for" not in capsys.readouterr().out


def test_warnings_are_printed_a_line_each_and_count_only_with_strict(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(file, rows=DOUBLED) == 0
    *_, output, unknown, blank, last = capsys.readouterr().out.splitlines()
    assert output.startswith(f"warning  duplicates  {file.parent}/train.csv row 3: 1 row of train repeats")
    assert (
        unknown.startswith("warning              validation: 6") and "stand for what the tokenizer does not" in unknown
    )
    assert blank == ""
    assert last == "2 warnings."
    assert check(file, "--strict") == 1


def test_a_recipe_that_publishes_uncompared_and_without_a_token_is_warned_by_check_and_plan(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("flows.cli.plan._estimate", lambda *inputs: [])
    hub = ["--set", "release.hub={repo: me/thing, license: mit}", "--set", "release.registry=null"]
    for command in ("check", "plan"):
        assert main([command, str(file), *hub]) == 0
        warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
        assert len(warnings) == 2
        assert "release.hub.repo: 'me/thing' cannot be written without an access token" in warnings[0]
        assert "release.hub: there is no champion to compare with" in warnings[1]


def test_errors_are_reported_together_and_end_with_2(
    file: Path, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert check(file, "--json", str(out), rows=BAD) == 2
    printed = capsys.readouterr()
    first, second = printed.out.splitlines()[:2]
    assert first.split()[:2] == ["error", "blank_text"] and f"{file.parent}/train.csv row 4: has no text" in first
    assert second.split()[:2] == ["error", "missing_label"]
    assert printed.out.endswith("\n\n4 errors, 1 warning.\n") and printed.err == ""
    levels = [problem["level"] for problem in json.loads(out.read_text())["problems"]]
    assert levels == [*["error"] * 4, "warning"]
    assert {path.name for path in home.iterdir()} == {"digests.db", MARK}


def test_the_result_as_json_holds_both_reports_and_all_problems(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert check(file, "--set", "tokens.max_length=8", "--json", str(out), rows=DOUBLED) == 0
    found = json.loads(out.read_text())
    assert found["rows"] == {"train": 3, "validation": 60}
    assert found["labels"]["train"] == {"neg": 1, "pos": 2}
    assert found["truncated"]["validation"] > 0
    assert [problem["check"] for problem in found["problems"]] == ["duplicates", "truncated", None]


def test_a_mistake_in_the_recipe_is_reported_as_by_the_other_commands(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert check(file, "--set", "data.filter=label = 1", "--json", str(out)) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("data.filter: '=' at character 7")
    assert [problem["where"] for problem in json.loads(out.read_text())["problems"]] == ["data.filter"]


def test_without_a_tokenizer_the_rows_are_checked_all_the_same(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = f"model={{source: folder, path: {write_model(tmp_path / 'model')}}}"
    assert check(file, "--set", model) == 0
    printed = capsys.readouterr().out
    assert f"Token lengths were not checked. model.path: {tmp_path / 'model'} has no tokenizer.json" in printed
    assert "tokens" not in printed.splitlines()[0] and printed.endswith("\n\nNo problems.\n")


def test_mistakes_in_model_and_rows_are_reported_together_by_check_and_by_plan_and_a_good_model_is_checked_once(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_project(tmp_path / "project")
    wrong = ["--set", "model.config.model_type=brt"]
    absent = ["--set", "evaluation.splits=[validation, test]"]
    assert check(file, *wrong, "--set", "data.label=lable") == 2
    printed = capsys.readouterr().out
    assert "error    model.config.model_type: 'brt' is no model type" in printed and "'lable'" in printed
    assert main(["plan", str(file), *wrong, *absent]) == 2
    printed_lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in printed_lines] == ["evaluation.splits[1]", "model.config.model_type"]
    assert not (home / "checked").exists()
    assert main(["plan", str(file)]) == 0
    (checked,) = (home / "checked").iterdir()
    before = checked.stat().st_mtime_ns
    assert check(file) == 0 and [one.stat().st_mtime_ns for one in (home / "checked").iterdir()] == [before]


def test_a_model_folder_that_does_not_exist_is_reported_with_the_rows(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(file, "--set", "model={source: folder, path: no/such/model}", rows=DOUBLED) == 2
    printed = capsys.readouterr().out
    assert "no/such/model is not a folder: name the one that holds config.json" in printed
    assert "warning  duplicates" in printed


@pytest.mark.parametrize("command", ["check", "run"])
def test_a_file_that_cannot_be_written_is_reported_before_anything_is_done(
    file: Path, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    places = {
        tmp_path / "none/out.json": f"{tmp_path / 'none'} is not a folder: create it, or name another file.",
        tmp_path: f"{tmp_path} is not a regular file: name a file.",
        Path("/dev/null"): "/dev/null is not a regular file: name a file.",
        Path("/proc/out.json"): "/proc is not writable (No such file or directory): name a file in another folder.",
    }
    for out, message in places.items():
        with pytest.raises(SystemExit, match="2"):
            main([command, str(file), "--json", str(out)])
        printed = capsys.readouterr()
        assert printed.err.endswith(f"argument --json: {message}\n") and printed.out == ""
    assert not home.exists()


def test_ctrl_c_and_sigterm_leave_nothing_behind(
    file: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)  # as where tests run in the background
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "stopping_rows.py").write_text(
        "import os, signal, time\n"
        "def rows(split):\n"
        "    yield {'text': 'a', 'label': 'b'}\n"
        "    os.kill(os.getpid(), getattr(signal, os.environ['STOP']))\n"
        "    time.sleep(60)\n"
    )
    data = "data={source: python, path: 'stopping_rows:rows', text: [text], label: label}"
    before = signal.getsignal(signal.SIGTERM)
    for stop in ("SIGINT", "SIGTERM"):
        monkeypatch.setenv("STOP", stop)
        assert check(file, "--set", data) == 130
        assert [path.name for path in home.iterdir()] == [MARK]
    assert signal.getsignal(signal.SIGTERM) == before
    signal.signal(signal.SIGINT, ignored)


@pytest.mark.slow
def test_neither_torch_nor_a_tracker_nor_a_server_is_needed(file: Path, home: Path) -> None:
    heavy = "'torch', 'transformers', 'datasets', 'evaluate', 'prefect', 'mlflow', 'matplotlib'"
    program = (
        "import sys; from flows.cli.main import main; code = main(sys.argv[1:]);"
        f"print(*{{m.split('.')[0] for m in sys.modules}} & {{{heavy}}}, file=sys.stderr); sys.exit(code)"
    )
    argv = [NEW_PYTHON, "-c", code_with_forked_programs(program), "check", str(file)]
    run = subprocess.run(argv, env=environment(home), capture_output=True, text=True, timeout=240)
    assert (run.returncode, run.stderr.split()) == (0, [])


def test_of_a_model_of_the_hub_the_tokenizer_alone_is_loaded(file: Path, home: Path, tmp_path: Path) -> None:
    texts = (file.parent / "train.csv").read_text().splitlines()
    train_wordpiece(lambda: iter(texts), 300).save(str(tmp_path / "tokenizer.json"))
    config = json.dumps({"model_type": "bert", "hidden_size": 32, "num_attention_heads": 2}).encode()
    files = {"tokenizer.json": (tmp_path / "tokenizer.json").read_bytes(), "config.json": config}
    with Hub() as hub:
        hub.repo("model", "me/model", {**files, "model.safetensors": b"weights", "tokenizer_config.json": b"{}"})
        arguments = ["check", str(file), "--set", "model={source: hub, path: me/model}"]
        run = finetune(home, *arguments, **hub.environment(tmp_path / "hf"))
        requests = " ".join(hub.requests)
    assert run.returncode == 0 and "median" in run.stdout.splitlines()[1].split("  ")[-1], run.stdout + run.stderr
    assert "tokenizer.json" in requests and "config.json" in requests and "safetensors" not in requests


@pytest.mark.slow
def test_on_a_terminal_messages_are_wrapped_below_each_other(file: Path, home: Path) -> None:
    (file.parent / "train.csv").write_text(DOUBLED)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(ours, (40, 70))
    code = code_with_forked_programs("from flows.cli.main import start; start()")
    argv = [NEW_PYTHON, "-c", code, "check", str(file)]
    # Programs that run tests set a width of their own, which would count for more than the terminal's.
    env = environment(home, PYTHONPATH=str(ROOT), COLUMNS="")
    run = subprocess.Popen(argv, env=env, cwd=file.parent, stdout=theirs, stderr=subprocess.DEVNULL)
    os.close(theirs)
    printed = b""
    with contextlib.suppress(OSError):  # what reading raises at the end of a terminal
        while read := os.read(ours, 4096):
            printed += read
    os.close(ours)
    assert run.wait(240) == 0
    lines = printed.decode().splitlines()
    first = lines.index("warning  duplicates  train.csv row 3: 1 row of train repeats the text")
    assert lines[first + 1].startswith(" " * 21 + "of an earlier row") and lines[-1] == "2 warnings."
    assert max(map(len, lines)) <= 70


def test_weights_that_are_cut_off_are_refused_by_check_plan_and_run_with_their_name(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = write_model(tmp_path / "model") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    for command in ("check", "plan", "run"):
        assert main([command, str(file), "--set", f"model={{source: folder, path: {weights.parent}}}"]) == 2
        printed = "".join(capsys.readouterr())
        assert printed.count(f"model.path: {weights} is cut off") == 1 and "copy or download it again." in printed


def test_rows_of_a_kind_without_labels_are_shown_without_a_table_of_them(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path / "model")
    settings = ["task=tests.training.data.task_types:Lines", "data.label=null"]
    settings += [f"model={{source: folder, path: {tmp_path / 'model'}}}"]
    assert check(file, *(word for one in settings for word in ("--set", one))) == 0
    head, train, validation, blank, note, *_ = capsys.readouterr().out.splitlines()
    assert (head.split(), train.split()[:2], validation.split()[:2]) == (
        ["split", "rows", "characters"],
        ["train", "240"],
        ["validation", "60"],
    )
    assert blank == "" and note.startswith("Token lengths were not checked.")
