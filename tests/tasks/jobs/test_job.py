"""A stage's job: what its program can read is in the stage's key, and nothing else is there to be read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import ValidationError

from tasks.cache import store
from tasks.cache.results import Artifact
from tasks.cache.stage import Work
from tasks.jobs.job import Files, StageJob, files_of, folder_of, stage
from tasks.jobs.launch import JobFailed
from training.jobs.protocol import NotInKey, Result, Settings

PROGRAM = "tests.tasks.jobs.copying"


class Copying(Settings):
    """Of tests.tasks.jobs.copying."""

    files: list[str]
    """Relative to the folder `rows`."""
    pause_s: Annotated[float, NotInKey("it only waits")] = 0.0


def copy(rows: Artifact, files: list[str], pause_s: float = 0.0) -> StageJob:
    """Copies files.

    The rows that it copies.
    """
    return StageJob(
        PROGRAM, Copying(files=files, pause_s=pause_s), reads={"rows": files_of(rows, ["a.txt", "late.txt"])}
    )


COPY = stage(dict[str, Any])(copy)


@pytest.fixture
def rows(home: Path) -> Artifact:
    home.mkdir(mode=0o700)
    with store.filling("load_data", "k") as aside:
        for name in ("a.txt", "b.txt"):
            (aside / name).write_text(name)
        (aside / "model").mkdir()
        (aside / "model/config.json").write_text("{}")
        return store.publish(aside, "load_data", "k", {}, {})


def run(job: StageJob, out: Path) -> dict[str, Any]:
    out.mkdir()
    return job.run(Work(out.name, out, "run"))


def key_of(*arguments: Any) -> str:
    return COPY.key(COPY.flat_inputs(*arguments)[0])


def test_a_program_reads_the_files_that_its_job_names_and_no_others_of_the_same_artifact(
    rows: Artifact, tmp_path: Path
) -> None:
    assert run(copy(rows, ["a.txt"]), tmp_path / "out") == {"copied": 1}
    assert (tmp_path / "out/a.txt").read_text() == "a.txt"
    with pytest.raises(JobFailed, match=r"b\.txt"):
        run(copy(rows, ["b.txt"]), tmp_path / "other")


def test_a_folder_is_read_as_a_whole_and_counts_as_a_whole(rows: Artifact, tmp_path: Path) -> None:
    model = folder_of(rows, "model")
    assert model.digests == {"load_data/model": rows.parts["model"]}
    run(StageJob(PROGRAM, Copying(files=["config.json"]), reads={"rows": model}), tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text()) == {}


def test_a_job_that_goes_on_reads_what_it_names_now(rows: Artifact, tmp_path: Path) -> None:
    job = copy(rows, ["a.txt"])
    left = Work("out", tmp_path, "run").job / "inputs" / "rows"
    left.mkdir(parents=True)
    (left / "b.txt").write_text("of an earlier try")
    run(job, tmp_path / "out")
    assert [file.name for file in left.iterdir()] == ["a.txt"]


def test_a_setting_is_in_the_key_because_it_is_a_field_unless_it_is_marked(home: Path) -> None:
    rows = Artifact(stage="load_data", key="k", digest="d", parts={"a.txt": "1", "b.txt": "1"})
    assert key_of(rows, ["a.txt"]) != key_of(rows, ["b.txt"])
    assert key_of(rows, ["a.txt"]) == key_of(rows, ["a.txt"], 3.0)

    class WithColour(Copying):
        colour: str = "red"

    def key(colour: str) -> str:
        coloured = stage(dict)(lambda: StageJob(PROGRAM, WithColour(files=[], colour=colour), {}))
        return COPY.key(coloured.flat_inputs()[0])

    assert key("red") != key("blue"), "a field that was added, with no other edit"


def test_a_file_is_in_the_key_because_it_may_be_read(home: Path) -> None:
    rows, edited, longer, elsewhere = (
        Artifact(stage="load_data", key=key, digest="d", parts=parts)
        for key, parts in {
            "k": {"a.txt": "1", "b.txt": "1"},
            "l": {"a.txt": "2", "b.txt": "1"},
            "m": {"a.txt": "1", "b.txt": "1", "late.txt": "1"},
            "n": {"a.txt": "1", "b.txt": "2"},
        }.items()
    )
    assert len({key_of(one, []) for one in (rows, edited, longer)}) == 3
    assert key_of(rows, []) == key_of(elsewhere, []), "b.txt is not read"


def test_a_field_is_left_out_of_the_key_only_with_a_reason() -> None:
    class Silent(Settings):
        speed: Annotated[int, NotInKey(" ")] = 1

    with pytest.raises(TypeError, match=r"Silent\.speed is NotInKey without a reason"):
        StageJob(PROGRAM, Silent(), reads={"rows": Files(Path(), {})}).inputs()


def test_marked_fields_of_a_section_are_left_out_wherever_the_section_is_a_setting() -> None:
    class Whole(Settings):
        copying: Copying

    values = StageJob(PROGRAM, Whole(copying=Copying(files=["a.txt"], pause_s=2.0)), reads={}).inputs().values
    assert values == {"copying": {"files": ["a.txt"]}, "upstream": {}}


def test_two_values_of_one_name_are_no_key_of_either() -> None:
    with pytest.raises(ValueError, match="files would be two values of one name in a key"):
        StageJob(PROGRAM, Copying(files=["a.txt"]), reads={}, content={"files": {"train": ["digest"]}}).inputs()


def test_a_function_in_place_of_a_program_gets_the_same_settings_and_links(rows: Artifact, tmp_path: Path) -> None:
    def copy_here(work: Work, settings: Copying, inputs: Mapping[str, Path]) -> dict[str, Any]:
        for name in settings.files:
            (work.out / name).write_text((inputs["rows"] / name).read_text())
        return {"copied": len(settings.files)}

    reads = {"rows": files_of(rows, ["a.txt"])}
    shown: list[Mapping[str, Any]] = []
    job = StageJob(copy_here, Copying(files=["a.txt"]), reads, show=lambda _, result: shown.append(result))
    assert run(job, tmp_path / "out") == {"copied": 1} == shown[0]
    with pytest.raises(FileNotFoundError, match=r"b\.txt"):
        run(StageJob(copy_here, Copying(files=["b.txt"]), reads), tmp_path / "other")
    assert job.inputs().code == ["tests.tasks.jobs.test_job"]


def test_a_folder_that_must_be_found_is_looked_for_when_the_program_is_about_to_run(
    rows: Artifact, tmp_path: Path
) -> None:
    looked: list[str] = []

    def find(work: Work) -> Path:
        looked.append(work.key)
        return rows.path

    job = StageJob(PROGRAM, Copying(files=["a.txt"]), {"rows": Files(find, {"version": "digest"}, ("a.txt",))})
    assert job.inputs().values["upstream"] == {"version": "digest"} and looked == []
    assert run(job, tmp_path / "out") == {"copied": 1} and looked == ["out"]


def test_a_stage_parses_the_result_of_its_artifacts_those_of_earlier_versions_too() -> None:
    class Copied(Result):
        files: int

    copies = stage(Copied)(copy)
    for name in ("result", "figures"):  # its name in manifests of earlier versions
        stored = Artifact.model_validate({"stage": "copy", "key": "k", "digest": "d", name: {"files": 2}})
        assert copies.open(stored).result == Copied(files=2)
        with pytest.raises(ValidationError, match="lines"):
            copies.open(stored.model_copy(update={"result": {"lines": 2}}))
