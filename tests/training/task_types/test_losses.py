"""Losses by name and by dotted path, and weights of labels."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import BertConfig, BertForQuestionAnswering
from transformers.trainer_pt_utils import LabelSmoother

from tests.arrow import read_arrow
from tests.raised import raised_problems
from tests.training import own, tiny
from tests.training.forks import curve, finish
from training.batching.batches import IGNORED, TokenRows
from training.problems import UserError
from training.recipe import Training, parse
from training.task_types import load
from training.task_types.losses import target_losses as losses
from training.task_types.task_type import Loss

LABELS = ["a", "b", "c"]
TRAIN = np.array([0] * 6 + [1] * 3 + [2])
COUNTS = np.array([6, 3, 1])
LOGITS = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.5, 0.0], [0.0, 1.0, 3.0], [4.0, 0.0, 0.0]])
ROWS = torch.tensor([0, 1, 2, 1])


def made(**training: Any) -> Loss | None:
    return loss_for("sequence-classification", TRAIN.tolist(), **training)


def loss_for(task: str, given: list[Any], **training: Any) -> Loss | None:
    """The loss of a task type for training rows with these labels."""
    rows = TokenRows(pa.table({"length": pa.array([1] * len(given), pa.int32()), "label": given}))
    return load(task).loss(Training(**training), LABELS, rows, outside=False)


def loss_of(**training: Any) -> float:
    loss = made(**training)
    assert loss is not None
    return float(loss(LOGITS, ROWS))


def refusal(**training: Any) -> tuple[str, str]:
    (problem,) = raised_problems(loss_of, **training)
    return problem.where, problem.message


def test_the_default_is_the_models_own_loss() -> None:
    assert made() is None


def test_focal_loss_is_cross_entropy_with_little_weight_on_what_is_right_already() -> None:
    p = torch.softmax(LOGITS, -1)[torch.arange(4), ROWS]
    assert loss_of(loss="focal") == pytest.approx(float(((1 - p) ** 2 * -p.log()).mean()), rel=1e-6)
    plain = torch.nn.functional.cross_entropy(LOGITS, ROWS)
    assert loss_of(loss="focal", focal_gamma=0.0) == pytest.approx(float(plain), rel=1e-6)


def test_focal_loss_of_a_row_that_is_surely_right_has_a_finite_gradient() -> None:
    logits = torch.tensor([[100.0, 0.0, 0.0]], requires_grad=True)
    loss = made(loss="focal", focal_gamma=0.5)
    assert loss is not None
    loss(logits, torch.tensor([0])).backward()
    assert logits.grad is not None and logits.grad.isfinite().all()


def test_balanced_weights_make_all_labels_count_alike_and_the_average_row_one() -> None:
    weights = losses.class_weights("balanced", LABELS, COUNTS)
    assert weights.tolist() == pytest.approx([10 / 18, 10 / 9, 10 / 3])
    assert weights[TRAIN].mean() == pytest.approx(1.0)


def test_balanced_weights_give_a_label_without_training_rows_that_of_the_average_row() -> None:
    weights = losses.class_weights("balanced", [*LABELS, "unseen"], np.array([*COUNTS, 0]))
    assert weights[:3] == pytest.approx(losses.class_weights("balanced", LABELS, COUNTS))
    assert weights[3] == pytest.approx(1.0)  # its rows of validation would choose the checkpoint alone


def test_only_the_ratios_of_weights_matter_and_labels_left_out_weigh_one() -> None:
    weights = losses.class_weights({"b": 4.0}, LABELS, COUNTS)
    assert weights / weights[0] == pytest.approx(np.array([1.0, 4.0, 1.0]))
    assert losses.class_weights({"a": 2.0, "b": 8.0, "c": 2.0}, LABELS, COUNTS) == pytest.approx(weights)


def test_weights_multiply_the_rows_of_any_loss_smoothing_included() -> None:
    weights = torch.from_numpy(losses.class_weights({"c": 3.0}, LABELS, COUNTS))[ROWS]
    for given, rows in (
        ({"loss": "tests.training.own:hinge"}, own.hinge(LOGITS, ROWS)),
        ({"label_smoothing_factor": 0.1}, losses.cross_entropy(LOGITS, ROWS, smoothing=0.1)),
    ):
        assert loss_of(class_weights={"c": 3.0}, **given) == pytest.approx(float((weights * rows).mean()), rel=1e-6)


def test_a_loss_may_give_each_rows_or_their_mean() -> None:
    one, other = (loss_of(loss=f"tests.training.own:{name}") for name in ("hinge", "mean_hinge"))
    assert one == other


def test_an_unknown_loss_or_label_is_reported() -> None:
    assert refusal(loss="tests.training.own:hing") == (
        "training.loss",
        "'tests.training.own' has no 'hing': it has hinge, mean_hinge, for_each_logit, nll, label_hinge, huber, "
        "twice. Did you mean 'hinge'?",
    )
    where, message = refusal(loss="tests.training.own:one_number")
    assert message.endswith("it must be a function of logits and labels.")
    where, message = refusal(loss="tests.training.own:for_each_logit")
    assert (
        where == "training.loss"
        and "a tensor of shape (4, 3) for logits (4, 3) and labels (4,): it must return a loss for each label, (4,), "
        "or their mean."
        in message
    )
    where, message = refusal(loss="tests.training.own:mean_hinge", class_weights="balanced")
    assert message.endswith("it must return a loss for each label, (4,), because training.class_weights weights them.")
    assert refusal(class_weights={"aa": 1.0}) == (
        "training.class_weights.aa",
        "the data has no such label: choose from a, b, c. Did you mean 'a'?",
    )


# Other targets than one class a row: equal to plain torch, with the gradient

DRAW = torch.Generator().manual_seed(5)
WIDE = torch.randn((4, 3), generator=DRAW) * 2
MANY = torch.tensor([[0, 2], [-1, -1], [1, -1], [0, 1]])  # indices of labels, padded
TRUTHS = torch.tensor([[1.0, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 0]])
ROWS_OF_MANY = [[0], [0, 1], [0], [], [0, 1, 2]]  # 4, 2 and 1 of 5 rows have each label


def require_equal(found: Loss | None, logits: torch.Tensor, labels: torch.Tensor, expected: Any) -> None:
    """Both losses and their gradients by the logits are equal to 1e-6."""
    assert found is not None
    results = []
    for function in (lambda given: found(given, labels), expected):
        given = logits.clone().requires_grad_()
        loss = function(given)
        results.append((loss.detach(), *torch.autograd.grad(loss, given)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def plain_bce(given: torch.Tensor, truths: torch.Tensor = TRUTHS, **settings: Any) -> torch.Tensor:
    return torch.nn.functional.binary_cross_entropy_with_logits(given, truths, **settings)


def sigmoid_focal(given: torch.Tensor, gamma: float, weights: torch.Tensor | float = 1.0) -> torch.Tensor:
    """torchvision.ops.sigmoid_focal_loss without alpha, and with the weights of labels."""
    p = given.sigmoid()
    of_truth = p * TRUTHS + (1 - p) * (1 - TRUTHS)
    return (plain_bce(given, reduction="none") * (1 - of_truth) ** gamma * weights).mean()


@pytest.mark.parametrize("task", ["multi-label-classification", "image-multi-label-classification"])
def test_losses_of_several_labels_a_row_are_those_of_torch_with_pos_weight_and_of_lin(task: str) -> None:
    def of(**training: Any) -> Loss | None:
        return loss_for(task, ROWS_OF_MANY, **training)

    balanced, named = torch.tensor([1 / 4, 3 / 2, 4.0]), torch.tensor([1.0, 5.0, 1.0])
    require_equal(of(), WIDE, MANY, plain_bce)
    require_equal(of(class_weights="balanced"), WIDE, MANY, lambda z: plain_bce(z, pos_weight=balanced))
    require_equal(of(class_weights={"b": 5.0}), WIDE, MANY, lambda z: plain_bce(z, pos_weight=named))
    require_equal(of(loss="focal"), WIDE, MANY, lambda z: sigmoid_focal(z, 2.0))
    weights = torch.where(TRUTHS > 0, named, torch.tensor(1.0))
    weighted = of(loss="focal", focal_gamma=1.5, class_weights={"b": 5.0})
    require_equal(weighted, WIDE, MANY, lambda z: sigmoid_focal(z, 1.5, weights))
    # Smoothing is that of a cross entropy between yes and no, the logit of no being 0.
    pairs = lambda z: torch.stack([torch.zeros_like(z), z], dim=-1).flatten(0, 1)  # noqa: E731
    truths = TRUTHS.flatten().long()
    smooth = lambda z: torch.nn.functional.cross_entropy(pairs(z), truths, label_smoothing=0.2)  # noqa: E731
    require_equal(of(label_smoothing_factor=0.2), WIDE, MANY, smooth)
    hinge = lambda z: (1 - z * (2 * TRUTHS - 1)).clamp(min=0)  # noqa: E731
    require_equal(of(loss="tests.training.own:label_hinge"), WIDE, MANY, lambda z: hinge(z).mean())
    own = of(loss="tests.training.own:label_hinge", class_weights={"b": 5.0})
    require_equal(own, WIDE, MANY, lambda z: (hinge(z) * weights).mean())


def test_balanced_labels_that_all_rows_or_none_have_weigh_one() -> None:
    found = losses.positive_weights("balanced", LABELS, np.array([5, 0, 1]), 5)
    assert found.tolist() == [1.0, 1.0, 4.0]


def test_losses_of_choices_are_those_of_torch_among_the_choices_that_a_row_has() -> None:
    right = torch.tensor([[0.0, 1, 0], [1, 0, torch.nan], [0, 0, 1]])
    logits = WIDE[:3].clone()
    logits[1, 2] = -torch.inf

    def by_row(z: torch.Tensor, **settings: Any) -> torch.Tensor:
        rows = [(z[0], 1), (z[1, :2], 0), (z[2], 2)]
        each = [torch.nn.functional.cross_entropy(row, torch.tensor(place), **settings) for row, place in rows]
        return torch.stack(each)

    def of(**training: Any) -> Loss | None:
        return load("multiple-choice").loss(Training(**training), [], None, outside=False)  # type: ignore[arg-type]

    require_equal(of(), logits, right, lambda z: by_row(z).mean())
    smoothed = of(label_smoothing_factor=0.1)
    require_equal(smoothed, logits, right, lambda z: by_row(z, label_smoothing=0.1).mean())
    p = lambda z: torch.exp(-by_row(z))  # noqa: E731
    require_equal(of(loss="focal"), logits, right, lambda z: ((1 - p(z)) ** 2 * by_row(z)).mean())
    require_equal(of(loss="tests.training.own:nll"), logits, right, lambda z: by_row(z).mean())


def test_losses_of_answers_are_those_of_torch_for_their_first_and_last_token() -> None:
    logits, places = torch.randn((3, 2, 7), generator=DRAW), torch.tensor([[2, 4], [0, 0], [6, 6]])

    def plain(z: torch.Tensor, **settings: Any) -> torch.Tensor:
        ends = [torch.nn.functional.cross_entropy(z[:, end], places[:, end], **settings) for end in (0, 1)]
        return (ends[0] + ends[1]) / 2  # as models of transformers add them

    def of(**training: Any) -> Loss | None:
        return load("question-answering").loss(Training(**training), [], None, outside=False)  # type: ignore[arg-type]

    require_equal(of(), logits, places, plain)
    smoothed = of(label_smoothing_factor=0.1)
    require_equal(smoothed, logits, places, lambda z: plain(z, label_smoothing=0.1))
    require_equal(of(loss="tests.training.own:nll"), logits, places, plain)
    require_equal(of(loss="focal", focal_gamma=0.0), logits, places, plain)


def test_the_loss_of_an_answer_does_not_depend_on_the_padding_of_its_window() -> None:
    task_type = load("question-answering")
    loss = task_type.loss(Training(label_smoothing_factor=0.1), [], None, outside=False)  # type: ignore[arg-type]
    config = BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    network = BertForQuestionAnswering(config).eval()
    tokens, labels = torch.tensor([[2, 5, 3, 7, 9, 3]]), torch.tensor([[3, 4]])

    def of(padding: int) -> torch.Tensor:
        ids = torch.nn.functional.pad(tokens, (0, padding))
        batch = {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}
        assert loss is not None
        return loss(task_type.forward(network, batch)["logits"], labels)

    torch.testing.assert_close(of(padding=9), of(padding=0))


@pytest.mark.parametrize(("task", "shift"), [("causal-lm", True), ("masked-lm", False), ("seq2seq", False)])
def test_losses_of_tokens_are_those_of_torch_and_smoothing_that_of_transformers(task: str, shift: bool) -> None:
    logits = torch.randn((2, 5, 6), generator=DRAW)
    labels = torch.tensor([[IGNORED, 3, 1, IGNORED, 0], [2, 5, IGNORED, IGNORED, IGNORED]])

    def plain(z: torch.Tensor) -> torch.Tensor:
        kept, wanted = (z[:, :-1], labels[:, 1:]) if shift else (z, labels)
        loss = torch.nn.functional.cross_entropy(kept.flatten(0, 1), wanted.flatten(), reduction="none")
        return loss[wanted.flatten() != IGNORED]

    def of(**training: Any) -> Loss | None:
        return load(task).loss(Training(**training), [], None, outside=True)  # type: ignore[arg-type]

    require_equal(of(), logits, labels, lambda z: plain(z).mean())
    smoother = LabelSmoother(0.1)
    smoothed = of(label_smoothing_factor=0.1)
    require_equal(smoothed, logits, labels, lambda z: smoother({"logits": z}, labels, shift_labels=shift))
    focal = of(loss="focal")
    require_equal(focal, logits, labels, lambda z: ((1 - torch.exp(-plain(z))) ** 2 * plain(z)).mean())
    require_equal(of(loss="tests.training.own:nll"), logits, labels, lambda z: plain(z).mean())
    nothing = of(loss="focal")
    assert nothing is not None and nothing(logits, torch.full_like(labels, IGNORED)) == 0


@pytest.mark.parametrize("task", ["regression", "image-regression"])
def test_a_loss_of_the_users_replaces_the_squared_error_of_numbers(task: str) -> None:
    logits, labels = torch.randn((5, 1), generator=DRAW) * 3, torch.randn((5,), generator=DRAW)
    own = loss_for(task, [0.5] * 3, loss="tests.training.own:huber")
    require_equal(own, logits, labels, lambda z: torch.nn.functional.huber_loss(z[:, 0], labels))
    assert loss_for(task, [0.5]) is None  # the model's own


def test_the_example_of_a_task_type_takes_losses_of_binary_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "deployments/examples"))
    task_type = load("ordinal_regression:OrdinalRegression")
    above = torch.tensor([[0.0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]])
    cases: list[tuple[dict[str, Any], Any]] = [
        ({}, lambda z: plain_bce(z, above)),
        ({"label_smoothing_factor": 0.2}, lambda z: plain_bce(z, above * 0.8 + 0.1)),
        ({"loss": "focal", "focal_gamma": 0.0}, lambda z: plain_bce(z, above)),
    ]
    for training, expected in cases:
        found = task_type.loss(Training(**training), ["1", "2", "3", "4"], None, outside=False)  # type: ignore[arg-type]
        require_equal(found, WIDE, torch.arange(4), expected)


def fields_refused(task: str) -> dict[str, str]:
    """The messages for a recipe that sets all fields about the loss, by the field."""
    recipe: dict[str, Any] = {
        "name": "it",
        "task": f"tests.training.own:{task}",
        "data": {"source": "csv", "path": "it.csv", "text": ["text"], "label": "label"},
        "model": {"source": "hub", "path": "me/it"},
        "training": {"loss": "focal", "focal_gamma": 1.0, "class_weights": "balanced"},
    }
    try:
        parse(recipe)
    except UserError as error:
        return {problem.where: problem.message for problem in error.problems}
    return {}


@pytest.mark.parametrize("task", ["Unsure", "UnsureToo"])
def test_fields_that_the_own_loss_of_an_inherited_task_type_ignores_are_refused(task: str) -> None:
    found = fields_refused(task)
    assert found.keys() == {"training.loss", "training.focal_gamma", "training.class_weights"}
    assert found["training.loss"] == (
        f"does nothing with task tests.training.own:{task}, which has a loss of its own (if it calls super().loss, "
        'declare target_form = "classes" in its class): leave it out, or set it to cross_entropy.'
    )


def test_a_loss_of_its_own_that_is_the_recipes_takes_them_by_declaring_the_form_again() -> None:
    assert fields_refused("Doubtful") == {}
    rows = TokenRows(pa.table({"length": pa.array([1], pa.int32()), "label": [0]}))
    focal = load("tests.training.own:Doubtful").loss(Training(loss="focal"), LABELS, rows, outside=False)
    assert focal is not None and float(focal(LOGITS, ROWS)) == pytest.approx(2 * loss_of(loss="focal"))


@pytest.mark.slow
@pytest.mark.parametrize("task", ["sequence-classification", "multi-label-classification"])
def test_weighted_focal_loss_learns_the_same_from_micro_batches_and_ranks_as_from_whole_steps(
    world: Path, tmp_path: Path, task: str
) -> None:
    """Without dropout; 150 rows by 12 leave a last step of unequal shares, and labels are spread as they fall."""
    tokens = world / f"tokens-{task}"
    for split in ("train", "validation"):
        rows = read_arrow(world / f"tokens/{split}.arrow")
        labels = rows["label"].to_pylist()
        if task == "multi-label-classification":  # none, one or two of three
            labels = [[*{label, number % 3}][: number % 4] for number, label in enumerate(labels)]
        tiny.write_tokens(tokens, rows["input_ids"].to_pylist(), labels, split)
    base = world / "base-without-dropout"
    shutil.copytree(world / "base", base, dirs_exist_ok=True)
    config = json.loads((base / "model/config.json").read_text())
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (base / "model/config.json").write_text(json.dumps(config | quiet))
    found = []
    for processes, batch, accumulation in ((1, 12, 1), (1, 5, 3), (2, 2, 3)):
        settings = {"loss": "focal", "class_weights": {"tool": 5.0}, "num_train_epochs": 1, "logging_steps": 1}
        settings |= {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
        if batch == 5:  # the same steps, cut unevenly, as when memory is short
            settings |= {"per_device_train_batch_size": 12, "gradient_accumulation_steps": 1}
        job_dir = tiny.fit_job(
            world,
            tmp_path / f"{processes}-{batch}",
            base=base.name,
            tokens=tokens.name,
            settings={"task": task, "metrics": ["accuracy"]},
            processes=processes,
            division=3 if batch == 5 else 1,
            **settings,
        )
        assert finish(job_dir).state == "finished"
        found.append({step: point.get("train_loss") for step, point in curve(job_dir).items()})
    assert len(found[0]) == 13 and found[0].keys() == found[1].keys() == found[2].keys()
    for other in found[1:]:
        assert list(other.values()) == pytest.approx(list(found[0].values()), rel=1e-4)
