"""Who became champion, when and why, in a real registry: promoted, kept, rolled back."""

from __future__ import annotations

import getpass
import itertools
import json
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from flows.cli.main import main
from tasks.cache.results import Comparison, Promotion, Verdict, Version
from tasks.cache.stage import Listener, Work
from tasks.registry import promotions
from tasks.registry.promotions import list_champions
from tasks.registry.versions import MOVE_TAG, Move, find_version_number, need_model, read_moves
from tasks.stages.register import promote
from tasks.tracking.connection import connect
from tests.made import COMPARISON
from training.problems import UserError
from training.recipe import parse

RECIPE = parse(
    {
        "name": "test",
        "task": "sequence-classification",
        "data": {"source": "csv", "path": "rows", "text": ["text"], "label": "label"},
        "model": {"source": "hub", "path": "me/model"},
        "release": {"registry": "reviews", "champion": "live"},
    }
)
FIRST = Verdict(decision="promote", reason="there is no other champion to compare it with.")
_runs = itertools.count()


@pytest.fixture
def client(tracked: Path) -> MlflowClient:
    """A registry with five versions of `reviews`, none of which has an alias."""
    made = connect()
    made.create_registered_model("reviews")
    for _ in range(5):
        made.create_model_version("reviews", "file:///nowhere")
    return made


def compared_with(champion: str | int | None) -> Comparison | None:
    """With that version, if it is one."""
    return None if champion is None else COMPARISON.model_copy(update={"champion": f"reviews/{champion}"})


def run(version: str, decision: str = "promote", why: str = "better", champion: str | None = None) -> Promotion | None:
    """What a run does whose model is this version, and was compared with the champion, or the one named."""
    now = champion or connect().get_registered_model("reviews").aliases.get("live")
    verdict = Verdict.model_validate({"decision": decision, "reason": why, "comparison": compared_with(now)})
    work = Work("k", Path(), f"run-{next(_runs)}")
    given = promote.make(work, RECIPE, Version(name="reviews", version=version), verdict)
    assert given is None or isinstance(given, Promotion)
    return given


def aliases(client: MlflowClient) -> dict[str, str]:
    return {alias: str(version) for alias, version in client.get_registered_model("reviews").aliases.items()}


def kept(client: MlflowClient) -> list[Move]:
    return read_moves(client.get_registered_model("reviews"))


def test_each_move_is_kept_with_who_when_why_and_from_where(client: MlflowClient) -> None:
    assert run("1", why="the first") == Promotion(name="reviews", version="1", alias="live")
    assert run("2") == Promotion(name="reviews", version="2", alias="live", previous="1")
    assert main(["promote", "reviews", "4", "--why", "Ärger mit 2"]) == 0
    assert main(["rollback", "reviews", "--why", "4 is worse"]) == 0
    found = kept(client)
    assert [(move.before, move.to, move.by, move.why) for move in found] == [
        (None, "1", "run", "the first"),
        ("1", "2", "run", "better"),
        ("2", "4", "promote", "Ärger mit 2"),
        ("4", "2", "rollback", "4 is worse"),
    ]
    assert {(move.user, move.host, move.alias) for move in found} == {(getpass.getuser(), socket.gethostname(), "live")}
    assert [move.flow_run is not None for move in found] == [True, True, False, False]
    assert sorted(move.time for move in found) == [move.time for move in found]


def test_a_run_that_repeats_its_promotion_keeps_no_second_move(client: MlflowClient) -> None:
    run("1")
    assert run("1") == Promotion(name="reviews", version="1", alias="live")
    assert len(kept(client)) == 1


def test_a_champion_that_a_model_was_not_compared_with_stays(client: MlflowClient) -> None:
    run("1")
    run("2")
    with pytest.raises(UserError, match="version 2 of 'reviews' became champion during this run"):
        run("3", champion="1")
    with pytest.raises(UserError, match="run the same command again"):
        promote.make(Work("k", Path(), "run"), RECIPE, Version(name="reviews", version="3"), FIRST)
    assert aliases(client) == {"live": "2"} and len(kept(client)) == 2
    # A person gave it to the model meanwhile: it is no challenger of itself.
    assert run("2", "keep", champion="1") == Promotion(name="reviews", version="2", alias="live")
    assert aliases(client) == {"live": "2"}


def test_rolled_back_twice_goes_back_twice_and_then_no_further(
    client: MlflowClient, capsys: pytest.CaptureFixture[str]
) -> None:
    for version in ("1", "2", "3"):
        run(version)
    assert main(["rollback", "reviews"]) == 0 and aliases(client)["live"] == "2"
    assert main(["rollback", "reviews"]) == 0 and aliases(client)["live"] == "1"
    assert "reviews version 1 is live again, after version 2." in capsys.readouterr().out
    assert main(["rollback", "reviews"]) == 2
    assert "version 1 of 'reviews' is the first live" in capsys.readouterr().err
    run("4")
    assert main(["rollback", "reviews"]) == 0 and aliases(client)["live"] == "1"


def test_no_rollback_goes_to_a_version_that_no_longer_exists(client: MlflowClient) -> None:
    for version in ("1", "2", "3"):
        run(version)
    client.delete_model_version("reviews", "2")
    assert main(["rollback", "reviews"]) == 0 and aliases(client)["live"] == "1"


def test_an_alias_that_a_person_removed_is_not_set_again_by_a_run(client: MlflowClient) -> None:
    run("1")
    run("2")
    main(["rollback", "reviews", "--why", "too slow"])
    reported: list[dict[str, Any]] = []

    class Events(Listener):
        def stage_events(self, stage: str, events: list[dict[str, Any]]) -> None:
            reported.extend(events)

    verdict = Verdict(decision="promote", reason="better")
    work = Work("k", Path(), "run", listeners=(Events(),))
    assert promote.make(work, RECIPE, Version(name="reviews", version="2"), verdict) is None
    assert work.state == "skipped" and aliases(client)["live"] == "1"
    assert "(too slow)" in reported[0]["message"] and "finetune promote reviews 2" in reported[0]["message"]
    main(["promote", "reviews", "2"])
    run("3")
    assert run("2") == Promotion(name="reviews", version="2", alias="live", previous="3")


def test_a_challenger_that_is_promoted_is_no_challenger_any_more(client: MlflowClient) -> None:
    run("1")
    assert run("2", "keep") == Promotion(name="reviews", version="2", alias="challenger")
    assert run("3", "keep") == Promotion(name="reviews", version="3", alias="challenger", previous="2")
    assert aliases(client) == {"live": "1", "challenger": "3"} and len(kept(client)) == 1
    main(["promote", "reviews", "3"])
    assert aliases(client) == {"live": "3"}


def test_a_promotion_that_was_killed_before_the_alias_moved_is_made_by_the_next_run(
    client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("1")
    run("2")
    real = MlflowClient.set_registered_model_alias

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(MlflowClient, "set_registered_model_alias", killed)
    with pytest.raises(KeyboardInterrupt):
        run("3")
    assert aliases(client) == {"live": "2"} and kept(client)[-1].to == "3"
    monkeypatch.setattr(MlflowClient, "set_registered_model_alias", real)
    assert main(["rollback", "reviews"]) == 0 and aliases(client) == {"live": "1"}
    assert run("3") == Promotion(name="reviews", version="3", alias="live", previous="1")
    assert main(["rollback", "reviews"]) == 0 and aliases(client) == {"live": "1"}


def move(before: str | None, to: str, by: str = "run") -> Move:
    values = {"alias": "champion", "before": before, "to": to, "by": by, "user": "u", "host": "h", "time": "t"}
    return Move.model_validate(values)


@pytest.mark.parametrize(
    ("moves", "now", "line"),
    [
        ([], None, []),
        ([], "1", ["1"]),
        ([move(None, "1"), move("1", "2")], "2", ["1", "2"]),
        ([move(None, "1"), move("1", "2")], "1", ["1"]),  # the last one never happened
        ([move(None, "1"), move("1", "2")], "7", ["1", "2", "7"]),  # moved by hand in MLflow's own pages
        ([move(None, "1"), move("1", "2"), move("1", "3")], "3", ["1", "3"]),
        ([move(None, "1"), move("7", "2")], "2", ["1", "7", "2"]),
        ([move(None, "1"), move("1", "2"), move(None, "3")], "3", ["1", "2", "3"]),  # and took it away before
        ([move(None, "1"), move("1", "2"), move("2", "1", "promote")], "1", ["1", "2", "1"]),
        ([move(None, "1"), move("1", "2"), move("2", "1", "rollback")], "1", ["1"]),
        ([move(None, "1"), move("1", "2"), move("2", "1", "rollback")], "2", ["1", "2"]),
        ([move("1", "2"), move("2", "3"), move("3", "1", "rollback")], "1", ["1"]),
    ],
)
def test_the_champions_before_this_one_follow_from_the_recorded_moves(
    moves: list[Move], now: str | None, line: list[str]
) -> None:
    assert list_champions(moves, now) == line


def test_an_alias_other_than_the_champions_is_given_without_a_move(client: MlflowClient) -> None:
    run("1")
    assert main(["promote", "reviews", "2", "--alias", "canary"]) == 0
    assert aliases(client) == {"live": "1", "canary": "2"} and len(kept(client)) == 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["promote", "review", "1"], "NAME: no model 'review' is registered in sqlite:"),
        (["promote", "review", "1"], "Did you mean 'reviews'?"),
        (["promote", "reviews", "9"], "VERSION: 'reviews' has no version '9': it has 5, 4, 3, 2, 1."),
        (["promote", "reviews", "1", "--alias", "latest"], "--alias: 'latest' is no alias"),
        (["rollback", "reviews"], "NAME: 'reviews' has no champion: name a version, finetune promote reviews VERSION."),
        (["models", "review"], "Did you mean 'reviews'?"),
        (["predict", "reviews/9", "a text"], "'reviews' has no version '9'"),
        (["predict", "reviews@champion", "a text"], "'reviews' has no alias 'champion': it has none yet."),
        (["predict", "reviews@champion", "a text"], "promote one by finetune promote reviews VERSION."),
        (["predict", "reviews"], "TEXT: there is no input"),
        (["predict", "reviews", "fine", "\udcff bad"], "TEXT: is not UTF-8 text"),
        (["predict", "reviews", "--input", "no.txt"], "--output: is missing"),
        (["predict", "reviews", "x", "--keep", "id"], "--keep: is for files"),
        (["predict", "a@b@c", "--input", "no.txt", "--output", "out"], "NAME: 'a@b@c' is no registered model"),
        (["predict", "reviews", "--input", "a", "--output", "b", "--max-error-rate", "2"], "--max-error-rate: 2.0 is"),
    ],
)
def test_a_name_that_does_not_exist_is_reported_in_one_line_with_those_that_do(
    client: MlflowClient, capsys: pytest.CaptureFixture[str], argv: list[str], words: str
) -> None:
    assert main(argv) == 2
    printed = capsys.readouterr().err
    assert words in printed and "Traceback" not in printed and len(printed.splitlines()) <= 2


@pytest.mark.parametrize("argv", [["promote", "reviews", "1"], ["rollback", "reviews"], ["models"]])
def test_mlflow_that_is_down_is_reported_in_one_line(
    argv: list[str], home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.servers import closed_port

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://ann:secret@127.0.0.1:{closed_port()}")
    assert main(argv) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("MLflow at http://127.0.0.1:") and "secret" not in line


def test_models_are_listed_newest_first_with_what_is_known_of_them(
    client: MlflowClient, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    figures = {"test": {name: {"value": 0.875, "low": None, "high": None} for name in ("accuracy", "f1", "roc_auc")}}
    none = {"test": {"roc_auc": {"value": None, "low": None, "high": None}}}
    client.set_model_version_tag("reviews", "4", "finetune.figures", json.dumps(none))
    client.set_model_version_tag("reviews", "4", "finetune.judged_split", "test")
    client.set_model_version_tag("reviews", "5", "finetune.figures", json.dumps(figures))
    for tag, value in {"judged_split": "test", "verdict": "promote", "data": "somebody/" + 30 * "long-name-"}.items():
        client.set_model_version_tag("reviews", "5", f"finetune.{tag}", value)
    client.create_registered_model("ann's")
    run("5", why="it is better")
    assert main(["models", "--json", str(tmp_path / "models.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ann's" and lines[3] == "reviews"
    assert [line.split()[0] for line in lines[4:]] == ["version", "5", "4", "3", "2", "1"]
    assert lines[5].split()[1] == "live" and "promote  test accuracy 0.8750, f1 0.8750, roc_auc" in lines[5]
    assert lines[6].endswith("test roc_auc -")
    other, reviews = json.loads((tmp_path / "models.json").read_text())
    assert other == {"name": "ann's", "aliases": {}, "versions": [], "has_more": False, "moves": []}
    assert reviews["versions"][0]["figures"] == figures and reviews["aliases"] == {"live": "5"}
    assert main(["models", "reviews", "--limit", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["version", "5", "4"]
    assert lines[4] == "  … and older versions: --limit 4"
    assert main(["models", "reviews", "--limit", "5"]) == 0
    assert "older versions" not in (printed := capsys.readouterr().out)
    assert re.search(r" UTC  version 5 by flow run run-\d+ of .+: it is better$", printed)


CALLS = (
    "get_registered_model",
    "set_registered_model_tag",
    "set_registered_model_alias",
    "delete_registered_model_tag",
)


@pytest.mark.slow
@pytest.mark.parametrize("call", range(8))
def test_of_two_homes_that_promote_at_once_one_alone_does(
    client: MlflowClient, tracked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """The other home promotes before each of the calls to MLflow that this one makes."""
    monkeypatch.setattr(promotions, "PENDING_WAIT_S", 0.3)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tracked / 'mlflow.db'}")
    run("1")
    made, promoted = 0, []

    def promoting(version: str, home: Path) -> None:
        with monkeypatch.context() as own:
            own.setenv("FINETUNE_HOME", str(home))
            try:
                run(version, champion="1")
                promoted.append(version)
            except UserError as error:
                assert "run the same command again" in str(error)

    def counted(name: str) -> Any:
        method = getattr(MlflowClient, name)

        def called(*arguments: Any) -> Any:
            nonlocal made
            made += 1
            if made == call + 1:
                promoting("3", tmp_path / "other")
            return method(*arguments)

        return called

    for name in CALLS:
        monkeypatch.setattr(MlflowClient, name, counted(name))
    promoting("2", tracked)
    if made <= call:
        promoting("3", tmp_path / "other")
    monkeypatch.undo()
    assert len(promoted) == 1 and aliases(client)["live"] == promoted[0]
    assert list_champions(kept(client), aliases(client)["live"]) == ["1", promoted[0]]


@pytest.mark.slow
def test_a_move_is_considered_dead_only_if_it_stays_pending_not_if_a_process_has_waited_for_others_before(
    client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mover whose announcement was two seconds old was considered dead by one that had waited for three others; both
    then withdrew, and the alias was at a version whose promotion was refused (seed 712485 of the scene `registry`)."""
    monkeypatch.setattr(promotions, "PENDING_WAIT_S", 2.0)
    run("1")
    (first,) = kept(client)
    began: list[float] = []

    def announced(*arguments: Any) -> Any:
        if len(began) < 2:  # another home announces its move, and at the next look a third one
            move = first.model_copy(update={"before": "1", "to": str(len(began) + 2), "home": "another"})
            client.set_registered_model_tag("reviews", f"{MOVE_TAG}{len(began) + 2}-00000000", move.model_dump_json())
            began.append(time.monotonic())
        return need_model(*arguments)

    monkeypatch.setattr(promotions, "need_model", announced)
    promotions._wait_for_pending_moves(client, "reviews", "live")
    assert len(began) == 2 and time.monotonic() - began[1] >= 2.0


def test_a_run_whose_promotion_is_taken_back_leaves_what_another_has_promoted_since(
    client: MlflowClient, tracked: Path
) -> None:
    run("1")
    verdict = Verdict.model_validate({"decision": "promote", "reason": "better", "comparison": compared_with("1")})
    work = Work("k", Path(), "run")
    promote.make(work, RECIPE, Version(name="reviews", version="2"), verdict)
    run("3")
    assert work.rollback is not None
    work.rollback()
    assert aliases(client)["live"] == "3"


def test_an_alias_that_is_followed_and_does_not_exist_is_refused_with_those_that_do(client: MlflowClient) -> None:
    with pytest.raises(UserError, match=r"'reviews' has no alias 'live': it has none yet\."):
        find_version_number("reviews", "live")
    client.set_registered_model_alias("reviews", "live", "2")
    assert find_version_number("reviews", "live") == "2"
    with pytest.raises(UserError, match=r"has no alias 'champion': it has live\. .*finetune promote reviews VERSION"):
        find_version_number("reviews", "")
