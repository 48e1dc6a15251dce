"""Pairs, a tokenizer and tiny models with weights from a formula, for which TRL's losses and gradients are kept.

The figures in trl_figures.json come from TRL: `python -m tests.training.task_types.preference_model`, in an environment
that has it beside this project's packages.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

FIGURES = Path(__file__).with_name("trl_figures.json")
WORDS = ["<pad>", "<eos>", *"abcdefghijklmnop"]
# The texts with the chosen answers are equally long: TRL's orpo takes a mean over the tokens of a batch.
PAIRS = [
    {"prompt": "a b c", "chosen": " d e", "rejected": " f"},
    {"prompt": "g", "chosen": " h i j k", "rejected": " l m n o p a"},
    {"prompt": "p o n m", "chosen": " l", "rejected": " a b"},
    {"prompt": "b d", "chosen": " f h j", "rejected": " b d f"},
]
SETTINGS: dict[str, dict[str, Any]] = {
    "dpo": {"beta": 0.3},
    "ipo": {"beta": 0.2},
    "robust": {"beta": 0.3, "label_smoothing": 0.1},
    "orpo": {"beta": 0.4},
    "simpo": {"beta": 2.0, "simpo_gamma": 0.7},
}
"""The options of each loss."""
COMPLETIONS = [
    {"prompt": "a b c", "completion": " d e", "label": True},
    {"prompt": "g", "completion": " h i j k", "label": False},
    {"prompt": "p o n m", "completion": " l", "label": False},
    {"prompt": "b d", "completion": " f h j", "label": True},
    {"prompt": "c", "completion": " a b", "label": True},
]
KTO: dict[str, dict[str, Any]] = {
    "kto": {"beta": 0.3},
    "kto, weighted": {"beta": 0.2, "desirable_weight": 1.3, "undesirable_weight": 0.8},
}
"""The options of kto."""
SHIFTS = {"kto": (0.0, 0.4), "kto, weighted": (0.4, 0.0)}
"""The models and their references: one of the two estimates of the KL divergence is cut off at 0."""
MARGINS = [1.0, 0.0, 0.5, 2.0]
REWARD = {"center_rewards_coefficient": 0.05}
"""The options of reward-modeling."""
GKD: dict[str, dict[str, float]] = {
    "gkd, forward": {"beta": 0.0, "temperature": 1.0},
    "gkd, reverse": {"beta": 1.0, "temperature": 1.0},
    "gkd, jsd": {"beta": 0.3, "temperature": 0.9},
    "gkd, warm": {"beta": 0.5, "temperature": 2.0},
}
"""The settings of a divergence from a teacher."""
TOKENS = [[2, 3, 4, 5, 6, 1], [8, 9, 10, 11, 1, 0], [7, 17, 16, 15, 14, 13]]
TARGETS = [[-100, -100, 4, 5, 6, 1], [-100, 9, 10, 11, 1, -100], [-100, 17, 16, -100, 14, 13]]
TEACHER_SHIFT = 2.5
DIRECTION = 0.7


def tokenizer(folder: Path) -> Path:
    """A tokenizer of a token a word, without special tokens before or behind a text."""
    made = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    return folder


def model(shift: float, auto_class: type[PreTrainedModel] = GPT2LMHeadModel) -> PreTrainedModel:
    """A model whose weights depend on `shift` alone."""
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": len(WORDS)}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    special = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    made = auto_class(GPT2Config(**sizes, **dropout, **special, num_labels=1))
    with torch.no_grad():
        for number, weight in enumerate(made.parameters()):
            places = torch.arange(weight.numel(), dtype=torch.float64).reshape(weight.shape)
            weight.copy_(0.5 * torch.sin(places * (number + 1.3) + shift))
    return made


def gradients(of: torch.nn.Module) -> dict[str, list[float]]:
    """The norm of each weight's gradient, and its product with a fixed direction."""
    found = {}
    for name, weight in of.named_parameters():
        gradient = weight.grad.double().flatten()
        direction = torch.sin(torch.arange(len(gradient), dtype=torch.float64) * DIRECTION)
        found[name] = [float(gradient.norm()), float(gradient @ direction)]
    return found


def trl_figures(loss: str, settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The loss and the gradients of TRL's trainer on all pairs as one batch."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    usual = {"output_dir": str(folder / loss), "per_device_train_batch_size": len(PAIRS), "use_cpu": True}
    usual |= {"report_to": "none", "bf16": False, "gradient_checkpointing": False, "max_length": 32, **settings}
    policy, given = model(0.0), {"train_dataset": Dataset.from_list(PAIRS)}
    given["processing_class"] = AutoTokenizer.from_pretrained(folder / "tokenizer")
    if loss == "reward":
        rows = [{**pair, "margin": margin} for pair, margin in zip(PAIRS, MARGINS, strict=True)]
        given["train_dataset"] = Dataset.from_list(rows)
        trainer = RewardTrainer(model(0.0, GPT2ForSequenceClassification), args=RewardConfig(**usual), **given)
    elif loss in KTO:
        given["train_dataset"] = Dataset.from_list(COMPLETIONS)
        usual["per_device_train_batch_size"] = len(COMPLETIONS)
        policy, reference = map(model, SHIFTS[loss])
        trainer = KTOTrainer(policy, ref_model=reference, args=KTOConfig(**usual), **given)
    elif loss == "orpo":
        trainer = ORPOTrainer(policy, args=ORPOConfig(**usual), **given)
    elif loss == "simpo":
        trainer = CPOTrainer(policy, args=CPOConfig(**usual, loss_type="simpo", cpo_alpha=0.0), **given)
    else:
        name = {"dpo": "sigmoid"}.get(loss, loss)
        trainer = DPOTrainer(policy, ref_model=model(0.4), args=DPOConfig(**usual, loss_type=name), **given)
    batch = next(iter(trainer.get_train_dataloader()))
    found = trainer.compute_loss(trainer.model, batch)
    found.backward()
    kl = {"kl": trainer._metrics["train"]["kl"][0]} if loss in KTO else {}
    return {"loss": float(found), **kl, "gradients": gradients(trainer.model)}


def gkd_figures(beta: float, temperature: float) -> dict[str, Any]:
    """The loss and the gradients of the divergence of TRL's GKDTrainer, for TOKENS with the labels TARGETS."""
    from trl.experimental.gkd import GKDTrainer

    student, teacher, ids = model(0.0), model(TEACHER_SHIFT), torch.tensor(TOKENS)
    with torch.no_grad():
        of_teacher = teacher(ids).logits[:, :-1]
    found = GKDTrainer.generalized_jsd_loss(
        student(ids).logits[:, :-1], of_teacher, torch.tensor(TARGETS)[:, 1:], beta, temperature
    )
    found.backward()
    return {"loss": float(found), "gradients": gradients(student)}


def main() -> None:
    """Writes the figures of all losses with TRL's version."""
    import trl

    with tempfile.TemporaryDirectory() as scratch:
        tokenizer(Path(scratch, "tokenizer"))
        figures = {loss: trl_figures(loss, settings, Path(scratch)) for loss, settings in SETTINGS.items()}
        figures |= {loss: trl_figures(loss, settings, Path(scratch)) for loss, settings in KTO.items()}
        figures |= {case: gkd_figures(**settings) for case, settings in GKD.items()}
        figures["reward"] = trl_figures("reward", REWARD, Path(scratch))
    FIGURES.write_text(json.dumps({"trl": trl.__version__, "losses": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
