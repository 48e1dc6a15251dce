"""The inputs of training: user code counts, and code for display does not."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

from tasks.cache import code
from tasks.cache.results import Artifact, Lock
from tasks.stages.fit import fit, signing_key
from tests.raised import raised_problems
from training.engine import checkpoints
from training.problems import UserError
from training.recipe import parse

DATA = Artifact(stage="load_data", key="d", digest="rows", parts={"labels.json": "labels"})
MODEL = Artifact(stage="load_model", key="m", digest="m", parts={"model": "model", "tokenizer": "tokenizer"})


def tokens(**changed: str) -> Artifact:
    parts = {f"{split}.arrow": changed.get(split, split) for split in ("train", "validation", "test")}
    return Artifact(stage="tokenize", key="t", digest=" ".join(parts.values()), parts=parts)


TOKENS = tokens()


@pytest.fixture(autouse=True)
def labels(home: Path) -> None:
    """The file with the labels that the rows have."""
    home.mkdir(mode=0o700)
    DATA.path.mkdir(parents=True)
    (DATA.path / "labels.json").write_text('["neg", "pos"]')


def inputs(evaluation: dict[str, Any] | None = None, **training: Any) -> dict[str, Any]:
    recipe = parse(written("sequence-classification", training=training, evaluation=evaluation or {}))
    return fit.flat_inputs(recipe, Lock(num_processes=1, mixed_precision="no"), DATA, MODEL, TOKENS)[0]


def written(task: str, **sections: Any) -> dict[str, Any]:
    columns = {"columns": {"source": "en", "target": "de"}} if task == "seq2seq" else {"text": ["text"], "label": "l"}
    data = {"source": "csv", "path": "rows", **columns}
    return {
        "name": "test",
        "task": task,
        "data": data,
        "model": {"source": "folder", "path": "models/small"},
    } | sections


@pytest.fixture()
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helper.py").write_text("SCALE = 1\n")
    file = tmp_path / "mine.py"
    file.write_text("from helper import SCALE\ndef loss(logits, labels): ...\n")
    return file


@pytest.mark.parametrize(
    "training",
    [{"loss": "mine:loss"}, {"collator": "mine:batch"}, {"trainer": "mine:Mine"}, {"callbacks": ["mine:Mine"]}],
)
def test_an_edit_to_code_of_the_users_or_to_what_it_imports_is_noticed(mine: Path, training: dict[str, Any]) -> None:
    before = inputs(**training)
    assert {"code.mine.py", "code.helper.py"} <= before.keys()
    mine.with_name("helper.py").write_text("SCALE = 2\n")
    after = inputs(**training)
    assert {name for name in before if before[name] != after[name]} == {"code.helper.py"}


def test_a_setting_of_lora_trains_anew_and_only_with_it_the_version_of_peft_counts() -> None:
    without, four, eight = inputs(), inputs(lora={"r": 4}), inputs(lora={})
    assert {name for name in four if four[name] != eight[name]} == {"training.lora.r"}
    assert four["library.peft"] == importlib.metadata.version("peft") and "library.peft" not in without


def test_metrics_count_where_one_may_choose_the_best_model_and_how_figures_are_resampled_never(mine: Path) -> None:
    metrics = ["accuracy", "mine:Errors", f"hub:me/errors@{'a' * 40}"]
    evaluation = {"metrics": metrics, "allow_remote_code": True}
    shown, chosen = inputs(evaluation), inputs(evaluation, metric_for_best_model="errors")
    assert shown == inputs()
    more = {name: value for name, value in chosen.items() if name not in shown}
    assert (shown["deciding_metrics"], chosen["deciding_metrics"]) == ([], ["errors", metrics[2]])
    evaluation_code = {name for name in more if name.startswith("code.training/evaluation/")}
    assert more.keys() - evaluation_code == {"code.mine.py", "code.helper.py", "table.errors.more_is_better"}
    assert "code.training/evaluation/metrics/__init__.py" in evaluation_code
    code = {f"code.training/evaluation/metrics/{name}.py" for name in ("labels", "texts", "numbers", "rewards")}
    assert not code & {*shown, *chosen}
    accuracy = inputs(evaluation, metric_for_best_model="accuracy")
    assert code & accuracy.keys() == {"code.training/evaluation/metrics/labels.py"}
    assert accuracy["table.accuracy.more_is_better"] is True
    seen = inputs(evaluation, callbacks=["mine:Mine"])  # it may go by any of them
    assert seen["deciding_metrics"] == metrics
    assert not any(name.startswith("code.training/evaluation/") for name in shown)
    resampled = {"code.training/evaluation/metrics/resampling.py", "code.training/evaluation/bootstrap.py"}
    assert not resampled & {*chosen, *seen}


@pytest.mark.parametrize(
    ("training", "matters"),
    [({}, False), ({"metric_for_best_model": "bleu"}, True), ({"callbacks": ["pydantic.main:BaseModel"]}, True)],
)
def test_how_answers_are_made_counts_where_figures_of_them_may_change_the_weights(
    training: dict[str, Any], matters: bool
) -> None:
    one, other = (
        fit.flat_inputs(
            parse(
                written("seq2seq", training=training, evaluation={"metrics": ["bleu"]}, options={"num_beams": beams})
            ),
            Lock(num_processes=1, mixed_precision="no"),
            DATA,
            MODEL,
            TOKENS,
        )[0]
        for beams in (1, 2)
    )
    assert {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)} == (
        {"options.num_beams"} if matters else set()
    )


def test_of_an_installed_library_the_version_counts(mine: Path) -> None:
    assert "library.pydantic" in inputs(callbacks=["pydantic.main:BaseModel"])
    assert "library.schedulefree" in inputs(optim="schedule_free_sgd", lr_scheduler_type="constant")


def test_a_module_that_does_not_exist_is_reported_with_its_field(mine: Path) -> None:
    (problem,) = raised_problems(inputs, loss="mine:loss", callbacks=["mine:Mine", "nowhere_at_all:Mine"])
    assert problem.where == "training.callbacks[1]"
    assert problem.message.startswith("'nowhere_at_all:Mine': there is no module 'nowhere_at_all' in ")


def test_settings_that_shape_the_weights_count_and_those_of_display_do_not() -> None:
    plain = inputs()
    shown = {"log_level": "info", "log_level_replica": "info", "logging_first_step": True, "logging_strategy": "epoch"}
    assert inputs(logging_steps=3, extra=shown) == plain
    for learnt in ({"loss": "focal"}, {"class_weights": "balanced"}, {"extra": {"neftune_noise_alpha": 5.0}}):
        assert inputs(**learnt) != plain


def test_an_edit_of_test_rows_does_not_train_again_and_one_of_any_other_split_does() -> None:
    recipe, lock = parse(written("sequence-classification")), Lock(num_processes=1, mixed_precision="no")

    def key(**changed: str) -> str:
        return fit.key(fit.flat_inputs(recipe, lock, DATA, MODEL, tokens(**changed))[0])

    assert key(test="edited") == key()
    assert len({key(), key(train="edited"), key(validation="edited")}) == 3


def test_of_a_checkpoint_to_begin_with_the_content_counts_and_not_its_place(mine: Path) -> None:
    for name, content in (("a", "1"), ("b", "1"), ("c", "2")):
        (mine.parent / name / "checkpoint-4").mkdir(parents=True)
        (mine.parent / name / "checkpoint-4/manifest.json").write_text(content)
    a, b, c = (inputs(resume_from_checkpoint=f"{name}/checkpoint-4") for name in "abc")
    assert a == b != c and a != inputs()
    with pytest.raises(UserError, match="'d' is no checkpoint"):
        inputs(resume_from_checkpoint="d")


def test_a_checkpoint_from_elsewhere_that_can_execute_code_is_refused_before_anything_runs(
    mine: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign, own = mine.parent / "foreign/checkpoint-4", mine.parent / "own/checkpoint-4"
    for checkpoint, environment in ((foreign, {}), (own, {checkpoints.SIGNING_KEY: str(signing_key())})):
        with monkeypatch.context() as here:
            for name, value in environment.items():
                here.setenv(name, value)
            with checkpoints.write(checkpoint) as aside:
                (aside / "model.pt").write_bytes(b"pickle")
    training = {"resume_from_checkpoint": str(foreign)}
    compute = {"strategy": "deepspeed-zero2", "num_processes": 2}

    def key(compute: dict[str, Any], **training: Any) -> None:
        recipe = parse(written("sequence-classification", training=training, compute=compute))
        fit.flat_inputs(recipe, Lock(num_processes=2, mixed_precision="no"), DATA, MODEL, TOKENS)

    with pytest.raises(UserError, match="was not written by this home") as raised:
        key(compute, **training)
    assert raised.value.problems[0].where == "training.resume_from_checkpoint"
    key(compute, **training, trust_checkpoint=True)
    monkeypatch.setattr(checkpoints, "sha256", lambda path: pytest.fail("a plan reads no gigabytes"))
    key(compute, resume_from_checkpoint=str(own))
    key({}, **training)  # ddp loads no pickle
    assert signing_key().stat().st_mode & 0o777 == 0o600


def flat(**compute: Any) -> dict[str, Any]:
    return inputs_of(Lock(num_processes=2), **compute)


def inputs_of(lock: Lock, **compute: Any) -> dict[str, Any]:
    data = {"source": "csv", "path": "rows", "text": ["text"], "label": "label"}
    model = {"source": "folder", "path": "models/small"}
    recipe = parse(
        {"name": "test", "task": "sequence-classification", "data": data, "model": model, "compute": compute}
    )
    return fit.flat_inputs(recipe, lock, DATA, MODEL, TOKENS)[0]


def test_a_strategy_and_its_options_count_and_its_code_where_it_is_used() -> None:
    ddp, fsdp = flat(), flat(strategy="fsdp", fsdp_reshard_after_forward=False)
    code = {name for name in ddp.keys() ^ fsdp.keys() if name.startswith("code.")}
    assert code == {"code.training/distributed/ddp.py", "code.training/distributed/fsdp.py"}
    changed = {name: fsdp[name] for name in ddp.keys() & fsdp.keys() if ddp[name] != fsdp[name]}
    assert changed == {"compute.strategy": "fsdp", "compute.fsdp_reshard_after_forward": False}
    assert flat(stall_timeout_s=1.0) == ddp


def test_an_engine_counts_and_of_its_code_only_that_which_is_used() -> None:
    trainer, loop = inputs(), inputs(engine="accelerate")
    code = {name for name in trainer.keys() ^ loop.keys() if name.startswith("code.")}
    own = {"trainer": ("trainer", "callbacks"), "accelerate": ("loop",)}
    files = {engine: {f"code.training/engine/{name}.py" for name in names} for engine, names in own.items()}
    assert code == files["trainer"] | files["accelerate"] and files["accelerate"] <= loop.keys()
    assert {name for name in trainer.keys() & loop.keys() if trainer[name] != loop[name]} == {"training.engine"}


def test_how_many_machines_share_the_work_counts_and_not_where_their_cluster_is() -> None:
    assert flat(num_machines=2, cluster="ray", cluster_address="a:1") == flat(num_machines=2, cluster="ray")
    one, two = (inputs_of(Lock(num_processes=2, num_machines=count)) for count in (1, 2))
    assert {name for name in one.keys() | two.keys() if one.get(name) != two.get(name)} == {"compute.num_machines"}


def test_how_it_was_written_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("{distributed_type: FSDP, num_processes: 2, fsdp_config: {fsdp_version: 2}}")
    assert flat(accelerate="a.yaml") == flat(strategy="fsdp", num_processes=2)


def test_deepspeeds_version_counts_for_its_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    read = code._version
    monkeypatch.setattr(code, "_version", lambda one: "0.1" if one.name == "deepspeed" else read(one))
    assert flat(strategy="deepspeed-zero3")["library.deepspeed"] == "0.1"
    assert "library.deepspeed" not in flat(strategy="fsdp")
