"""KTO: TRL's loss, gradients and KL divergence, steps divided in any way, exact training, rewards of ratings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from sklearn.metrics import roc_auc_score

from tests import fork_server
from tests import task_types as tiny_tasks
from tests.arrow import read_arrow, write_arrow
from tests.training.data.test_forms import json_lines, problems_of, run
from tests.training.forks import assert_same, assert_same_losses, checkpoints_written, curve, finish, kill_when, weights
from tests.training.task_types import preference_model
from tests.training.task_types.test_preference import FIGURES, record
from tests.training.task_types.test_sft import BOT, LAST, USER, words
from training.batching.batches import TokenRows
from training.data.arrow_columns import as_json
from training.engine.collation import prepare_step
from training.engine.predictor import Predictor
from training.evaluation import metrics
from training.evaluation.baseline import choose_rival
from training.evaluation.bootstrap import draws
from training.evaluation.metrics.resampling import figures
from training.models.loading import load_tokenizer
from training.recipe import Training
from training.task_types.kto import Kto
from training.task_types.losses.kto_loss import divergence, divergence_sums
from training.tokenization.encoder import load_fast_encoder
from training.tokenization.preference_rows import prompt_as_json

KIND = Kto()
EVERY = range(len(preference_model.COMPLETIONS))


def stored(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    """Rows as load_data stores them."""
    texts = record([{name: row[name] for name in ("prompt", "completion")} for row in rows])
    return texts.append_column("label", pa.array([row["label"] for row in rows]))


def features(task: Kto, encoder: Any, *blocks: list[dict[str, Any]]) -> pa.Table:
    rows = (task.features(encoder, stored(block)).rows for block in blocks)
    return pa.Table.from_batches(task.token_rows("train", encoder.max_length, rows))


def token_rows(task: Kto, folder: Path, reference: Any) -> TokenRows:
    """The completions of preference_model in tokens, with the reference."""
    table = features(task, load_fast_encoder(folder, 32), preference_model.COMPLETIONS)
    batch = collated(task, TokenRows(table), folder)
    with torch.no_grad():
        predictions = task.predictions(reference, task.forward(reference, batch), batch)
    for name, values in task.reference_columns(pa.Table.from_batches([predictions])).items():
        table = table.append_column(name, values)
    return TokenRows(table)


def test_completions_that_repeat_their_prompt_are_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "b c ", "completion": completion, "label": True} for completion in ("b c d", "d")]
    assert KIND.features(load_fast_encoder(words(tmp_path / "it", None), 32), stored(rows)).remarks == {
        "repeated_in_completion": 1,
        "joined": 0,
    }


def test_the_last_message_of_a_conversation_is_its_completion(tmp_path: Path) -> None:
    talks, labels = [[USER, BOT, USER, LAST], [USER, BOT]], pa.array([True, False])
    pairs = stored([{"prompt": talk[:-1], "completion": talk[-1:], "label": True} for talk in talks])
    rows = pa.record_batch({"messages": list(map(json.dumps, talks)), "label": labels})
    encoder = load_fast_encoder(words(tmp_path / "it"), 64)
    expected = pairs.set_column(2, "label", labels)
    assert KIND.features(encoder, rows).rows == KIND.features(encoder, expected).rows
    assert [prompt_as_json(row) for row in rows.to_pylist()] == [as_json(talk[:-1]) for talk in talks]
    asked = KIND.without_answers(rows.select(["messages"]))
    prompts = KIND.prompts(encoder, asked, KIND.options.settings_for(preference_model.model(0.0)))
    for prompt, row in zip(prompts, KIND.features(encoder, rows).rows.to_pylist(), strict=True):
        assert prompt.ids.tolist() == row["input_ids"][: row["of_answer"].index(1)]


def test_conversations_that_end_without_an_answer_are_named(tmp_path: Path) -> None:
    rows = [{"messages": talk, "label": True} for talk in ([USER, BOT], [USER, BOT, USER], [BOT])]
    assert problems_of(KIND, rows, tmp_path, columns={"messages": "messages"}, label="label") == [
        f"completions row {number}: has no prompt with a completion ({reason})"
        for number, reason in (
            (2, "its last message is by 'user', and must be by 'assistant'"),
            (3, "the prompt: it has no message"),
        )
    ]


def collated(task: Kto, rows: TokenRows, folder: Path, chosen: Any = EVERY) -> Any:
    return task.collator(load_tokenizer(folder), 1)([rows[number] for number in chosen])


def mean_loss(task: Kto, model: Any, batch: Any) -> torch.Tensor:
    loss = task.loss(Training(), [], TokenRows(pa.table({"length": [1]})), outside=False)
    assert loss is not None
    return loss(task.forward(model, batch)["logits"], batch["labels"])


@pytest.mark.parametrize("case", preference_model.KTO)
def test_the_loss_its_gradients_and_the_kl_divergence_are_those_of_trl(case: str, tmp_path: Path) -> None:
    task, folder = Kto(preference_model.KTO[case]), preference_model.tokenizer(tmp_path)
    model, reference = map(preference_model.model, preference_model.SHIFTS[case])
    batch = collated(task, token_rows(task, folder, reference.eval()), folder)
    (step,) = prepare_step(task, model.train(), [batch])
    found, expected = mean_loss(task, model, step), FIGURES["losses"][case]
    found.backward()
    assert found.item() == pytest.approx(expected["loss"], abs=1e-5)
    assert step["labels"][0, -1].item() == pytest.approx(expected["kl"], abs=1e-5)
    gradients = preference_model.gradients(model)
    assert gradients.keys() == expected["gradients"].keys()
    for name, values in gradients.items():
        assert values == pytest.approx(expected["gradients"][name], abs=1e-5), name
    whole = mean_loss(task, model, batch)  # as evaluations compute it
    assert whole.item() == pytest.approx(found.item(), rel=1e-6)


def test_one_of_the_two_cases_has_a_kl_divergence_and_the_other_one_is_cut_off_at_zero() -> None:
    assert sorted(FIGURES["losses"][case]["kl"] > 0 for case in preference_model.KTO) == [False, True]


def test_a_row_weighs_the_same_however_the_rows_of_a_step_are_divided(tmp_path: Path) -> None:
    task, folder = Kto({"beta": 0.3}), preference_model.tokenizer(tmp_path)
    model, reference = map(preference_model.model, preference_model.SHIFTS["kto"])
    rows = token_rows(task, folder, reference.eval())
    whole = mean_loss(task, model, *prepare_step(task, model, [collated(task, rows, folder)]))
    parts = prepare_step(task, model, [collated(task, rows, folder, part) for part in ([0], [1, 3], [2, 4])])
    divided = sum(mean_loss(task, model, part).item() * task.target_count(part) for part in parts) / len(rows)
    assert divided == pytest.approx(whole.item(), rel=1e-6)
    alone = sum(mean_loss(task, model, collated(task, rows, folder, [row])).item() for row in EVERY) / len(rows)
    assert alone != pytest.approx(whole.item(), rel=1e-4)  # each with its own divergence


def test_each_prompt_has_the_completion_of_the_row_before_and_the_first_one_the_last_of_its_block(
    tmp_path: Path,
) -> None:
    rows = [
        {"prompt": prompt, "completion": completion, "label": True}
        for prompt, completion in (("b c", " d"), ("e", " f g"), ("h", " i"), ("b", " c"))
    ]
    table = features(KIND, load_fast_encoder(words(tmp_path / "it"), 64), rows[:2], rows[2:])
    first, second, third, last = table.to_pylist()
    assert first == {
        **{"input_ids": [5, 6, 7, 1, 5, 6, 9, 10, 1], "of_answer": [0, 0, 1, 1, 0, 0, 1, 1, 1]},
        **{"text_length": 4, "completion_tokens": 2, "length": 9, "targets": 1, "label": 1},
    }
    mismatched = [row["input_ids"][row["text_length"] :] for row in (second, third, last)]
    assert mismatched == [[8, 7, 1], [11, 9, 10, 1], [5, 12, 1]]


def test_a_row_that_loses_its_completion_is_not_trained_on_and_gives_none(tmp_path: Path) -> None:
    folder, model = preference_model.tokenizer(tmp_path), preference_model.model(0.0)
    rows = [
        {"prompt": "a", "completion": " b", "label": True},
        {"prompt": "a b c d e f g h", "completion": " i", "label": False},
        {"prompt": "c", "completion": " d", "label": False},
    ]
    table = features(KIND, load_fast_encoder(folder, 8), rows)
    assert table["targets"].to_pylist() == [1, 0, 1] and table["text_length"].to_pylist() == [3, 8, 3]
    assert table["length"].to_pylist() == [6, 8, 6]  # the third has the completion of the first
    for name in ("reference_logp", "reference_mismatched_logp"):
        table = table.append_column(name, pa.array(np.zeros(3, np.float32)))
    alone, both, kept = (collated(KIND, TokenRows(table), folder, part) for part in ([1], [0, 1, 2], [0, 2]))
    assert mean_loss(KIND, model, alone).item() == 0.0
    assert mean_loss(KIND, model, both).item() == pytest.approx(mean_loss(KIND, model, kept).item(), rel=1e-6)


def test_messages_are_rendered_as_conversations_and_rows_without_a_completion_are_named(tmp_path: Path) -> None:
    from tests.training.task_types.test_sft import CHATML

    encoder = load_fast_encoder(words(tmp_path / "it", CHATML), 64)
    forms = [
        {"prompt": [USER], "completion": [BOT], "label": True},
        {"prompt": "b c", "completion": [USER, BOT], "label": True},
    ]
    one, other = KIND.features(encoder, stored(forms)).rows.to_pylist()
    assert one == other and one["input_ids"] == [0, 2, 5, 6, 1, 0, 3, 7, 1] and one["completion_tokens"] == 2
    rows = [{"prompt": "b", "completion": "c", "label": True}, {"prompt": "b", "completion": " ", "label": False}]
    assert problems_of(KIND, rows, tmp_path, label="label") == [
        "completions row 2: has no prompt with a completion (completion is empty)"
    ]


@pytest.mark.parametrize("source", ["json", "csv", "parquet"])
def test_ratings_are_true_and_false_or_one_and_zero_in_every_format(source: str, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    values: dict[str, list[Any]] = {
        "json": [True, False, True],
        "csv": ["true", "False", "1"],
        "parquet": [1, 0, 1],
    }
    rows = {"prompt": ["b", "c", "d"], "completion": ["e", "f", "g"], "good": values[source]}
    file = tmp_path / f"rows.{source}"
    if source == "parquet":
        pq.write_table(pa.table(rows), file)
    elif source == "csv":
        lines = [",".join(map(str, row)) for row in zip(*rows.values(), strict=True)]
        file.write_text("\n".join([",".join(rows), *lines]) + "\n")
    else:
        json_lines(file, [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)])
    run(KIND, str(file), tmp_path / "out", source=source, label="good")
    table = read_arrow(tmp_path / "out/train.arrow")
    assert table["label"].to_pylist() == [True, False, True] and table.schema.field("label").type == pa.bool_()


@pytest.mark.parametrize(("value", "shown"), [(4, "4"), ("good", "'good'"), (0.5, "0.5")])
def test_a_rating_that_is_neither_true_nor_false_is_named(value: Any, shown: str, tmp_path: Path) -> None:
    rows = [{"prompt": "b", "completion": "c", "label": True}, {"prompt": "b", "completion": "d", "label": value}]
    assert problems_of(KIND, rows, tmp_path, label="label") == [
        f"type row 2: holds no true or false in column 'label': {shown}"
    ]


# Training


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(fork_server.call(tiny_tasks.make_world, "kto", tmp_path_factory.mktemp("rated") / "world"))


def fit_job(world: Path, job_dir: Path, processes: int = 1, **training: Any) -> Path:
    """A job of 3 epochs in steps of 20 rows, in two micro-batches for each process."""
    usual = {"num_train_epochs": 3, "gradient_accumulation_steps": 2, "checkpoint_interval_s": 0.05}
    usual |= {"per_device_train_batch_size": 10 // processes, "logging_steps": 1}
    compute = {"strategy": "ddp", "num_processes": processes}
    return tiny_tasks.fit_job("kto", world, job_dir, compute, **usual | training)


@pytest.fixture(scope="module")
def trained(world: Path) -> Path:
    """A job that ran to its end undisturbed."""
    job = fit_job(world, world / "whole")
    assert finish(job).state == "finished"
    return job


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["trainer", "accelerate"])
def test_killed_within_an_epoch_it_ends_with_the_same_bytes_with_either_engine(
    engine: str, world: Path, trained: Path, tmp_path: Path
) -> None:
    killed = fit_job(world, tmp_path / "killed", engine=engine)
    assert kill_when(killed, lambda: checkpoints_written(killed) >= 3)
    assert finish(killed).state == "finished"
    if engine == "trainer":
        assert_same(killed, trained)
    assert weights(killed) == weights(trained)


@pytest.mark.slow
@pytest.mark.parametrize(
    "division", [{"processes": 2}, {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 5}]
)
def test_two_processes_and_smaller_micro_batches_learn_what_one_learns(
    division: dict[str, int], world: Path, trained: Path, tmp_path: Path
) -> None:
    job = fit_job(world, tmp_path / "divided", **division)
    assert finish(job).state == "finished"
    assert_same_losses(trained, job)
    assert len(curve(trained)) == 24


def test_training_starts_at_the_reference_and_rewards_what_is_desirable(trained: Path) -> None:
    points = curve(trained)
    assert points[1]["train_loss"] == pytest.approx(0.5, abs=1e-5)
    last = points[max(points)]
    assert last["eval_loss"] < 0.5 and last["eval_roc_auc"] > 0.65 and last["eval_margin"] > 0


def test_a_prompt_alone_is_answered_and_a_completion_gets_its_log_probability(trained: Path) -> None:
    task, folder = Kto({"max_new_tokens": 5, "min_new_tokens": 3}), trained / "output/model"
    row = {"prompt": "cat dog", "completion": " Katze Hund"}
    ((rated,), (alone,)) = (
        Predictor(task, folder, folder, 32).predict(record([one])) for one in (row, {"prompt": row["prompt"]})
    )
    assert rated["targets"] > 0 and rated["logp"] < 0 and alone["logp"] is None
    assert rated["generated_text"] == alone["generated_text"] != ""
    assert task.lines(alone) == [alone["generated_text"]]
    assert task.same_prediction(rated, rated, 1e-4) and task.same_prediction(alone, alone, 1e-4)
    assert not task.same_prediction(rated, rated | {"logp": rated["logp"] - 50}, 1e-4)


# Evaluation


def predicted(rewards: list[float], label: list[int], ratios: list[float]) -> pa.Table:
    """Stored predictions with these rewards by beta 0.1."""
    count = len(rewards)
    columns = {"label": label, "logp": np.array(rewards) * 10 - 5, "mismatched_logp": np.array(ratios) - 7}
    references = {"reference_logp": -5.0, "reference_mismatched_logp": -7.0}
    columns |= {name: np.full(count, value, np.float32) for name, value in references.items()}
    return pa.table(columns | {"completion_tokens": np.arange(count) + 2})


def test_metrics_are_those_of_rewards_and_ratings() -> None:
    rewards, label = [0.5, -0.2, 0.3, -0.1, 0.4], [1, 0, 0, 1, 1]
    rows = KIND.metric_inputs(predicted(rewards, label, [0.4, -0.2, 0.1, 0.3, 0.0]), [])
    names = [name for name in KIND.metrics if name not in KIND.answer_metrics]
    found = metrics.compute(names, rows)
    assert found == pytest.approx(
        {
            **{"accuracy": 0.6, "roc_auc": roc_auc_score(label, rewards), "kl": 0.12, "completion_length": 4.0},
            **{"margin": 0.8 / 3 - 0.05, "desirable_reward": 0.8 / 3, "undesirable_reward": 0.05},
        }
    )
    counts = next(draws(len(rows), 200, 0))
    for name, figure in figures(names, rows).items():
        repeated = [
            metrics.compute([name], rows.take(np.repeat(np.arange(len(rows)), count)))[name] for count in counts[:40]
        ]
        assert figure(counts)[:40] == pytest.approx(repeated, nan_ok=True), name


def test_the_baseline_finds_all_completions_desirable_or_none(tmp_path: Path) -> None:
    tokens = pa.table({"label": pa.array([1, 0, 0], pa.int64())})
    write_arrow(tmp_path / "train.arrow", tokens)
    constant = choose_rival(KIND.baseline(tmp_path, tmp_path, tmp_path, []), "accuracy")
    assert constant.name == "'undesirable'"
    rows = constant.predict(KIND.metric_inputs(predicted([0, 0], [1, 0], [0, 0]), []), "validation")
    assert metrics.compute(["accuracy", "roc_auc"], rows) == {"accuracy": 0.5, "roc_auc": 0.5}


def test_a_divergence_below_zero_counts_as_zero() -> None:
    facts = torch.tensor([[2.0, 1, -3, -4], [0.0, 1, 0, -4], [1.0, 0, -3, -4]])
    assert divergence_sums(torch.tensor([-3.0, 9.0, -4.0]), facts).tolist() == [1.0, 2.0]
    assert divergence(torch.tensor([-1.0, 2.0])).item() == 0.0
