"""The repositories that can be fine-tuned, by the names of their files."""

from __future__ import annotations

from pathlib import Path

import pytest

from training.models.repository_files import part_of, require_files, require_model_folder
from training.problems import UserError

WEIGHTS = ("config.json", "model.safetensors")


@pytest.mark.parametrize("tokenizer", ["tokenizer.json", "vocab.txt", "spiece.model", "tokenizer_config.json"])
def test_any_file_that_a_tokenizer_can_come_from_is_enough(tokenizer: str) -> None:
    require_files([*WEIGHTS, tokenizer], "it")
    assert part_of(tokenizer) == "tokenizer"


def test_a_repository_without_a_tokenizer_is_refused_with_the_next_step() -> None:
    with pytest.raises(UserError, match=r"^model\.path: it has no tokenizer\.json, .*: save its tokenizer again with"):
        require_files([*WEIGHTS, "special_tokens_map.json", "README.md"], "it")


def test_an_adapter_of_peft_is_refused_with_the_next_step_even_if_weights_lie_beside_it() -> None:
    for names in (["adapter_config.json", "adapter_model.safetensors"], [*WEIGHTS, "adapter_config.json"]):
        with pytest.raises(UserError) as raised:
            require_files([*names, "tokenizer.json"], "it")
        (problem,) = raised.value.problems
        assert problem.message.startswith("it has adapter_config.json: it is an adapter of peft, and training would")
        assert "Merge it into its base model with merge_and_unload()" in problem.message
    with pytest.raises(UserError, match=r"it has no \*\.safetensors"):
        require_files(["config.json", "tokenizer.json", "adapter_model.safetensors"], "it")
    require_files([*WEIGHTS, "tokenizer.json", "adapter/adapter_config.json"], "it")  # of a version that was published


def test_links_of_a_model_folder_that_leave_it_are_refused_and_models_of_the_home_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("FINETUNE_HOME", str(home))
    files = {"config.json": "{}", "model.safetensors": "w", "tokenizer.json": "{}"}
    for folder in (home / "artifacts" / "fit" / "k" / "model", home / "services", tmp_path / "model"):
        folder.mkdir(parents=True)
        for name, content in files.items():
            (folder / name).write_text(content)
    require_model_folder(home / "artifacts" / "fit" / "k" / "model")
    with pytest.raises(UserError, match="lies in the home of finetune"):
        require_model_folder(home / "services")
    (tmp_path / "model" / "chat_template.jinja").symlink_to(home / "services" / "config.json")
    (tmp_path / "model" / "vocab.txt").symlink_to("/etc/passwd")
    with pytest.raises(UserError) as raised:
        require_model_folder(tmp_path / "model")
    assert {Path(problem.where).name for problem in raised.value.problems} == {"chat_template.jinja", "vocab.txt"}
