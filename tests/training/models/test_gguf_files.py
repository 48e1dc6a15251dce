"""GGUF files: in the real llama.cpp the same next tokens as in torch, and the same tokens of a text.

Tests of llama.cpp run where llama-cpp-python is installed (`pip install 'finetune-flows[llama-cpp]'`); the others read
the files by transformers, which knows GGUF too.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.raised import raised_problems
from tests.training.language_models import FAMILIES, make_model, make_tokenizer, sentences
from training.models import gguf_files, gguf_vocabulary
from training.models.loading import load_for_export

CAUSAL = "AutoModelForCausalLM"
HAS_RUNTIME = importlib.util.find_spec("llama_cpp") is not None
needs_runtime = pytest.mark.skipif(not HAS_RUNTIME, reason="llama-cpp-python is not installed")
FORMATS = ["gguf-f16", "gguf-q8_0", "gguf-q4_0", *(["gguf-q4_k_m"] if HAS_RUNTIME else [])]
SCALED = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    **{"original_max_position_embeddings": 64, "rope_theta": 10000.0},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama 3.2": ("llama", {"tie_word_embeddings": True, "rope_scaling": SCALED}),
    "qwen3": ("qwen3", {}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True, "head_dim": 16}),
}
LARGEST = {"gguf-f16": 0.01, "gguf-q8_0": 0.2, "gguf-q4_0": 0.6, "gguf-q4_k_m": 0.6}
"""The largest difference of a logit; logits are between -10 and 20."""
TIE = 2 * LARGEST["gguf-f16"]
"""The largest difference of two logits of torch that may change places by rounding to 16 bits."""
SAME = {"gguf-f16": 200, "gguf-q8_0": 198, "gguf-q4_0": 193, "gguf-q4_k_m": 193}
"""The prompts of 200 after which the likeliest token is that of torch, or in a tie with it."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are too small for more
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=MODELS)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a trained model, with its GGUF files in `out`."""
    folder = tmp_path_factory.mktemp("model")
    model_type, config = MODELS[request.param]
    make_model(folder, model_type, steps=40, **config)
    gguf_files.export(CAUSAL, folder, FORMATS, folder / "out")
    return folder


def prompts_of(folder: Path) -> list[list[int]]:
    """200 beginnings of sentences that were not trained on."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer(text).input_ids[: 4 + number % 12] for number, text in enumerate(sentences(200, seed=2))]


def logits_after(model: Callable[..., Any], prompts: Sequence[list[int]]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(input_ids=torch.tensor([ids]))["logits"][0] for ids in prompts]


def require_close(name: str, found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    same = sum(bool(b[-1].max() - b[-1][a[-1].argmax()] < TIE) for a, b in zip(found, expected, strict=True))
    furthest = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    assert same >= SAME[name] and furthest < LARGEST[name], f"{name}: {same} of 200, logits differ by {furthest:.3g}"


@needs_runtime
def test_llama_cpp_chooses_the_next_tokens_of_torch_after_200_prompts(exported: Path) -> None:
    network, prompts = load_for_export(CAUSAL, exported), prompts_of(exported)
    expected = logits_after(network, prompts)
    for name in FORMATS:
        model = gguf_files.open_export(name, exported / "out", network.config)
        assert model.runtime.startswith("llama.cpp")
        require_close(name, logits_after(model, prompts), expected)


@pytest.mark.slow
def test_without_llama_cpp_an_export_is_read_back_by_transformers(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_files, "RUNTIME", "absent_runtime")
    network, prompts = load_for_export(CAUSAL, exported), prompts_of(exported)
    expected = logits_after(network, prompts)
    for name in FORMATS:
        model = gguf_files.open_export(name, exported / "out", network.config)
        assert (model.runtime, model.is_timed) == ("its weights in torch", False)
        require_close(name, logits_after(model, prompts), expected)


@needs_runtime
@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_reads_the_tokens_of_the_models_tokenizer(family: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from training.models.llama_cpp_model import LlamaCppModel

    make_model(tmp_path, "llama", steps=0, family=family)
    gguf_files.export(CAUSAL, tmp_path, ["gguf-f16"], tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = LlamaCppModel(tmp_path / "out/gguf/model-F16.gguf", None)
    more = ["Hello  world\n\n\tfoo's 12345 <|im_start|>user", "é à ü ﷺ 😀", "   lead", "It's I'LL we'Re", "a\r\n\r\nb"]
    for text in sentences(100, seed=3) + more:
        assert model.tokenize(text) == tokenizer(text, add_special_tokens=False).input_ids, text


@needs_runtime
def test_packed_documents_do_not_see_one_another_in_llama_cpp(exported: Path) -> None:
    network, (first, second) = load_for_export(CAUSAL, exported), prompts_of(exported)[10:12]
    model = gguf_files.open_export("gguf-f16", exported / "out", network.config)
    places = torch.tensor([[*range(len(first)), *range(len(second))]])
    found = model(input_ids=torch.tensor([first + second]), position_ids=places)["logits"][0]
    alone = logits_after(model, [first, second])
    assert torch.equal(found, torch.cat(alone))


def test_a_file_of_fewer_bits_is_smaller(exported: Path) -> None:
    from training.recipe.tables.exports import EXPORTS

    sizes = [EXPORTS[name].size_in(exported / "out") for name in ("gguf-f16", "gguf-q8_0", "gguf-q4_0")]
    assert sizes == sorted(sizes, reverse=True) and sizes[1] < 0.65 * sizes[0]


@pytest.mark.parametrize(
    ("model_type", "config", "reason"),
    [
        ("gemma2", {}, "this is one of gemma2: leave it out."),
        ("qwen2", {"head_dim": 16}, "the dimensions of its heads are not those of its hidden states: leave it out."),
        ("llama", {"attention_bias": True}, "its layers have biases (attention_bias, mlp_bias): leave it out."),
        (
            "qwen2",
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            "its positions are scaled by yarn: leave it out.",
        ),
    ],
)
def test_a_model_that_llama_cpp_would_compute_otherwise_is_refused(
    model_type: str, config: dict[str, Any], reason: str
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, num_hidden_layers=1, **config))
    (problem,) = raised_problems(gguf_files.try_export, network, CAUSAL)
    assert problem.where == "release.exports" and problem.message.endswith(reason)


def test_a_tokenizer_that_adds_other_tokens_than_bos_and_eos_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path, "llama", steps=0)
    file = tmp_path / "tokenizer.json"
    found = json.loads(file.read_text())
    for part in ("single", "pair"):
        for one in found["post_processor"][part]:
            if "SpecialToken" in one:
                one["SpecialToken"]["id"] = "<|im_start|>"
    found["post_processor"]["special_tokens"] = {
        "<|im_start|>": {"id": "<|im_start|>", "ids": [2], "tokens": ["<|im_start|>"]}
    }
    file.write_text(json.dumps(found))
    (problem,) = raised_problems(gguf_files.export, CAUSAL, tmp_path, ["gguf-f16"], tmp_path / "out")
    assert problem.message.endswith("adds other tokens to a text than bos before it and eos after it: leave it out.")


def test_an_added_token_that_the_model_lacks_is_refused_by_name(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    make_model(tmp_path, "llama", steps=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    size = len(tokenizer)
    tokenizer.add_tokens(["<one>", "<two>"])
    tokenizer.save_pretrained(tmp_path)
    (problem,) = raised_problems(gguf_files.export, CAUSAL, tmp_path, ["gguf-f16"], tmp_path / "out")
    assert f"has more tokens than the model, '<two>' as number {size + 1} beside {size}" in problem.message


def test_a_tokenizer_that_llama_cpp_would_read_otherwise_is_refused(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    assert [*gguf_vocabulary.find_problems(tmp_path)] == []
    file = tmp_path / "tokenizer.json"
    plain = json.loads(file.read_text())

    def reason(**changes: Any) -> str:
        file.write_text(json.dumps(plain | changes))
        (problem,) = gguf_vocabulary.find_problems(tmp_path)
        assert problem.where == "release.exports"
        return problem.message

    other = json.loads(json.dumps(plain["pre_tokenizer"]))
    other["pretokenizers"][0]["pattern"]["Regex"] += "|#"
    assert reason(pre_tokenizer=other).endswith("splits texts by a rule that llama.cpp has no name for: leave it out.")
    assert "normalizes texts (Lowercase)" in reason(normalizer={"type": "Lowercase"})
    assert "is of the type WordPiece" in reason(model={"type": "WordPiece"})
    assert "SentencePiece's BPE" in reason(model={**plain["model"], "byte_fallback": True})
    fewer = {letter: number for letter, number in plain["model"]["vocab"].items() if letter != "Ā"}
    assert "lacks 1 of the 256 bytes" in reason(model={**plain["model"], "vocab": fewer})
    text = file.read_text()
    make_model(tmp_path, "llama", steps=0)
    file.write_text(text)
    (problem,) = raised_problems(gguf_files.export, CAUSAL, tmp_path, ["gguf-f16"], tmp_path / "out")
    assert "lacks 1 of the 256 bytes" in problem.message and not (tmp_path / "out").exists()
