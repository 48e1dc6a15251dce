"""The repositories that can be fine-tuned, by the names of their files."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer, BertTokenizer

from tests.raised import raised_problems
from tests.training import tiny
from training import task_types
from training.models import loading
from training.models.repository_files import (
    chat_template,
    part_of,
    require_files,
    require_model_folder,
    require_no_other_files,
)
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
        (problem,) = raised_problems(require_files, [*names, "tokenizer.json"], "it")
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
    problems = raised_problems(require_model_folder, tmp_path / "model")
    assert {Path(problem.where).name for problem in problems} == {"chat_template.jinja", "vocab.txt"}


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja"])
def test_a_pipe_in_a_model_folder_is_refused_by_name_and_is_not_waited_for(tmp_path: Path, name: str) -> None:
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / file).write_text("{}")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match=f"{name}: is a pipe, a socket or a device"):
        require_model_folder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model.safetensors"])
def test_a_link_to_a_file_that_is_gone_is_the_users_mistake(tmp_path: Path, name: str) -> None:
    """As in a snapshot of the Hub's cache whose blob somebody has removed."""
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / file).write_text("{}")
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to(tmp_path / "blobs" / "0123")
    (problem,) = raised_problems(require_model_folder, tmp_path)
    assert (Path(problem.where).name, problem.message) == (
        name,
        "is a link to a file that is gone: copy or download the model again.",
    )


def test_a_chat_template_that_is_no_text_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes("{{ 'é' }}".encode("latin-1"))
    with pytest.raises(UserError, match=r"chat_template\.jinja: is not UTF-8 text: save it as UTF-8"):
        chat_template(tmp_path)


def test_a_link_in_a_folder_of_a_model_is_refused_too(tmp_path: Path) -> None:
    for file in ("model.safetensors", "tokenizer.json"):
        (tmp_path / file).write_text("{}")
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").symlink_to("/etc/passwd")
    with pytest.raises(UserError, match=r"1_Pooling/config\.json: is a link to /etc/passwd"):
        require_model_folder(tmp_path)
    (tmp_path / "1_Pooling" / "config.json").unlink()
    (tmp_path / "1_Pooling" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"has no config\.json"):
        require_model_folder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "generation_config.json", "vocab.txt"])
def test_a_file_beside_the_weights_that_is_longer_than_the_memory_is_refused(tmp_path: Path, name: str) -> None:
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / file).write_text("{}")
    (tmp_path / name).touch()
    os.truncate(tmp_path / name, 2**40)  # nothing, which takes no disk
    with pytest.raises(UserError, match=f"{name}: has more than 256 MiB|{name} is no JSON object"):
        require_model_folder(tmp_path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and its tokenizer."""
    world = tiny.make_world(tmp_path_factory.mktemp("snapshot"))
    folder = world / "folder"
    shutil.copytree(world / "base/model", folder)
    shutil.copytree(world / "base/tokenizer", folder, dirs_exist_ok=True)
    return folder


def add(file: Path, **settings: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def test_a_tokenizer_whose_settings_name_a_file_of_elsewhere_is_refused_before_that_is_read(
    model: Path, tmp_path: Path
) -> None:
    folder, secret = tmp_path / "model", tmp_path / "secret"
    shutil.copytree(model, folder)
    (folder / "tokenizer.json").unlink()
    secret.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\npassword\n")
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\ncat\n")
    add(folder / "tokenizer_config.json", tokenizer_class="BertTokenizer", vocab=str(secret))
    assert isinstance(loaded := AutoTokenizer.from_pretrained(folder), BertTokenizer)
    assert "password" in loaded.get_vocab()  # as transformers does
    for refuse in (require_model_folder, loading.load_tokenizer):
        with pytest.raises(UserError, match=r"tokenizer_config\.json has vocab: '.*secret', and transformers would"):
            refuse(folder)


@pytest.mark.parametrize("content", ["[" * 100_000, "[1]", "\0\0", '{"num_labels": ' + "9" * 5000 + "}"])
def test_a_config_that_is_no_json_object_is_refused_by_name(model: Path, tmp_path: Path, content: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    (folder / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"config\.json is no JSON object: copy or download it again"):
        require_model_folder(folder)


@pytest.mark.parametrize("index", [False, True])
def test_a_config_that_names_other_weights_than_those_that_are_checked_is_refused(
    model: Path, tmp_path: Path, index: bool
) -> None:
    folder, name = tmp_path / "model", "other.safetensors.index.json" if index else "other.safetensors"
    shutil.copytree(model, folder)
    shutil.copyfile(folder / "model.safetensors", tmp_path / "outside.safetensors")
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": {"w": str(tmp_path / "outside.safetensors")}}))
    add(folder / "config.json", transformers_weights=name)
    with pytest.raises(UserError, match=rf"config\.json has transformers_weights: '{name}', and transformers would"):
        require_model_folder(folder)
    with pytest.raises(UserError, match="transformers_weights"):
        loading.load_trained(task_types.load("sequence-classification"), folder)


@pytest.mark.parametrize(
    ("file", "settings"),
    [
        ("config.json", {"configuration_files": ["/elsewhere/config.4.0.0.json"]}),
        ("tokenizer_config.json", {"fast_tokenizer_files": ["/elsewhere/tokenizer.4.0.0.json"]}),
        ("tokenizer_config.json", {"gguf_file": "/elsewhere/x.gguf"}),
        ("tokenizer_config.json", {"init_inputs": ["/elsewhere/vocab.txt"]}),
        ("tokenizer_config.json", {"vocab_file": "/elsewhere/spiece.model"}),
        ("tokenizer_config.json", {"merges": "../elsewhere/merges.txt"}),
        ("tokenizer_config.json", {"sp_model_kwargs": {"model_file": "/elsewhere/spiece.model"}}),
    ],
)
def test_each_setting_by_which_transformers_reads_files_of_elsewhere_is_refused_by_name(
    tmp_path: Path, file: str, settings: dict[str, object]
) -> None:
    (tmp_path / file).write_text(json.dumps(settings))
    with pytest.raises(UserError, match=rf"^model\.path: {tmp_path}/{file} has {next(iter(settings))}: .*: remove the"):
        require_no_other_files(tmp_path)


def test_paths_that_older_versions_of_transformers_wrote_and_nothing_reads_are_accepted(
    tmp_path: Path,
) -> None:
    older = {
        "special_tokens_map_file": "/root/.cache/special_tokens_map.json",
        "tokenizer_file": "/root/.cache/tokenizer.json",
        "name_or_path": "/content/model",
        "vocab_file": "vocab.txt",
        "init_inputs": [],
        "sp_model_kwargs": {},
        "vocab": {"a": 0},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(older))
    require_no_other_files(tmp_path)
