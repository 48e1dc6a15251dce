"""Behaviour of every subcommand: closed pipes, homes that cannot be used, files with several entries."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from flows.cli.main import COMMANDS, main, parser
from flows.cli.shared import write_json
from flows.reports.terminal import Quiet
from tests.flows.forked import code_with_forked_programs
from tests.flows.small import command, environment, write_project
from tests.fork_server import NEW_PYTHON


@pytest.mark.slow
@pytest.mark.parametrize("encoding", [None, "ascii"])
def test_labels_and_texts_are_read_and_printed_whatever_the_encoding_of_the_locale(
    encoding: str | None, home: Path, tmp_path: Path
) -> None:
    file = write_project(tmp_path / "project")
    for split in ("train", "validation"):
        rows = tmp_path / "project" / f"{split}.csv"
        rows.write_text(rows.read_text().replace("neg", "schön"), encoding="utf-8")
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    locale |= {"PYTHONIOENCODING": encoding} if encoding else {}
    start = [NEW_PYTHON, "-c", code_with_forked_programs("from flows.cli.main import start; start()")]
    run = subprocess.run(
        [*start, "check", str(file)], env=environment(home, **locale), capture_output=True, timeout=120
    )
    assert (run.returncode, run.stderr) == (0, b"")
    assert ("schön" if encoding is None else r"sch\xf6n").encode() in run.stdout


@pytest.mark.slow
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_reader_that_goes_away_ends_nothing_and_leaves_no_traceback(home: Path, stream: str) -> None:
    """As in `finetune … | head`: the command goes on to its end, with its own exit code."""
    theirs, ours = os.pipe()
    os.close(theirs)  # nothing ever reads
    argv = ["status"] if stream == "stdout" else ["run", "none.yaml"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: ours}
    run = subprocess.run(command(*argv), env=environment(home), timeout=120, **pipes)
    whole = subprocess.run(command(*argv), env=environment(home), capture_output=True, timeout=120)
    os.close(ours)
    other = {"stdout": "stderr", "stderr": "stdout"}[stream]
    assert getattr(whole, stream) != b"" and run.returncode == whole.returncode
    assert getattr(run, other) == getattr(whole, other)


def test_a_home_that_cannot_be_used_is_one_message_that_names_the_option_or_the_variable(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, taken = write_project(tmp_path / "project"), tmp_path / "taken"
    taken.write_text("a file")
    home.mkdir(mode=0o700)
    assert main(["plan", str(file), "--home", str(taken)]) == 2
    assert capsys.readouterr().err.startswith(f"--home: {taken} cannot be used: File exists. Name another folder")
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != home and real(path, mode))
    monkeypatch.setenv("FINETUNE_HOME", str(home))
    for argv in (["plan", str(file)], ["check", str(file)], ["run", str(file)], ["runs"], ["show", "small"]):
        assert main(argv) == 2
        error = capsys.readouterr().err
        assert (
            error.startswith(f"FINETUNE_HOME: {home} cannot be written to: change its mode") and error.count("\n") == 1
        )


def test_an_entry_of_a_file_with_several_is_chosen_by_name(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], model_unchecked: None
) -> None:
    file = write_project(tmp_path / "project")
    (entry,) = yaml.safe_load(file.read_text())["deployments"]
    other = {**entry, "name": "other", "parameters": {"recipe": {**entry["parameters"]["recipe"], "name": "second"}}}
    file.write_text(yaml.safe_dump({"deployments": [entry, other]}))
    assert main(["check", str(file)]) == 2
    assert "choose one by --entry, of small, other." in capsys.readouterr().err
    for name in ("small", "other"):
        assert main(["check", str(file), "--entry", name]) == 0
    assert main(["plan", str(file), "--entry", "othr"]) == 2
    assert "Did you mean 'other'?" in capsys.readouterr().err


def test_a_recipe_without_a_deployment_is_refused_with_the_place_for_it(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_project(tmp_path / "project")
    (entry,) = yaml.safe_load(file.read_text())["deployments"]
    file.write_text(yaml.safe_dump(entry["parameters"]["recipe"]))
    assert main(["plan", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{file}: is a recipe alone. Make it the recipe of an entry `- {{name: NAME, entrypoint: ")
    shown = error.partition("`")[2].partition("`")[0].replace("…", "x")
    (advised,) = yaml.safe_load(shown)
    assert advised["parameters"] == {"recipe": "x"} and advised["entrypoint"] == entry["entrypoint"]


def test_a_quiet_run_prints_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    score = {"value": 0.9, "low": 0.85, "high": 0.94}
    Quiet().run_ended({"metrics": {"validation": {"accuracy": score, "f1": score}}})
    assert capsys.readouterr().out == "validation: accuracy 0.9000 (0.850 to 0.940), f1 0.9000 (0.850 to 0.940)\n"


def test_a_command_ends_with_its_code_after_all_clean_up_without_freeing_every_object() -> None:
    program = """
import atexit
from flows.cli import main

class Object:
    def __del__(self):
        print("freed")

kept = Object()

def command():
    atexit.register(print, "cleaned up")
    print("done", end=" ")
    return 3

main.main = command
main.start()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "done cleaned up\n", "")


def test_the_list_of_commands_has_a_whole_sentence_for_each() -> None:
    (commands,) = (action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    helps = {one.dest: str(one.help) for one in commands._choices_actions}
    assert helps.keys() == COMMANDS.keys()
    assert [name for name, text in helps.items() if not text.endswith(".")] == []


@pytest.mark.parametrize("name", ["predict", "drift", "evaluate"])
def test_inputs_that_are_given_one_by_one_add_up(name: str) -> None:
    """`--input a --input b` predicted b alone."""
    given = parser().parse_args([name, "small", "--input", "a", "b", "--input", "c"])
    assert given.input == ["a", "b", "c"]
    if name == "predict":
        kept = parser().parse_args([name, "small", "--keep", "id,text", "--keep", "day"])
        assert kept.keep == ["id", "text", "day"]


def test_the_json_of_a_result_has_null_for_an_undefined_number(tmp_path: Path) -> None:
    write_json(tmp_path / "out.json", {"metrics": [{"roc_auc": float("nan"), "loss": 0.5}]})
    assert json.loads((tmp_path / "out.json").read_text(), parse_constant=pytest.fail) == {
        "metrics": [{"roc_auc": None, "loss": 0.5}]
    }
