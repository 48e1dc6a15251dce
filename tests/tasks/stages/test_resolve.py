"""Names become content: files, commits of the Hub, the machine's own values."""

from __future__ import annotations

import hashlib
import shutil
import sys
import uuid
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import fsspec
import pytest
from huggingface_hub import constants

from tasks.cache.digests import Digests
from tasks.cache.results import Artifact, Lock, PinnedCommit, PinnedFile, PinnedVersion
from tasks.cache.stage import Listener, Work
from tasks.jobs.hardware import visible_gpus
from tasks.registry.lineage import resolve_fields
from tasks.stages.load_data import load_data
from tasks.stages.load_model import load_model
from tasks.stages.resolve import pin, resolve
from tests.hub.server import Hub
from tests.made import NO_WEIGHTS
from tests.raised import raised_problems
from tests.s3 import BUCKET, KEYS, S3, server
from training.data import listing
from training.data.decoding import open_text
from training.data.listing import stat_url
from training.problems import UserError
from training.recipe import Recipe, parse

SCRATCH = {"source": "scratch", "config": {"model_type": "bert", "vocab_size": 100}}
FILES = {"source": "csv", "text": ["text"], "label": "label"}
HUB = {"source": "hub", "path": "me/rows", "text": ["text"], "label": "label"}


class Heard(Listener):
    """Keeps the messages that it gets."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def stage_events(self, stage: str, events: list[dict[str, Any]]) -> None:
        self.messages += [event["message"] for event in events]


def recipe_of(data: dict[str, Any], model: dict[str, Any] | None = None, **sections: Any) -> Recipe:
    return parse(
        {"name": "test", "task": "sequence-classification", "data": data, "model": model or SCRATCH, **sections}
    )


def run(recipe: Recipe, flow_run: str = "flow-1") -> tuple[Lock, list[str]]:
    heard = Heard()
    return resolve.make(Work("k", Path(), flow_run, (heard,), "resolve"), recipe), heard.messages


@pytest.fixture
def rows(tmp_path: Path) -> dict[str, Any]:
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "train.csv").write_text("text,label\na,x\nb,y\n")
    (folder / "dev.csv").write_text("text,label\nc,x\n")
    return {"source": "csv", "path": str(folder), "text": ["text"], "label": "label"}


def problems(recipe: Recipe) -> list[tuple[str, str]]:
    return [(problem.where, problem.message) for problem in raised_problems(pin, recipe)]


def test_a_recipe_that_publishes_without_a_token_is_refused_before_anything_costs_anything(
    home: Path, rows: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    login = tmp_path / "token"
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(login))
    hub = {"release": {"hub": {"repo": "me/thing", "license": "mit"}}}
    with pytest.raises(UserError) as refused:
        run(recipe_of(rows, {"source": "folder", "path": "nowhere"}, **hub))
    assert [problem.where for problem in refused.value.problems] == ["release.hub.repo", "model.path"]
    assert "set HF_TOKEN to one that may" in str(refused.value)
    pin(recipe_of(rows, **hub))  # a plan may be made where nothing is published
    login.write_text("hf_secret")
    (found,) = run(recipe_of(rows, **hub))[1]
    assert found.startswith("release.hub: there is no champion to compare with") and "hf_secret" not in found
    hub["release"]["registry"] = "thing"
    assert run(recipe_of(rows, **hub), "flow-2")[1] == []


def test_files_are_pinned_by_their_content(home: Path, rows: dict[str, Any]) -> None:
    lock = pin(recipe_of(rows))
    assert {split: [Path(f.path).name for f in files] for split, files in lock.data_files.items()} == {
        "train": ["train.csv"],
        "validation": ["dev.csv"],
    }
    content = Path(rows["path"], "train.csv").read_bytes()
    assert lock.data_files["train"][0].sha256 == hashlib.sha256(content).hexdigest()
    assert lock.mixed_precision in ("no", "bf16", "fp16") and lock.num_processes == 1


def test_folders_of_a_folder_whose_rows_are_not_read_are_named(home: Path, rows: dict[str, Any]) -> None:
    folder = Path(rows["path"])
    for name in ("2024/01/may.csv", "notes/plan.txt", ".hidden/may.csv", "_old/may.csv"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("text,label\nd,x\n")
    found = f"{folder}: 1 folder in it is not read (2024): to read all folders, give {folder}/**/*"
    assert found in pin(recipe_of(rows)).notes
    assert not any("folder in it" in note for note in pin(recipe_of({**rows, "splits": {"train": "train"}})).notes)


def test_files_of_a_folder_that_are_in_no_split_are_named(home: Path, rows: dict[str, Any]) -> None:
    for name in ("may.csv", "june.csv"):
        Path(rows["path"], name).write_text("text,label\nd,x\n")
    found = f"{rows['path']}: 2 files are in no split and not read (june.csv, may.csv): name files of other names in "
    assert run(recipe_of(rows))[1] == [f"{found}data.splits"]
    assert run(recipe_of({**rows, "splits": {"train": "may"}}), "flow-2")[1] == []
    Path(rows["path"], "train.csv").unlink()
    Path(rows["path"], "dev.csv").unlink()
    assert run(recipe_of(rows), "flow-3")[1] == []


def load_key(recipe: Recipe, lock: Lock) -> str:
    return load_data.key(load_data.flat_inputs(recipe, lock)[0])


def test_moved_files_are_the_same_data_and_a_changed_cell_is_other_data(home: Path, rows: dict[str, Any]) -> None:
    before = recipe_of(rows)
    key = load_key(before, pin(before))
    moved = Path(rows["path"]).rename(Path(rows["path"]).with_name("moved"))
    after = recipe_of({**rows, "path": str(moved)})
    assert load_key(after, pin(after)) == key
    (moved / "train.csv").write_text("text,label\na,x\nb,x\n")
    assert load_key(after, pin(after)) != key


@pytest.mark.skipif(bool(visible_gpus()), reason="says what a machine without a GPU cannot do")
def test_a_strategy_that_this_machine_cannot_run_is_reported(home: Path, rows: dict[str, Any]) -> None:
    found = dict(problems(recipe_of(rows, compute={"strategy": "fsdp"})))
    assert found == {
        "compute.strategy": "'fsdp' shares a model among processes, and there is one GPU or none (num_processes: "
        "auto): set compute.num_processes or compute.offload, or use ddp.",
    }
    compute = {"strategy": "fsdp", "offload": "all", "mixed_precision": "fp16"}
    found = dict(problems(recipe_of(rows, compute=compute)))
    assert found == {
        "compute.offload": "'all' moves what a GPU does not need, and there is none here: set it to no.",
        "compute.mixed_precision": "'fp16' with fsdp needs GPUs, and there is none here: use bf16 or no.",
    }


@pytest.mark.skipif(bool(visible_gpus()), reason="says what a machine without a GPU cannot do")
def test_weights_in_4_bits_need_a_gpu_and_adapters_a_package(
    home: Path, rows: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "peft", None)
    found = list(problems(recipe_of(rows, training={"lora": {"quantization": "nf4"}})))
    assert [where for where, _ in found] == [
        "training.lora.quantization",
        "training.lora",
        "training.lora.quantization",
    ]
    assert found[0][1].startswith(
        "'nf4' holds weights in 4 bits on an NVIDIA GPU, and there is none here: set it to null"
    )
    assert "finetune-flows[lora]" in found[1][1] and "finetune-flows[qlora]" in found[2][1]


def test_exports_without_their_packages_are_refused_with_the_command_that_installs_them(
    home: Path, rows: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    found = dict(problems(recipe_of(rows, release={"exports": ["onnx"]})))
    assert found == {
        "release.exports": "onnx: exports need onnxscript, not installed here: install the extra, "
        "`pip install 'finetune-flows[export]'`, or remove the field."
    }
    pin(recipe_of(rows))


def test_kernels_for_gpus_are_refused_without_one_and_without_their_package(
    home: Path, rows: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(
        rows, {**SCRATCH, "attn_implementation": "flash_attention_2"}, training={"use_liger_kernel": True}
    )
    for name in ("flash_attn", "liger_kernel"):
        monkeypatch.setitem(sys.modules, name, None)
    capabilities: list[tuple[int, int]] = []
    monkeypatch.setattr("tasks.jobs.this_machine.gpu_compute_capabilities", lambda: capabilities)
    assert dict(problems(recipe)) == {
        "model.attn_implementation": "'flash_attention_2' needs kernels for NVIDIA GPUs, but there is no NVIDIA GPU "
        "here, and the package flash-attn is not installed (pip install flash-attn): set it to null.",
        "training.use_liger_kernel": "true needs kernels for NVIDIA GPUs, but there is no NVIDIA GPU here, and the "
        "package liger-kernel is not installed (pip install liger-kernel): set it to false.",
    }
    capabilities.append((7, 5))
    for name in ("flash_attn", "liger_kernel"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    assert dict(problems(recipe)) == {
        "model.attn_implementation": "'flash_attention_2' needs kernels for NVIDIA GPUs, but the GPU has compute "
        "capability 7.5 and not 8.0: set it to null.",
    }


def test_deepspeed_that_is_not_installed_is_reported_with_what_to_install(
    home: Path, rows: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    (found,) = problems(recipe_of(rows, compute={"strategy": "deepspeed-zero2", "num_processes": 2}))
    assert found[0] == "compute.strategy" and "`pip install 'finetune-flows[deepspeed]'`" in found[1]


def test_pinned_values_stay_for_the_same_flow_run(home: Path, rows: dict[str, Any]) -> None:
    recipe = recipe_of(rows)
    first, _ = run(recipe)
    shutil.rmtree(rows["path"])
    assert run(recipe)[0] == first
    with pytest.raises(UserError):
        run(recipe, "flow-2")


def test_a_plan_pins_nothing(home: Path, rows: dict[str, Any]) -> None:
    run(recipe_of(rows), flow_run="")
    assert not (home / "runs").exists() and not (home / "recipes").exists()


def test_links_out_of_the_folder_of_rows_are_refused_by_name(home: Path, rows: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "elsewhere.csv").write_text("text,label\nx,a\ny,b\n")
    for name, target in (("train.csv", "/proc/self/mem"), ("dev.csv", tmp_path / "elsewhere.csv")):
        (Path(rows["path"]) / name).unlink(missing_ok=True)
        (Path(rows["path"]) / name).symlink_to(target)
    found = problems(recipe_of(rows))
    assert [where.rpartition("/")[2] for where, _ in found] == ["train.csv", "dev.csv"]
    assert f"is a link to {tmp_path / 'elsewhere.csv'}, outside of its folder: name that file" in found[1][1]


# Files elsewhere


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    yield from server()


ROWS = b"text,label\na,x\nb,y\n"


def test_a_file_on_s3_is_pinned_by_its_bytes_and_read(home: Path, s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.reached(monkeypatch, **KEYS)
    url = s3.put("one/train.csv", ROWS)
    recipe = recipe_of({**FILES, "path": url})
    (found,) = pin(recipe).data_files["train"]
    assert found == PinnedFile(path=url, sha256=hashlib.sha256(ROWS).hexdigest(), size_bytes=len(ROWS))
    with open_text(found.path, recipe.data) as rows:
        assert rows.read() == ROWS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "splits", "only"),
    [
        ("two/train.csv", None, "HEAD /rows/two/train.csv"),
        ("two", None, "GET /rows"),
        ("two/*.csv", None, "GET /rows"),
        ("two", {"train": ["train"], "test": "d*.csv"}, "GET /rows"),
    ],
)
def test_unchanged_files_on_s3_cost_one_request_and_a_changed_one_is_another_pin(
    home: Path, s3: S3, monkeypatch: pytest.MonkeyPatch, path: str, splits: dict[str, Any] | None, only: str
) -> None:
    s3.reached(monkeypatch, **KEYS)
    for name in ("train", "dev"):
        s3.put(f"two/{name}.csv", ROWS)
    recipe = recipe_of({**FILES, "path": f"s3://{BUCKET}/{path}", "splits": splits})
    before = pin(recipe)
    s3.requests.clear()
    assert pin(recipe) == before and s3.requests == [only]
    s3.put("two/train.csv", ROWS.replace(b"x", b"z"))
    after = pin(recipe)
    assert after.data_files["train"] != before.data_files["train"]
    assert load_key(recipe, after) != load_key(recipe, before)
    assert after.data_files.get("validation") == before.data_files.get("validation")


@pytest.mark.slow
@pytest.mark.parametrize("path", ["rows/none.csv", "rows/none", "none/train.csv", "none"])
def test_a_bucket_or_key_that_does_not_exist_is_reported(
    home: Path, s3: S3, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    s3.reached(monkeypatch, **KEYS)
    assert problems(recipe_of({**FILES, "path": f"s3://{path}"})) == [
        (f"s3://{path}", "does not exist: check the URL in data.path or data.splits.")
    ]


@pytest.mark.parametrize("keys", [{}, {"AWS_ACCESS_KEY_ID": "other", "AWS_SECRET_ACCESS_KEY": "wrong"}])
@pytest.mark.parametrize("path", ["three/train.csv", "three"])
def test_a_refusal_of_s3_is_reported_with_the_variables_to_set(
    home: Path, s3: S3, monkeypatch: pytest.MonkeyPatch, keys: dict[str, str], path: str
) -> None:
    s3.reached(monkeypatch, **keys)
    s3.put("three/train.csv", ROWS)
    s3.ask_for_keys(True)
    try:
        ((where, message),) = problems(recipe_of({**FILES, "path": f"s3://{BUCKET}/{path}"}))
    finally:
        s3.ask_for_keys(False)
    assert where == f"s3://{BUCKET}/{path}" and message.startswith("access is refused (")
    assert "in the environment: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in message and "wrong" not in message


def test_a_file_system_without_a_record_of_changes_is_read_each_time(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = fsspec.filesystem("memory")
    url = f"memory://{uuid.uuid4().hex}/train.csv"
    memory.pipe(url, ROWS)
    recipe = recipe_of({**FILES, "path": url})
    digests = Digests(home)
    home.mkdir()
    for settled_s, remembered in ((3.0, False), (0.0, True)):  # by its time alone, which has only just passed
        monkeypatch.setattr(listing, "SETTLED_S", settled_s)
        found = pin(recipe).data_files["train"][0]
        state = stat_url(url)
        assert found.sha256 == hashlib.sha256(ROWS).hexdigest() and state is not None
        assert (state.state is not None and digests.recalled(url, state.state) == found.sha256) == remembered
    memory.pipe(url, ROWS * 2)
    assert pin(recipe).data_files["train"][0].sha256 == hashlib.sha256(ROWS * 2).hexdigest()


def test_the_progress_of_reading_remote_files_is_reported_in_bytes(home: Path) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    for name in ("train", "dev"):
        fsspec.filesystem("memory").pipe(f"{url}/{name}.csv", b"x" * 3_000_000)
    reported: list[tuple[int, int]] = []
    pin(recipe_of({**FILES, "path": url}), lambda done, total: reported.append((done, total)))
    assert reported == sorted(reported) and reported[-1] == (6_000_000, 6_000_000)
    assert {total for _, total in reported} == {6_000_000}


MODEL = {
    "config.json": "{}",
    "model.safetensors": NO_WEIGHTS.decode(),
    "tokenizer.json": "{}",
    "README.md": "x",
    "model.bin": "pickle",
}


def write_model(folder: Path, *names: str) -> dict[str, Any]:
    folder.mkdir()
    for name in names or tuple(MODEL):
        (folder / name).write_text(MODEL[name])
    return {"source": "folder", "path": str(folder)}


def test_a_model_folder_is_pinned_without_what_is_not_taken(home: Path, rows: dict[str, Any], tmp_path: Path) -> None:
    lock = pin(recipe_of(rows, write_model(tmp_path / "model")))
    assert sorted(lock.model_files) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_a_moved_model_folder_is_the_same_model(home: Path, rows: dict[str, Any], tmp_path: Path) -> None:
    def key(name: str) -> str:
        recipe = recipe_of(rows, {"source": "folder", "path": str(tmp_path / name)})
        return load_model.key(load_model.flat_inputs(recipe, pin(recipe), None)[0])

    write_model(tmp_path / "model")
    before = key("model")
    (tmp_path / "model").rename(tmp_path / "moved")
    assert key("moved") == before


def test_a_chat_template_counts_by_its_content_wherever_it_lies_and_whatever_the_model_is_from(
    home: Path, rows: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_model(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("its own")
    data = Artifact(stage="load_data", key="d", digest="d", parts={"train.arrow": "t"})
    from_hub, champion = (
        PinnedCommit(name="me/model@main", commit="c"),
        PinnedVersion(name="n", version="1", model="m", max_length=9),
    )

    def keys(template: str | None, content: str = "") -> list[str]:
        if template is not None:
            (tmp_path / template).write_text(content)
        recipes = [recipe_of(rows, model | {"chat_template": template}) for model in (folder, SCRATCH)]
        plain, made = (pin(recipe) for recipe in recipes)
        laid_over = made.model_files
        every = [(plain, None), (made, data)]
        every += [
            (Lock(**of, model_files=laid_over), None) for of in ({"model_hub": from_hub}, {"started_from": champion})
        ]
        return [load_model.key(load_model.flat_inputs(recipes[0], *one)[0]) for one in every]

    without, first, other = keys(None), keys("a.jinja", "{{ 1 }}"), keys("a.jinja", "{{ 2 }}")
    assert all(len({*three}) == 3 for three in zip(without, first, other, strict=True))
    assert keys("moved.jinja", "{{ 1 }}") == first
    recipe = recipe_of(rows, {"source": "hub", "path": "me/model", "chat_template": "a.jinja"})
    fields = resolve_fields(recipe, Lock(model_hub=from_hub, model_files=pin(recipe_of(rows, folder)).model_files))[
        "model"
    ]
    assert (fields["path"], fields["chat_template"]) == ("me/model", str(tmp_path / "a.jinja"))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot be read (No such file or directory): name a Jinja file."),
        (b"\xff", "is not UTF-8 text: name a Jinja file."),
        (b"{{ 1\n{% if %}", "is no Jinja: line 2: "),
        (b"{% generation %}", "is no Jinja: line 1: "),
        (b"{{ " + b"(" * 50_000, "has more parts in one another than can be read: "),
        (b"\xef\xbb\xbf{{ 1 }}", "begins with a byte order mark, with which every conversation would begin: "),
    ],
)
def test_a_chat_template_that_is_none_is_refused_before_anything_runs(
    home: Path, rows: dict[str, Any], tmp_path: Path, content: bytes | None, why: str
) -> None:
    file = tmp_path / "chat.jinja"
    if content is not None:
        file.write_bytes(content)
    (problem,) = problems(recipe_of(rows, SCRATCH | {"chat_template": str(file)}))
    assert problem[0] == "model.chat_template" and problem[1].startswith(f"{str(file)!r} {why}")


def test_everything_that_is_missing_is_reported_together(home: Path, rows: dict[str, Any], tmp_path: Path) -> None:
    Path(rows["path"], "train.csv").unlink()
    model = write_model(tmp_path / "model", "README.md")
    found = problems(recipe_of(rows, model))
    assert [where for where, _ in found] == ["data.path", "model.path", "model.path", "model.path"]
    assert "no train file" in found[0][1] and [
        part in message
        for part, (_, message) in zip(("config.json", "safetensors", "tokenizer"), found[1:], strict=True)
    ]


def test_a_model_folder_that_does_not_exist_is_reported_with_its_field(home: Path, rows: dict[str, Any]) -> None:
    ((where, message),) = problems(recipe_of(rows, {"source": "folder", "path": "no/such/folder"}))
    assert where == "model.path" and "no/such/folder is not a folder" in message


def test_a_callable_is_pinned_by_its_own_fingerprint(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_pinned_rows.py").write_text("def rows(split): ...\nrows.fingerprint = lambda: 'version 3'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    data = {**HUB, "source": "python", "path": "my_pinned_rows:rows"}
    assert pin(recipe_of(data)).data_fingerprint == "version 3"


MY_SPLITS = """
def asked(split): ...
rows = [{"text": "a", "label": "x"}]
splits = {"train": rows, "validation": rows}
"""


def test_an_evaluated_split_that_the_source_lacks_is_refused_before_any_row_is_read(
    home: Path, rows: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_splits.py").write_text(MY_SPLITS)
    monkeypatch.chdir(tmp_path)
    both = {"splits": ["validation", "test"]}
    for data in (rows, *({**HUB, "source": "python", "path": f"my_splits:{name}"} for name in ("rows", "splits"))):
        ((where, message),) = problems(recipe_of(data, evaluation=both))
        assert where == "evaluation.splits[1]" and message.startswith("'test' has no rows: ")
        assert problems(recipe_of(data, {"source": "folder", "path": "none"}, evaluation=both))[1][0] == "model.path"
        pin(recipe_of({**data, "test_size": 0.1}, evaluation=both))
    pin(recipe_of({**HUB, "source": "python", "path": "my_splits:asked"}, evaluation=both))  # called for it


def test_a_precision_set_in_the_recipe_is_not_replaced_by_that_of_the_machine(home: Path, rows: dict[str, Any]) -> None:
    assert pin(recipe_of(rows, compute={"mixed_precision": "no"})).mixed_precision == "no"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield hub


WHOLE = {"config.json": b"{}", "model.safetensors": NO_WEIGHTS, "tokenizer.json": b"{}"}


def test_names_on_the_hub_are_pinned_to_commits(hub: Hub, home: Path) -> None:
    rows = hub.repo("dataset", "me/rows", {})
    model = hub.repo("model", "me/model", WHOLE)
    hub.repos["models", "me/model"].tags["v1.0"] = model
    hub.commit("model", "me/model", {"config.json": b"[]"})
    lock, notes = run(recipe_of(HUB, {"source": "hub", "path": "me/model", "revision": "v1.0"}))
    assert lock.data_hub == PinnedCommit(name="me/rows@main", commit=rows)
    assert lock.model_hub == PinnedCommit(name="me/model@v1.0", commit=model)
    assert notes == []


def test_every_set_of_a_mixture_is_pinned_and_all_that_cannot_be_found_are_named(
    hub: Hub, home: Path, rows: dict[str, Any]
) -> None:
    commit = hub.repo("dataset", "me/rows", {})
    mix = [
        {"source": "csv", "path": rows["path"], "name": "files"},
        {"source": "hub", "path": "me/rows", "name": "hub"},
    ]
    recipe = recipe_of({"text": ["text"], "label": "label", "mix": mix})
    before, _ = run(recipe)
    assert [one.hub and one.hub.commit for one in before.sets] == [None, commit]
    assert list(before.data_sets["files"].files) == ["train", "validation"] and before.data_files == {}
    (Path(rows["path"]) / "train.csv").write_text("text,label\nd,x\n")
    after, _ = run(recipe, "flow-2")
    assert after.rows != before.rows and load_key(recipe, after) != load_key(recipe, before)
    mix[0]["path"], mix[1]["path"] = "nowhere", "me/none"
    found = problems(recipe_of({"text": ["text"], "label": "label", "mix": mix}))
    assert [where for where, _ in found] == ["data.mix[0].path", "data.mix[1].path"]


def test_a_branch_that_moves_is_other_data_to_the_next_run_and_not_to_a_retry(hub: Hub, home: Path) -> None:
    hub.repo("dataset", "me/rows", {})
    recipe = recipe_of(HUB)
    before, _ = run(recipe)
    moved = hub.commit("dataset", "me/rows", {"rows.csv": b""})
    assert run(recipe)[0] == before
    after, _ = run(recipe, "flow-2")
    assert after.data_hub == PinnedCommit(name="me/rows@main", commit=moved)
    assert load_key(recipe, after) != load_key(recipe, before)


def test_a_commit_is_not_looked_up(home: Path) -> None:
    pinned = pin(recipe_of({**HUB, "revision": "a" * 40})).data_hub
    assert pinned is not None and pinned.commit == "a" * 40


@pytest.mark.parametrize(
    ("name", "token", "where", "words"),
    [
        ("me/none", "", "data.path", ["no dataset 'me/none'", "HF_TOKEN"]),
        ("me/none", "friend", "data.path", ["no dataset 'me/none'", "HF_TOKEN"]),
        ("me/secret", "", "data.path", ["no dataset 'me/secret'", "HF_TOKEN"]),
        ("me/gated", "", "data.path", ["'me/gated' is gated", "HF_TOKEN"]),
        ("me/gated", "friend", "data.path", ["'me/gated' is gated", "HF_TOKEN"]),
        ("me/rows", "hf_wrong", "data.path", ["may not read 'me/rows'", "HF_TOKEN"]),
        ("me/rows/more", "", "data.path", ["owner/name"]),
        ("me/rows@v2", "", "data.revision", ["no revision 'v2'", "branch, a tag or a commit"]),
        ("me/broken", "", "data.path", ["cannot be asked", "503", "the fault is the Hub's."]),
    ],
)
def test_a_name_that_the_hub_does_not_give_is_reported_with_the_next_step(
    hub: Hub, home: Path, monkeypatch: pytest.MonkeyPatch, name: str, token: str, where: str, words: list[str]
) -> None:
    hub.repo("dataset", "me/rows", {})
    hub.repo("dataset", "me/secret", {}, private=True)
    hub.repo("dataset", "me/gated", {}, gated=True)
    hub.fault = lambda method, path: 503 if "me/broken" in path else None
    monkeypatch.setenv("HF_TOKEN", hub.token() if token == "friend" else token)
    path, _, revision = name.partition("@")
    ((field, message),) = problems(recipe_of({**HUB, "path": path, "revision": revision or None}))
    assert field == where and all(word in message for word in words), message


def test_a_token_opens_what_is_private_or_gated(hub: Hub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = hub.repo("dataset", "me/rows", {}, private=True, gated=True)
    monkeypatch.setenv("HF_TOKEN", hub.token("me/rows"))
    assert pin(recipe_of(HUB)).data_hub == PinnedCommit(name="me/rows@main", commit=commit)


def test_a_model_that_has_only_pickled_weights_is_reported_before_anything_is_loaded(hub: Hub, home: Path) -> None:
    files = {"config.json": b"{}", "pytorch_model.bin": b"p", "tokenizer.json": b"{}", "onnx/model.safetensors": b"w"}
    commit = hub.repo("model", "me/model", files)
    hub.repo("dataset", "me/rows", {})
    ((where, message),) = problems(recipe_of(HUB, {"source": "hub", "path": "me/model"}))
    assert where == "model.path"
    assert f"'me/model' at {commit[:12]} has no *.safetensors" in message and "save_pretrained" in message
    assert all("/resolve/" not in request for request in hub.requests)


@pytest.mark.parametrize("how", ["offline", "stopped", "503"])
def test_while_the_hub_is_unreachable_the_last_commit_of_the_same_name_is_used_and_reported(
    hub: Hub, home: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repo("dataset", "me/rows", {})
    before, _ = run(recipe_of(HUB))
    if how == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    elif how == "stopped":
        hub.stop()
    else:
        hub.fault = lambda method, path: 503
    lock, (note,) = run(recipe_of(HUB), "flow-2")
    assert lock.data_hub == before.data_hub and lock.data_hub is not None
    assert load_key(recipe_of(HUB), lock) == load_key(recipe_of(HUB), before)
    assert "me/rows" in note and lock.data_hub.commit[:12] in note
    ((where, message),) = problems(recipe_of({**HUB, "path": "me/others"}))
    assert where == "data.path" and "'me/others' at 'main'" in message
    assert ("unset HF_HUB_OFFLINE" in message) == (how == "offline")
    assert problems(recipe_of({**HUB, "revision": "v2"}))[0][0] == "data.path"


def test_the_last_commit_of_main_is_known_after_a_run_that_was_pinned_to_another(hub: Hub, home: Path) -> None:
    older = hub.repo("dataset", "me/rows", {})
    hub.commit("dataset", "me/rows", {"rows.csv": b""})
    before, _ = run(recipe_of(HUB))
    run(recipe_of({**HUB, "revision": older}), "flow-2")
    hub.stop()
    lock, _ = run(recipe_of(HUB), "flow-3")
    assert lock.data_hub == before.data_hub and lock.unreachable == ["me/rows"]


def test_the_last_commit_does_not_hide_that_a_name_no_longer_exists(hub: Hub, home: Path) -> None:
    hub.repo("dataset", "me/rows", {})
    run(recipe_of(HUB))
    del hub.repos["datasets", "me/rows"]
    assert problems(recipe_of(HUB))[0][0] == "data.path"


def test_corrections_of_labels_are_one_file_and_part_of_the_rows(home: Path, rows: dict[str, Any]) -> None:
    decided = Path(rows["path"]).with_name("decided.csv")
    given = {**rows, "corrections": str(decided)}
    (absent,) = raised_problems(pin, recipe_of(given))
    assert absent.where == "data.corrections" and "decided.csv" in absent.message
    ((where, message),) = problems(recipe_of({**rows, "corrections": rows["path"]}))
    assert where == "data.corrections" and "is not one CSV file" in message
    found = set[str | None]()
    for content in ("row,decision\n", "row,decision\nr0123456789abcdef,x\n"):
        decided.write_text(content)
        lock = pin(recipe_of(given))
        assert lock.corrections == PinnedFile(path=str(decided), sha256=hashlib.sha256(content.encode()).hexdigest())
        assert lock.corrections in lock.all_data_files
        found.add(lock.rows)
    assert len(found | {pin(recipe_of(rows)).rows}) == 3
    without = {name: value for name, value in given.items() if name != "label"}
    (unfit,) = raised_problems(recipe_of, without, task="causal-lm")
    assert unfit.where == "data.corrections" and "task causal-lm has none" in unfit.message
