"""Exports of a run: compared, logged with the version, and written as a folder for other tools."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from mlflow import MlflowClient

from tests.flows.forked import finetune
from tests.flows.small import FinishedRun, states
from tests.fork_server import call
from tests.training.language_models import make_model, sentences

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EXPORTS = ["--set", "release.exports=[onnx, onnx-int8]", "--set", "release.export_margin=0.2"]
ENCODER_FILES = {"config.json", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def exported(finished: FinishedRun, server: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """The finished run, repeated with exports."""
    folder = tmp_path_factory.mktemp("exported")
    home, out = shutil.copytree(finished.home, folder / "home", symlinks=True), folder / "out.json"
    run = finetune(home, "run", str(finished.file), *EXPORTS, "--json", str(out), **server)
    assert run.returncode == 0, run.stdout + run.stderr
    done = states(out)
    assert done["fit"] == done["predict"] == done["compare"] == "cached"
    assert done["export"] == done["compare_exports"] == done["register"] == "ran"
    return FinishedRun(home, finished.file, json.loads(out.read_text()), run.stdout)


def test_released_exports_stand_with_the_version_that_was_registered_before(exported: FinishedRun) -> None:
    assert exported.result["model"]["registered"] == "small/1"
    figures = exported.result["exports"]
    assert {name: one["released"] for name, one in figures.items()} == {"onnx": True, "onnx-int8": True}
    client = MlflowClient(f"sqlite:///{exported.home / 'mlflow.db'}")
    version = client.get_model_version("small", "1")
    assert json.loads(version.tags["finetune.exports"]) == figures
    logged = {file.path for file in client.list_artifacts(version.run_id, "export/onnx")}
    assert logged == {"export/onnx/model.onnx", "export/onnx/model_quantized.onnx"}
    assert "Files: onnx: `onnx/model.onnx`, onnx-int8: `onnx/model_quantized.onnx`." in version.description
    run = client.get_run(exported.result["mlflow_run_id"])
    speed = run.data.metrics["compare_exports/onnx-int8/rows_per_second"]
    assert speed == figures["onnx-int8"]["rows_per_second"] > 0
    assert re.search(r"^  onnx-int8 +yes  ", exported.printed, re.MULTILINE)


def test_a_registered_version_is_written_as_a_folder_that_the_page_reads(
    exported: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "exported"
    done = finetune(exported.home, "export", "small", "onnx-int8", "--out", str(out))
    assert done.returncode == 0 and "Not compared" not in done.stdout, done.stdout + done.stderr
    names = {file.relative_to(out).as_posix() for file in out.rglob("*") if file.is_file()}
    assert names >= {*ENCODER_FILES, "onnx/model_quantized.onnx"} and not [n for n in names if "safetensors" in n]
    (stored,) = (exported.home / s["artifact"] for s in exported.result["stages"] if s["name"] == "export")
    assert (out / "onnx/model_quantized.onnx").read_bytes() == (stored / "onnx/model_quantized.onnx").read_bytes()
    page = (ROOT / "docs/how-to/export.md").read_text()
    (code,) = re.findall(r"<!-- test: onnx -->\n```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "shown.py").write_text(code)
    assert call(run_shown, tmp_path / "printed") is None
    assert re.fullmatch(r"\[[01] [01]\]\n", (tmp_path / "printed").read_text())


def run_shown(printed: Path) -> None:
    import contextlib
    import runpy

    with printed.open("w") as file, contextlib.redirect_stdout(file):
        runpy.run_path("shown.py")


@pytest.mark.drill
def test_a_language_model_is_released_as_gguf_and_with_fewer_bits_and_both_are_downloaded(
    server: dict[str, str], tmp_path: Path
) -> None:
    call(make_model, tmp_path / "model", "qwen3", 40)
    for seed, split in enumerate(("train", "validation")):
        rows = (json.dumps({"text": text}) for text in sentences(200, seed))
        (tmp_path / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
    files = {split: str(tmp_path / f"{split}.jsonl") for split in ("train", "validation")}
    checks = dict.fromkeys(("duplicates", "shared_rows"), "ignore")
    recipe = {
        "name": "helper",
        "task": "causal-lm",
        "data": {"source": "json", "path": str(tmp_path), "splits": files, "text": ["text"], "checks": checks},
        "model": {"source": "folder", "path": str(tmp_path / "model")},
        "tokens": {"max_length": 64},
        "training": {"max_steps": 10, "learning_rate": 1e-3, "per_device_train_batch_size": 16},
        "evaluation": {"splits": ["validation"], "metrics": ["perplexity", "token_accuracy"]},
        "release": {"registry": "helper", "exports": ["gguf-q8_0", "int8"], "export_margin": 0.3},
    }
    entry = {"name": "helper", "entrypoint": "flows.finetune:finetune", "parameters": {"recipe": recipe}}
    file, home = tmp_path / "helper.yaml", tmp_path / "home"
    file.write_text(yaml.safe_dump({"deployments": [entry]}))
    run = finetune(home, "run", str(file), "--json", str(tmp_path / "out.json"), **server)
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads((tmp_path / "out.json").read_text())["exports"]
    assert {name: one["released"] for name, one in found.items()} == {"gguf-q8_0": True, "int8": True}
    for name, names in {"gguf-q8_0": {"gguf/model-Q8_0.gguf"}, "int8": {"model.safetensors"}}.items():
        out = tmp_path / name
        done = finetune(home, "export", "helper", name, "--out", str(out))
        assert done.returncode == 0 and "Not compared" not in done.stdout, done.stdout + done.stderr
        written = {file.relative_to(out).as_posix() for file in out.rglob("*") if file.is_file()}
        assert names | {"config.json", "tokenizer.json", "generation_config.json"} <= written
        assert len([one for one in written if one.endswith((".gguf", ".safetensors"))]) == 1
    assert "quantization_config" in json.loads((tmp_path / "int8/config.json").read_text())


def test_an_export_that_was_not_released_is_made_on_request_and_a_full_folder_is_kept(
    finished: FinishedRun, tmp_path: Path
) -> None:
    out = tmp_path / "exported"
    done = finetune(finished.home, "export", "small@champion", "onnx", "--out", str(out))
    assert done.returncode == 0 and "Not compared with the model: name the format" in done.stdout, done.stderr
    assert (out / "onnx/model.onnx").is_file()
    again = finetune(finished.home, "export", "small", "safetensors", "--out", str(out))
    assert again.returncode == 2 and f"--out: {out} is not an empty folder: name another one." in again.stderr
