"""Preference tuning: TRL's losses and gradients, pairs as texts and as messages, exact training, rewards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests import fork_server
from tests import task_types as tiny_tasks
from tests.arrow import read_arrow, write_arrow
from tests.training import programs_here
from tests.training.data.test_forms import json_lines, problems_of, run
from tests.training.forks import assert_resumes, curve, finish, weights
from tests.training.programs_here import COMPARE, folders
from tests.training.task_types import preference_model
from tests.training.task_types.test_sft import AGAIN, BOT, CHATML, LAST, MARKED, REWRITES, USER, words
from training import task_types
from training.batching.batches import TokenRows
from training.engine.predictor import Predictor
from training.evaluation import metrics
from training.evaluation.baseline import choose_rival
from training.models.loading import load_tokenizer
from training.problems import UserError
from training.programs import compare
from training.recipe import Training
from training.task_types.losses.preference_loss import PreferenceLoss
from training.task_types.preference import WITH_REFERENCE, Preference
from training.task_types.reward_modeling import RewardModeling
from training.task_types.task_type import BaseReference
from training.tokenization import token_files
from training.tokenization.encoder import load_fast_encoder
from training.tokenization.features import RefusedRows
from training.tokenization.preference_rows import find_row_problem, parse_rows

FIGURES = json.loads(preference_model.FIGURES.read_text())
LOSSES = list(preference_model.SETTINGS)
KIND = Preference()


def made(loss: str) -> Preference:
    return Preference({"loss": loss, **preference_model.SETTINGS[loss]})


def record(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    """Rows as load_data stores them."""
    return pa.record_batch({name: [json.dumps(row[name]) for row in rows] for name in rows[0]})


def token_rows(task: Preference, folder: Path) -> TokenRows:
    """The pairs of preference_model in tokens, with the reference if the loss has one."""
    table = pa.Table.from_batches([task.features(load_fast_encoder(folder, 32), record(preference_model.PAIRS)).rows])
    if task.needs_reference:
        batch, reference = collated(task, TokenRows(table), folder), preference_model.model(0.4).eval()
        with torch.no_grad():
            predictions = task.predictions(reference, task.forward(reference, batch), batch)
        for name, values in task.reference_columns(pa.Table.from_batches([predictions])).items():
            table = table.append_column(name, values)
    return TokenRows(table)


def collated(task: Preference, rows: TokenRows, folder: Path, chosen: list[int] | None = None) -> Any:
    numbers = range(len(rows)) if chosen is None else chosen
    return task.collator(load_tokenizer(folder), 1)([rows[number] for number in numbers])


def mean_loss(task: Preference, model: Any, batch: Any) -> torch.Tensor:
    loss = task.loss(Training(), [], TokenRows(pa.table({"length": [1]})), outside=False)
    assert loss is not None
    return loss(task.forward(model, batch)["logits"], batch["labels"])


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_gradients_are_those_of_trl(loss: str, tmp_path: Path) -> None:
    task, folder, model = made(loss), preference_model.tokenizer(tmp_path), preference_model.model(0.0).train()
    found = mean_loss(task, model, collated(task, token_rows(task, folder), folder))
    found.backward()
    expected, gradients = FIGURES["losses"][loss], preference_model.gradients(model)
    assert found.item() == pytest.approx(expected["loss"], abs=1e-5)
    assert gradients.keys() == expected["gradients"].keys()
    for name, values in gradients.items():
        assert values == pytest.approx(expected["gradients"][name], abs=1e-5), name


@pytest.mark.parametrize("loss", LOSSES)
def test_a_pair_weighs_the_same_however_the_pairs_of_a_step_are_divided(loss: str, tmp_path: Path) -> None:
    task, folder, model = made(loss), preference_model.tokenizer(tmp_path), preference_model.model(0.0)
    rows = token_rows(task, folder)
    whole = mean_loss(task, model, collated(task, rows, folder))
    parts = [collated(task, rows, folder, part) for part in ([0], [1, 3], [2])]
    counted = sum(mean_loss(task, model, part).item() * task.target_count(part) for part in parts)
    assert counted / len(rows) == pytest.approx(whole.item(), rel=1e-6)


def test_a_pair_is_its_prompt_with_either_answer_and_their_ends_in_tokens(tmp_path: Path) -> None:
    rows = KIND.features(
        load_fast_encoder(words(tmp_path / "it"), 64), record([{"prompt": "b c", "chosen": " d", "rejected": " e f"}])
    )
    assert rows.rows.to_pylist() == [
        {
            **{"input_ids": [5, 6, 7, 1, 5, 6, 8, 9, 1], "of_answer": [0, 0, 1, 1, 0, 0, 1, 1, 1]},
            **{"chosen_length": 4, "chosen_tokens": 2, "rejected_tokens": 3, "length": 9, "targets": 1},
        }
    ]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_messages_and_texts_with_messages_are_rendered_as_conversations(template: str, tmp_path: Path) -> None:
    encoder, other = load_fast_encoder(words(tmp_path / "it", template), 64), {"role": "assistant", "content": "h"}
    forms = [
        {"prompt": [USER], "chosen": [BOT], "rejected": [other]},
        {"prompt": "b c", "chosen": [USER, BOT], "rejected": [USER, other]},
        {"prompt": [USER], "chosen": "d", "rejected": "h"},
    ]
    first, *others = KIND.features(encoder, record(forms)).rows.to_pylist()
    assert others == [first, first]
    chosen = [0, 2, 5, 6, 1, 0, 3, 7, 1]
    assert first["input_ids"] == [*chosen, *chosen[:-2], 11, 1]
    assert (first["chosen_length"], first["chosen_tokens"]) == (9, 2)


@pytest.mark.parametrize("task", [Preference(), RewardModeling()])
def test_a_prompt_that_both_answers_repeat_is_read_once_and_the_rows_are_counted(task: Any, tmp_path: Path) -> None:
    encoder = load_fast_encoder(words(tmp_path / "it", None), 64)
    plain = {"prompt": "b c ", "chosen": "d", "rejected": "e f"}
    repeated = {"prompt": "b c ", "chosen": "b c d", "rejected": "b c e f"}
    once = plain | {"chosen": "b c d"}
    greeting = {"prompt": "b ", "chosen": "b c", "rejected": "b d"}  # an answer may begin with one word of its prompt
    expected = task.features(encoder, record([plain]))
    found = task.features(encoder, record([repeated, once, greeting]))
    assert found.rows.to_pylist()[0] == expected.rows.to_pylist()[0]
    assert found.rows["input_ids"][2].as_py() == [5, 5, 6, 1, 5, 5, 7, 1]
    assert dict(found.remarks) == {"repeated": 1, "repeated_once": 1, "joined": 0, "same_tokens": 0}
    assert dict(expected.remarks) == {"joined": 0, "same_tokens": 0}
    empty = {"prompt": "b c", "chosen": "b c", "rejected": "b c e"}
    (problem,) = [find_row_problem(values, ["chosen", "rejected"]) for values in parse_rows(record([empty]))]
    assert problem == "chosen is empty"


@pytest.mark.parametrize("task", [Preference(), RewardModeling()])
def test_pairs_whose_answers_have_the_same_tokens_after_the_cut_are_counted(task: Any, tmp_path: Path) -> None:
    long = {"prompt": "b c", "chosen": " d d d d d d e", "rejected": " d d d d d d f"}
    short, cut_off = long | {"chosen": " d", "rejected": " e"}, long | {"prompt": "b c d e f b c d e f"}
    found = task.features(load_fast_encoder(words(tmp_path / "it", None), 8), record([long, short, cut_off]))
    assert found.remarks["same_tokens"] == 1  # without the pair that has lost its answers, which is reported as such


def test_a_conversation_is_tuned_by_its_last_answer_alone_also_if_earlier_ones_are_rewritten(tmp_path: Path) -> None:
    hides = CHATML.replace("{{ m.content }}", "{{ m.content if m.role == 'user' or loop.last else 'h' }}")
    row = {"prompt": [USER, BOT, AGAIN], "chosen": [LAST], "rejected": [BOT]}
    for template in (CHATML, MARKED, hides):
        encoder = load_fast_encoder(words(tmp_path / str(len(template)), template), 64)
        (found,) = KIND.features(encoder, record([row])).rows.to_pylist()
        assert (found["chosen_tokens"], found["rejected_tokens"]) == (3, 2)
        (prompt,) = KIND.prompts(encoder, record([row]), KIND.options.settings_for(preference_model.model(0.0)))
        assert prompt.ids.tolist() == found["input_ids"][: found["chosen_length"] - 3]
    text = {"prompt": "b", "chosen": "c", "rejected": "d"}
    with pytest.raises(RefusedRows, match=r"changes message 4 of the conversation 'b c'") as refused:
        KIND.features(load_fast_encoder(words(tmp_path / "rewrites", REWRITES), 64), record([text, row, row]))
    assert refused.value.rows == [1, 2]


FUNCTION = {"name": "c", "arguments": {"d": "e"}}
CALLS_C = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": FUNCTION}]}
TOOLS = [{"type": "function", "function": {"name": "c", "parameters": {"type": "object"}}}]
WITH_TOOLS = CHATML.replace(
    "{{ m.content }}", "{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function | tojson }} {% endfor %}"
)
WITH_TOOLS = "{{ tools | tojson if tools }}" + WITH_TOOLS


def test_rows_with_tools_that_a_template_does_not_write_are_named_and_texts_with_tools_are_rendered(
    tmp_path: Path,
) -> None:
    rows = [
        {"prompt": "b c", "chosen": "d", "rejected": "e", "tools": None},
        {"prompt": "b c", "chosen": [CALLS_C], "rejected": "e", "tools": TOOLS},
        {"prompt": "b c", "chosen": "d", "rejected": "e", "tools": TOOLS},
    ]
    batch = record(rows)
    with pytest.raises(RefusedRows) as refused:
        KIND.features(load_fast_encoder(words(tmp_path / "it"), 64), batch)
    assert refused.value.rows == [1, 2]
    encoder = load_fast_encoder(words(tmp_path / "tools", WITH_TOOLS), 64)
    found = KIND.features(encoder, batch).rows["input_ids"].to_pylist()
    assert [0 in ids for ids in found] == [False, True, True]  # the mark before a message
    assert KIND.is_rendered(batch).tolist() == [False, True, True]


def test_openais_rows_with_calls_and_tools_are_read_and_a_row_with_a_wrong_one_is_named(tmp_path: Path) -> None:
    spelt = {**CALLS_C, "content": None}
    spelt["tool_calls"] = [{"type": "function", "function": {"name": "c", "arguments": json.dumps({"d": "e"})}}]
    asked = {"messages": [USER], "tools": TOOLS, "parallel_tool_calls": False}
    row = {"input": asked, "preferred_output": [spelt], "non_preferred_output": [BOT]}
    other = [{"type": "function", "function": {"name": "c", "arguments": "{}"}}]
    good = [row, {**row, "non_preferred_output": [{**CALLS_C, "tool_calls": other}]}]
    wrong = [
        {**row, "input": {**asked, "tools": [{"type": "function"}]}},
        {**row, "preferred_output": [{**spelt, "tool_calls": [{"function": {"name": "c", "arguments": "["}}]}]},
        {**row, "non_preferred_output": [spelt]},
    ]
    columns = {"prompt": "input", "chosen": "preferred_output", "rejected": "non_preferred_output"}
    nameless, *others = problems_of(KIND, [*good, *wrong], tmp_path, columns=columns)
    assert nameless.startswith("pairs row 3: has no prompt with two answers (the tools: tool 1 has no name")
    assert others == [
        "pairs row 4: has no prompt with two answers (chosen: message 1, by 'assistant', calls 'c' with arguments that "
        "are no JSON object)",
        "equal_answers row 5: has two equal answers",
    ]
    run(KIND, json_lines(tmp_path / "good.jsonl", good), tmp_path / "out", columns=columns)
    (first, _) = parse_rows(read_arrow(tmp_path / "out/train.arrow").to_batches()[0])
    assert (first.prompt, first.answers, first.tools) == ([USER], [[CALLS_C], [BOT]], TOOLS)


def test_messages_without_a_chat_template_are_refused(tmp_path: Path) -> None:
    encoder = load_fast_encoder(words(tmp_path / "it", None), 64)
    with pytest.raises(UserError, match=r"model\.chat_template: is missing"):
        KIND.features(encoder, record([{"prompt": [USER], "chosen": [BOT], "rejected": [LAST]}]))


def test_rows_that_are_no_pairs_are_named_and_equal_answers_are_left_out(tmp_path: Path) -> None:
    good = {"prompt": "b", "chosen": "c", "rejected": "d"}
    wrong = [
        {"prompt": " b", "chosen": " ", "rejected": "d"},
        {"prompt": [USER, BOT], "chosen": "c", "rejected": "d"},
        {"prompt": [USER], "chosen": [USER], "rejected": "d"},
        {"prompt": [USER], "chosen": [USER, BOT, AGAIN, LAST], "rejected": "d"},
        {"prompt": 3, "chosen": "c", "rejected": "d"},
    ]
    reasons = [
        "chosen is empty",
        "the prompt: its last message is by 'assistant', and must be one that is answered",
        "chosen: its last message is by 'user', and must be by 'assistant'",
        "chosen has 4 messages, and must be a text, or one message by 'assistant', perhaps after the messages of the "
        "prompt",
        "the prompt: it is a number, and must be a list of messages",
    ]
    assert problems_of(KIND, [good, *wrong], tmp_path) == [
        f"pairs row {number}: has no prompt with two answers ({reason})" for number, reason in enumerate(reasons, 2)
    ]
    equal = {"prompt": [USER], "chosen": "d", "rejected": [USER, BOT]}
    assert problems_of(KIND, [good, equal], tmp_path) == ["equal_answers row 2: has two equal answers"]


def test_cells_of_csv_are_texts_unless_they_hold_messages(tmp_path: Path) -> None:
    texts, messages = ["b", 'say "c"', "[d]"], [[USER], [BOT], [LAST]]
    file = tmp_path / "rows.csv"
    spelt = [
        ",".join('"' + cell.replace('"', '""') + '"' for cell in row) for row in (texts, map(json.dumps, messages))
    ]
    file.write_text("\n".join(["prompt,chosen,rejected", *spelt]) + "\n")
    run(KIND, str(file), tmp_path / "out", source="csv")
    stored = read_arrow(tmp_path / "out/train.arrow").to_pylist()
    assert [list(map(json.loads, row.values())) for row in stored] == [texts, messages]


def test_a_pair_that_loses_an_answer_is_not_trained_on_and_the_report_names_the_limit(tmp_path: Path) -> None:
    folder, data = words(tmp_path / "it"), tmp_path / "data"
    data.mkdir()
    rows = [
        {"prompt": "b c", "chosen": " d", "rejected": " e f"},
        {"prompt": "b c d e f g h i", "chosen": " d", "rejected": " e"},
    ]
    for split in ("train", "validation"):
        with pa.ipc.new_file(data / f"{split}.arrow", (batch := record(rows)).schema) as writer:
            writer.write(batch)
    token_files.tokenize(KIND, data, folder, tmp_path / "tokens", 8)
    train = TokenRows(tmp_path / "tokens/train.arrow")
    assert train.targets.tolist() == [1, 0] and train.lengths.tolist() == [9, 16]
    report = json.loads((tmp_path / "tokens/log/report.json").read_text())
    cut = next(one["message"] for one in report["problems"] if "rows of train (" in one["message"])
    assert cut.startswith("8 cuts 1 of 2 rows of train") and "10 would keep all" in cut
    model, task = preference_model.model(0.0), Preference({"loss": "orpo"})
    alone, both = (collated(task, train, folder, part) for part in ([1], [0, 1]))
    assert (task.target_count(alone), task.target_count(both)) == (0, 1)
    assert mean_loss(task, model, alone).item() == 0.0
    assert mean_loss(task, model, both).item() == mean_loss(task, model, collated(task, train, folder, [0])).item()
    mean_loss(task, model, alone).backward()
    assert all(weight.grad is not None and not weight.grad.any() for weight in model.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "robust"}, "options.label_smoothing: 0.0: makes robust the same as dpo"),
        ({"label_smoothing": 0.1}, "options.label_smoothing: 0.1: does nothing with `loss: dpo`"),
        ({"loss": "ipo", "simpo_gamma": 1.0}, "options.simpo_gamma: 1.0: does nothing with `loss: ipo`"),
        ({"packing": True}, "options.packing"),
        ({"loss": "sigmoid"}, "options.loss"),
        ({"beta": 0.0}, "options.beta"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(options: dict[str, Any], message: str) -> None:
    from training.recipe import parse

    recipe = tiny_tasks.recipe_of("preference", Path("rows"))
    with pytest.raises(UserError) as refused:
        parse(recipe | {"options": options})
    assert message in str(refused.value)


def test_odds_of_a_certain_answer_are_finite() -> None:
    scores = torch.tensor([[0.0, -3.0, -1.0]], requires_grad=True)
    found = PreferenceLoss("orpo", 0.1, 0.0, 0.5)(scores, torch.tensor([[2.0, 2.0, 4.0]]))
    found.backward()
    assert found.isfinite() and scores.grad is not None and scores.grad.isfinite().all()


# Training


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(fork_server.call(tiny_tasks.make_world, "preference", tmp_path_factory.mktemp("pairs") / "world"))


def fit_job(world: Path, job_dir: Path, processes: int = 1, engine: str = "trainer", **options: Any) -> Path:
    """A job of 3 epochs in steps of 20 pairs, in two micro-batches for each process."""
    training = {"num_train_epochs": 3, "gradient_accumulation_steps": 2, "checkpoint_interval_s": 0.05}
    training |= {"per_device_train_batch_size": 10 // processes, "logging_steps": 1, "engine": engine}
    compute = {"strategy": "ddp", "num_processes": processes, "mixed_precision": "no"}
    recipe = tiny_tasks.recipe_of("preference", world / "rows", **training)
    recipe |= {"compute": compute, "options": {**recipe["options"], **options}}
    return tiny_tasks.write_fit_job(recipe, world, job_dir)


@pytest.fixture(scope="module")
def trained(pairs: Path) -> Path:
    """A job that ran to its end undisturbed."""
    job = fit_job(pairs, pairs / "whole")
    assert finish(job).state == "finished"
    return job


@pytest.mark.slow
def test_killed_within_an_epoch_it_ends_with_the_same_bytes(pairs: Path, trained: Path, tmp_path: Path) -> None:
    killed = fit_job(pairs, tmp_path / "killed")
    assert_resumes(killed, trained, after=3)


def test_the_plain_loop_learns_the_same_bytes_as_the_trainer(pairs: Path, trained: Path, tmp_path: Path) -> None:
    plain = fit_job(pairs, tmp_path / "plain", engine="accelerate")
    assert finish(plain).state == "finished"
    assert weights(plain) == weights(trained)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"loss": "orpo"}])
def test_two_processes_learn_what_one_learns(
    options: dict[str, Any], pairs: Path, trained: Path, tmp_path: Path
) -> None:
    alone, both = (fit_job(pairs, tmp_path / str(count), count, **options) for count in (1, 2))
    for job in (alone, both) if options else (both,):
        assert finish(job).state == "finished"
    one, two = map(curve, (alone if options else trained, both))
    assert one.keys() == two.keys() and len(one) == 24
    for step, figures in one.items():
        both = {name: two[step][name] for name in figures if "loss" in name or "accuracy" in name}
        assert both == pytest.approx({name: figures[name] for name in both}, rel=1e-4, abs=1e-5)


def test_training_starts_where_the_reference_is_and_leaves_it_for_the_chosen_answers(
    pairs: Path, trained: Path
) -> None:
    points = curve(trained)
    assert points[1]["train_loss"] == pytest.approx(np.log(2), abs=1e-5)
    last = points[max(points)]
    assert last["eval_loss"] < np.log(2) and last["eval_accuracy"] > 0.7 and last["eval_margin"] > 0


def test_a_prompt_alone_is_answered_and_a_pair_gets_the_log_probabilities_of_its_answers(trained: Path) -> None:
    task, folder = Preference({"max_new_tokens": 5, "min_new_tokens": 3}), trained / "output/model"
    row = {"prompt": "cat dog", "chosen": " Katze Hund", "rejected": " rot"}
    (pair,) = Predictor(task, folder, folder, 32).predict(record([row]))
    (alone,) = Predictor(task, folder, folder, 32).predict(record([{"prompt": row["prompt"]}]))
    assert pair["targets"] > 0 and pair["chosen_logp"] < 0 and pair["rejected_logp"] < 0
    assert alone["targets"] == 0 and alone["chosen_logp"] is None
    assert pair["generated_text"] == alone["generated_text"] != ""
    assert task.lines(alone) == [alone["generated_text"]]
    assert task.same_prediction(pair, pair, 1e-4) and task.same_prediction(alone, alone, 1e-4)
    assert task.same_prediction(alone, pair, 1e-4)  # as MLflow serves it
    assert not task.same_prediction(alone | {"generated_text": "else"}, pair, 1e-4)
    assert not task.same_prediction(pair, pair | {"chosen_logp": pair["chosen_logp"] - 50}, 1e-4)


# Evaluation


def predicted(margins: list[float], tokens: list[tuple[int, int]] | None = None, reference: bool = True) -> pa.Table:
    """Stored predictions whose rewards of chosen answers are ahead by these margins, with beta 0.1."""
    count = np.array(tokens or [(2, 2)] * len(margins), np.int64)
    columns = {"chosen_logp": np.array(margins) * 10 - 5.0, "rejected_logp": np.full(len(margins), -7.0)}
    columns |= {"chosen_tokens": count[:, 0], "rejected_tokens": count[:, 1]}
    if reference:
        references = {"reference_chosen_logp": -5.0, "reference_rejected_logp": -7.0}
        columns |= {name: np.full(len(margins), value, np.float32) for name, value in references.items()}
    return pa.table(columns)


def test_metrics_are_those_of_rewards_against_the_reference() -> None:
    rows = predicted([0.5, -0.2, 0.1, 0.4], [(3, 2), (2, 3), (1, 4), (0, 2)])
    names = [name for name in KIND.metrics if name not in KIND.answer_metrics]
    found = metrics.compute(names, KIND.metric_inputs(rows, []))
    assert found == pytest.approx(
        {
            **{"accuracy": 0.5, "margin": 0.1, "chosen_reward": 0.1, "rejected_reward": 0.0},  # the last has no answer
            **{"chosen_length": 1.5, "rejected_length": 2.75, "longer_preferred": 0.625},
        }
    )


def test_rewards_without_a_reference_are_mean_log_probabilities() -> None:
    task = Preference({"loss": "simpo", "beta": 2.0})
    found = task.metric_inputs(predicted([0.5], [(5, 7)], reference=False), [])
    assert found.chosen_rewards.tolist() == [0.0] and found.rejected_rewards.tolist() == [-2.0]


def test_the_baseline_prefers_by_length_and_has_no_margin(tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    tokens = pa.table(
        {"chosen_tokens": pa.array([5, 4, 3], pa.int32()), "rejected_tokens": pa.array([1, 2, 9], pa.int32())}
    )
    write_arrow(tmp_path / "tokens/train.arrow", tokens)
    constant = choose_rival(KIND.baseline(tmp_path, tmp_path / "tokens", tmp_path, []), "accuracy")
    assert constant.name == "'the longer one'"
    rows = constant.predict(KIND.metric_inputs(predicted([0, 0], [(4, 1), (1, 4)]), []), "validation")
    assert metrics.compute(["accuracy", "margin"], rows) == pytest.approx({"accuracy": 0.5, "margin": 0.0}, abs=1e-6)


def test_a_champion_is_compared_from_the_reference_of_the_new_model(tmp_path: Path) -> None:
    margins = np.linspace(-0.2, 1.0, 60)
    for folder, table in {
        "predictions": predicted(margins.tolist()),
        "champion": predicted((margins - 0.5).tolist(), reference=False),
    }.items():
        (tmp_path / folder).mkdir()
        pq.write_table(table, tmp_path / folder / "test.parquet")
    data = pa.Table.from_batches([record([{"prompt": "b", "chosen": "c", "rejected": "d"}] * 60)])
    write_arrow(tmp_path / "data/test.arrow", data)
    (tmp_path / "data/labels.json").write_text("[]")
    inputs = folders(tmp_path, "predictions", "champion", "data")
    found = programs_here.run(compare, tmp_path / "job", inputs, task="preference", **COMPARE)
    assert found["better"] and found["method"] == "mcnemar"
    assert (found["value"], found["champion_value"]) == ((margins > 0).mean(), (margins > 0.5).mean())


def test_losses_with_a_reference_are_those_that_compare_with_one() -> None:
    assert {loss for loss in LOSSES if made(loss).needs_reference} == {*WITH_REFERENCE}
    assert not isinstance(task_types.load("sft"), BaseReference)
