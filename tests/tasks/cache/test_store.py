"""The artifact store: complete and hashed, or absent."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

import pytest

from tasks.cache import store
from tasks.cache.digests import digest_of
from tasks.cache.results import Artifact


def make(key: str = "k" * 40, text: str = "rows", log: str = "1") -> Artifact:
    """A small artifact: two files of content and one for people."""
    with store.filling("load_data", key) as aside:
        (aside / "train.arrow").write_text(text)
        (aside / "model").mkdir()
        (aside / "model" / "config.json").write_text("{}")
        (aside / "log").mkdir()
        (aside / "log" / "events.jsonl").write_text(log)
        return store.publish(aside, "load_data", key, {"tokens.max_length": 128}, {"rows": 3})


def test_a_published_artifact_is_found_as_it_was_published(home: Path) -> None:
    ref = make()
    assert store.find("load_data", ref.key) == ref
    assert ref.path == home / "artifacts" / "load_data" / ref.key
    assert store.inputs_of("load_data", ref.key) == {"tokens.max_length": 128}


def test_an_artifact_that_was_never_published_is_absent_and_leaves_nothing(home: Path) -> None:
    with pytest.raises(OSError, match="full"), store.filling("fit", "k" * 40) as aside:
        (aside / "half").write_text("x")
        raise OSError("disk full")
    assert store.find("fit", "k" * 40) is None
    assert list((home / "artifacts" / "fit").iterdir()) == []


def test_equal_content_has_an_equal_digest_whatever_its_log_and_its_key(home: Path) -> None:
    first, second, other = make("a" * 40, log="1"), make("b" * 40, log="22"), make("c" * 40, text="ROWS")
    assert first.digest == second.digest != other.digest
    assert first.parts["model"] == other.parts["model"]
    assert first.parts["train.arrow"] != other.parts["train.arrow"]
    assert "log" not in first.parts


ALL_FILES = ["train.arrow", "model/config.json", "log/events.jsonl", "inputs.json", "manifest.json"]


@pytest.mark.parametrize("name", ALL_FILES)
@pytest.mark.parametrize("harm", ["delete", "truncate", "flip"])
def test_no_damage_to_any_file_goes_unnoticed(home: Path, name: str, harm: str) -> None:
    ref = make()
    file = ref.path / name
    before, content = file.stat(), file.read_bytes()
    if harm == "delete":
        file.unlink()
    elif harm == "truncate":
        file.write_bytes(content[:-1])
    else:
        middle = len(content) // 2
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(store.Damaged):
        store.find("load_data", ref.key)


def test_every_single_flipped_byte_of_the_manifest_is_noticed_or_harmless(home: Path) -> None:
    ref = make()
    manifest = ref.path / "manifest.json"
    content = manifest.read_bytes()
    for place in range(len(content)):
        manifest.write_bytes(content[:place] + bytes([content[place] ^ 2]) + content[place + 1 :])
        with contextlib.suppress(store.Damaged):
            assert store.find("load_data", ref.key) == ref


def test_a_manifest_that_names_other_digests_than_those_of_its_files_is_damage(home: Path) -> None:
    ref = make()
    file = ref.path / store.MANIFEST
    for part in ({"digest": "e" * 64}, {"parts": ref.parts | {"model": "e" * 64}}):
        manifest = {"ref": ref.model_dump() | part, "files": json.loads(file.read_bytes())["files"]}
        file.write_text(json.dumps({**manifest, "digest": digest_of(manifest)}))
        with pytest.raises(store.Damaged, match="names other digests"):
            store.find("load_data", ref.key)


def test_a_stray_file_is_damage(home: Path) -> None:
    ref = make()
    (ref.path / "extra").write_text("")
    with pytest.raises(store.Damaged, match="extra"):
        store.find("load_data", ref.key)


def test_a_discarded_artifact_is_kept_in_quarantine_with_the_reason(home: Path) -> None:
    ref = make()
    kept = store.discard("load_data", ref.key, "train.arrow has changed")
    assert kept is not None and kept.parent == home / "quarantine"
    assert (kept / "train.arrow").read_text() == "rows"
    assert (kept / "quarantined.txt").read_text() == "train.arrow has changed\n"
    assert store.find("load_data", ref.key) is None


def test_a_forced_rebuild_replaces_the_artifact(home: Path) -> None:
    make(text="old")
    ref = make(text="new")
    assert (ref.path / "train.arrow").read_text() == "new"
    assert store.find("load_data", ref.key) == ref


def test_an_artifact_moved_with_its_home_is_found_without_reading_it_again(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = make()
    home.rename(tmp_path / "elsewhere")
    monkeypatch.setenv("FINETUNE_HOME", str(tmp_path / "elsewhere"))
    assert store.find("load_data", ref.key) == ref


def test_old_half_made_folder_goes_unless_its_maker_lives(home: Path) -> None:
    long_ago = time.time() - 2 * store.ABANDONED_S
    with store.filling("fit", "a" * 40) as living:
        dead = living.with_name(".dead-1")
        dead.mkdir()
        for folder in (living, dead):
            os.utime(folder, (long_ago, long_ago))
        with store.filling("fit", "b" * 40):
            assert living.is_dir() and not dead.exists()
