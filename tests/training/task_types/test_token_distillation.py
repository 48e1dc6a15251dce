"""A teacher's distributions of tokens: TRL's losses and gradients, and the bound on what stored tokens lack."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.training.task_types import preference_model
from tests.training.task_types.test_preference import FIGURES
from training.batching.batches import IGNORED
from training.task_types.losses import token_distillation
from training.task_types.losses.token_distillation import (
    IDS,
    LOGPS,
    Divergence,
    TokenDistillationLoss,
    add_tokens,
    divergence_of,
    top_tokens,
)
from training.task_types.losses.token_likelihood import TokenLoss, shift_labels

DIVERGENCES: tuple[Divergence, ...] = ("forward_kl", "reverse_kl", "jsd")
BETA = 0.3
VOCABULARY = len(preference_model.WORDS)


def make_loss(divergence: Divergence, *, beta: float = BETA, temperature: float = 1.0, weight: float = 1.0) -> Any:
    return TokenDistillationLoss(TokenLoss(causal=True, smoothing=0.0), True, divergence, beta, temperature, weight)


def stored(teacher: torch.Tensor, labels: torch.Tensor, top_k: int, temperature: float = 1.0) -> torch.Tensor:
    """The labels of a batch with the teacher's tokens, of its logits (B, T, V)."""
    rows = []
    for logits, targets in zip(teacher, shift_labels(labels), strict=True):
        ids, logps = top_tokens(logits[targets != IGNORED], top_k, temperature, logits.shape[1])
        rows.append({IDS: ids.flatten().numpy(), LOGPS: logps.flatten().numpy()})
    return add_tokens(labels, rows)


@pytest.mark.parametrize("case", preference_model.GKD)
def test_losses_and_gradients_are_those_of_trl_if_all_tokens_are_stored(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_distillation, "TARGETS_AT_ONCE", 4)  # of 12 targets
    beta, temperature = preference_model.GKD[case].values()
    name = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd")
    model, teacher = preference_model.model(0.0), preference_model.model(preference_model.TEACHER_SHIFT)
    ids, labels = torch.tensor(preference_model.TOKENS), torch.tensor(preference_model.TARGETS)
    with torch.no_grad():
        packed = stored(teacher(ids).logits, labels, VOCABULARY, temperature)
    loss = make_loss(name, beta=beta, temperature=temperature)  # type: ignore[arg-type]
    found = loss(model(ids).logits, packed) / temperature**2
    found.backward()
    expected, gradients = FIGURES["losses"][case], preference_model.gradients(model)
    assert found.item() == pytest.approx(expected["loss"], abs=1e-6)
    for weight, values in gradients.items():
        assert values == pytest.approx(expected["gradients"][weight], abs=1e-5), weight


def log_probabilities_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The log-probabilities of these tokens and of the rest, (N, K + 1), of logits (N, V)."""
    rest = logits.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([logits.gather(1, ids), rest], dim=1) - logits.logsumexp(1, keepdim=True)


def zipf(rows: int, size: int, sharpness: float, seed: int) -> torch.Tensor:
    """Logits of distributions like those of texts: ranks by Zipf's law, in another order for each row, with noise."""
    random = torch.Generator().manual_seed(seed)
    order = torch.stack([torch.randperm(size, generator=random) for _ in range(rows)])
    return -sharpness * (order + 1.0).log() + torch.randn(rows, size, generator=random)


def pairs_of_logits() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The logits of teachers and models, (N, V) each: independent ones, near ones, and those of two networks."""
    random = torch.Generator().manual_seed(0)
    sharp = 6 * torch.randn(40, 500, generator=random)
    ids = torch.tensor(preference_model.TOKENS)
    with torch.no_grad():
        networks = [preference_model.model(shift)(ids).logits.flatten(0, 1) * 4 for shift in (1.0, 2.5)]
    return [
        (sharp, 3 * torch.randn(40, 500, generator=random)),
        (zipf(40, 500, 1.2, 1), zipf(40, 500, 1.0, 2)),
        (zipf(40, 500, 2.0, 3), zipf(40, 500, 2.0, 3) + 0.5 * torch.randn(40, 500, generator=random)),
        (networks[0], networks[1]),
    ]


def missing_at_most(name: Divergence, p: torch.Tensor, model: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """(N,) the bound of what a divergence lacks, of stored probabilities (N, K + 1) and the model's logits (N, V).
    That of reverse_kl also needs the teacher's least probability, which is not stored."""
    q = log_probabilities_of(model, ids).double().exp()
    rest, of_model = p[:, -1], q[:, -1]
    if name == "jsd":
        one, other = BETA * rest, (1 - BETA) * of_model
        mass = one + other
        return one * (mass / one).log() + other * (mass / other).log()
    least = model.double().log_softmax(1).exp().amin(1)
    return rest * ((p[:, -2] / rest).clamp(max=1).log() + (of_model / least).log())


@pytest.mark.parametrize("top_k", [1, 4, 16])
@pytest.mark.parametrize("pair", range(4))
def test_stored_tokens_lack_at_most_the_bound_of_a_divergence(pair: int, top_k: int) -> None:
    teacher, model = pairs_of_logits()[pair]
    ids, logps = top_tokens(teacher, top_k, 1.0, teacher.shape[1])
    exact = [logits.double().log_softmax(1) for logits in (teacher, model)]
    merged = log_probabilities_of(model.double(), ids.long())
    for name in DIVERGENCES:
        missing = divergence_of(name, BETA, *exact) - divergence_of(name, BETA, logps.double(), merged)
        assert (missing > -1e-6).all(), "merging tokens lowers a divergence"
        if name == "reverse_kl":
            rest = merged[:, -1].exp() * (logps[:, -1].double() - exact[0].amin(1))
            assert (missing <= rest + 1e-6).all()
            continue
        bound = missing_at_most(name, logps.double().exp(), model, ids.long())
        assert (missing <= bound + 1e-6).all()
        if name == "jsd":
            mass = BETA * logps[:, -1].double().exp() + (1 - BETA) * merged[:, -1].exp()
            assert (bound <= math.log(2) * mass + 1e-6).all()


@pytest.mark.parametrize("pair", range(4))
def test_the_gradient_of_the_forward_divergence_lacks_at_most_twice_the_mass_of_the_rest(pair: int) -> None:
    teacher, model = pairs_of_logits()[pair]
    ids, logps = top_tokens(teacher, 4, 1.0, teacher.shape[1])
    model = model.double().requires_grad_()
    (found,) = torch.autograd.grad(
        divergence_of("forward_kl", BETA, logps.double(), log_probabilities_of(model, ids.long())).sum(), model
    )
    missing = (found - (model.softmax(1) - teacher.double().softmax(1))).abs()
    assert (missing.gather(1, ids.long()) < 1e-6).all()
    assert (missing.sum(1) <= 2 * logps[:, -1].double().exp() + 1e-6).all()


@pytest.mark.parametrize("name", DIVERGENCES)
def test_rows_of_the_models_vocabulary_that_the_teacher_lacks_make_no_divergence_infinite(name: Divergence) -> None:
    random = torch.Generator().manual_seed(4)
    teacher, model = torch.randn(1, 5, 10, generator=random), torch.randn(1, 5, 12, generator=random)
    packed = stored(teacher, torch.tensor([[IGNORED, 3, 4, 5, 6]]), 64)
    given = model.clone().requires_grad_()
    found = make_loss(name)(given, packed)
    found.backward()
    p = torch.cat([teacher, torch.full((1, 5, 2), -torch.inf)], dim=2)[0, :4].double().softmax(1)
    logits = model[0, :4].double().requires_grad_()
    if name == "reverse_kl":  # of the teacher's tokens alone
        q = logits[:, :10].softmax(1)
        expected = (q * (q / p[:, :10]).log()).sum(1).mean()
    else:
        q = logits.softmax(1)
        mixture = BETA * p + (1 - BETA) * q if name == "jsd" else q
        expected = torch.special.xlogy(p, p).sum(1).mean() - torch.special.xlogy(p, mixture).sum(1).mean()
        if name == "jsd":
            expected = BETA * expected + (1 - BETA) * (q * (q / mixture).log()).sum(1).mean()
    (gradient,) = torch.autograd.grad(expected, logits)
    assert found.item() == pytest.approx(expected.item(), abs=1e-5) and found.item() < 5
    assert torch.allclose(given.grad[0, :4].double(), gradient, atol=1e-6)


def test_a_small_rest_is_not_rounded_away() -> None:
    logits = torch.zeros(1, 100)
    logits[0, 0] = 25.0
    ids, logps = top_tokens(logits, 1, 1.0, 100)
    assert ids.tolist() == [[0]] and logps[0, 1].item() == pytest.approx(math.log(99) - 25, abs=1e-5)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_every_target_counts_alike_with_the_labels_beside_the_teacher_and_without_targets_the_loss_is_0(
    name: Divergence,
) -> None:
    random = torch.Generator().manual_seed(1)
    model, teacher = torch.randn(2, 3, 6, 20, generator=random)
    labels = torch.tensor([[IGNORED, 3, 4, 5, IGNORED, 7], [IGNORED, IGNORED, 4, 5, 6, 7], [IGNORED] * 6])
    packed, ordinary = stored(teacher, labels, 5), TokenLoss(causal=True, smoothing=0.0)
    alone, half = make_loss(name), make_loss(name, weight=0.25)
    parts = [(model[[row]], packed[[row]]) for row in range(3)]
    counts = [4, 4, 0]
    whole = alone(model, packed)
    assert whole.item() == pytest.approx(
        sum(count * alone(*part).item() for count, part in zip(counts, parts, strict=True)) / 8, rel=1e-5
    )
    assert half(model, packed).item() == pytest.approx(
        0.25 * whole.item() + 0.75 * ordinary(model, labels).item(), rel=1e-5
    )
    assert alone(model, labels).item() == ordinary(model, labels).item(), "an evaluation has no teacher"
    needing = model[[2]].clone().requires_grad_()
    nothing = alone(needing, packed[[2]])
    nothing.backward()
    assert nothing.item() == 0 and not needing.grad.any()


def test_parts_of_targets_change_the_loss_and_its_gradient_by_rounding_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    random = torch.Generator().manual_seed(1)
    model, teacher = torch.randn(2, 2, 40, 30, generator=random)
    labels = torch.randint(0, 30, (2, 40), generator=random)
    labels[:, 0] = IGNORED
    packed, found = stored(teacher, labels, 5), []
    for at_once in (1, 7, 1024):
        monkeypatch.setattr(token_distillation, "TARGETS_AT_ONCE", at_once)
        given = model.clone().requires_grad_()
        loss = make_loss("jsd", temperature=2.0)(given, packed)
        (3 * loss).backward()
        found.append((loss.item(), given.grad))
    assert [value for value, _ in found] == pytest.approx([found[0][0]] * 3, rel=1e-6)
    assert all(torch.allclose(gradient, found[0][1], atol=1e-7) for _, gradient in found)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_gradient_of_stored_tokens_is_that_of_autograd(name: Divergence) -> None:
    random = torch.Generator().manual_seed(3)
    model, teacher = torch.randn(2, 1, 9, 30, generator=random)
    labels = torch.randint(0, 30, (1, 9), generator=random)
    labels[:, 0] = IGNORED
    packed, temperature = stored(teacher, labels, 4, 1.5), 1.5
    given, other = model.clone().requires_grad_(), model.clone().requires_grad_()
    found = make_loss(name, temperature=temperature)(given, packed)
    found.backward()
    ids, logps = packed[0, 1:, 1:].split([4, 5], dim=1)
    merged = log_probabilities_of(other[0, :-1] / temperature, ids.long())
    expected = temperature**2 * divergence_of(name, BETA, logps.float(), merged).mean()
    expected.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(given.grad, other.grad, atol=1e-7)
