"""Where things live."""

from __future__ import annotations

import grp
import os
import pwd
import stat
import struct
import threading
from pathlib import Path

import pytest

from tasks import servers
from tasks.environment_variables import prepare_environment
from tasks.home import (
    find_replaceable,
    home_path,
    registry_place,
    tracking_is_local,
    tracking_uri,
    with_this_home,
    without_credentials,
)
from tasks.home import home as create_home
from training.problems import UserError


def test_the_home_is_made_for_its_owner_alone(home: Path) -> None:
    assert create_home() == home and stat.S_IMODE(home.stat().st_mode) == 0o700


def test_the_home_is_in_the_working_directory_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FINETUNE_HOME")
    assert create_home() == tmp_path / ".finetune"


def test_a_home_that_no_command_of_this_user_has_made_is_refused_until_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("states", "unpacked", "mine", "empty", "theirs"):
        (tmp_path / folder).mkdir()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "states"))
    monkeypatch.delenv("FINETUNE_HOME")
    monkeypatch.chdir(tmp_path / "unpacked")
    planted = tmp_path / "unpacked/.finetune"
    (planted / "prefect").mkdir(parents=True, mode=0o700)
    for _ in range(2):
        with pytest.raises(UserError, match=rf"{planted} is there, and no command of yours has made it: .* --home"):
            create_home()
    monkeypatch.chdir(tmp_path / "mine")
    made = create_home()
    assert stat.S_IMODE((tmp_path / "states/finetune/home.key").stat().st_mode) == 0o600
    (made / "runs").mkdir()
    made.rename(tmp_path / "moved")
    (tmp_path / "moved").rename(tmp_path / "empty/.finetune")
    monkeypatch.chdir(tmp_path / "empty")
    assert create_home() == tmp_path / "empty/.finetune"  # a home can be moved
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "theirs"))  # another user
    monkeypatch.setattr("tasks.home._marked", set())
    with pytest.raises(UserError, match="no command of yours"):
        create_home()
    monkeypatch.setenv("FINETUNE_HOME", ".finetune")
    create_home()
    monkeypatch.delenv("FINETUNE_HOME")
    monkeypatch.setattr("tasks.home._marked", set())
    create_home()


def test_a_home_that_another_user_s_link_leads_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FINETUNE_HOME")
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    (tmp_path / "real").mkdir()
    (tmp_path / "shared/.finetune").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path / "shared")
    assert create_home().resolve() == tmp_path / "real"
    lstat = Path.lstat

    def owned_by_another(path: Path) -> os.stat_result:
        values = list(lstat(path))
        values[stat.ST_UID] += stat.S_ISLNK(values[stat.ST_MODE])
        return os.stat_result(values)

    monkeypatch.setattr(Path, "lstat", owned_by_another)
    with pytest.raises(UserError, match=r"shared/\.finetune belongs to another user"):
        create_home()


def test_a_link_in_a_folder_of_others_on_the_way_to_the_home_is_found(tmp_path: Path, home: Path) -> None:
    for folder in ("real", "open"):
        (tmp_path / folder).mkdir()
    (tmp_path / "open/inner").symlink_to(tmp_path / "real")
    (tmp_path / "outer").symlink_to(tmp_path / "open/inner")
    assert find_replaceable(tmp_path / "outer/home") is None
    (tmp_path / "open").chmod(0o777)
    assert find_replaceable(tmp_path / "outer/home") == tmp_path / "open"


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_home_that_others_may_write_is_refused(home: Path, mode: int) -> None:
    home.mkdir()
    home.chmod(mode)
    with pytest.raises(UserError, match="chmod 700"):
        create_home()


def test_a_home_that_others_may_read_becomes_its_owners_alone(home: Path) -> None:
    home.mkdir(mode=0o755)
    home.chmod(0o755)
    create_home()
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


def test_a_home_in_a_folder_in_which_others_may_rename_it_is_refused_by_the_name_of_that_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    (shared / "mine").mkdir(parents=True)
    monkeypatch.setenv("FINETUNE_HOME", str(shared / "mine" / "home"))
    shared.chmod(0o1777)  # as /tmp
    create_home()
    shared.chmod(0o777)
    with pytest.raises(UserError, match=rf"{shared} belongs to another user or may be written by others"):
        create_home()


@pytest.mark.parametrize(
    ("name", "members", "is_private"), [(None, [], True), (None, ["other"], False), ("users", [], False)]
)
def test_a_folder_that_a_group_of_several_users_may_write_to_is_no_place_for_a_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | None, members: list[str], is_private: bool
) -> None:
    (shared := tmp_path / "shared").mkdir()
    shared.chmod(0o775)
    group = os.getgid() or 4242
    os.chown(shared, -1, group)
    entry = (name or pwd.getpwuid(os.getuid()).pw_name, "x", group, members)
    monkeypatch.setattr(os, "getgid", lambda: group)
    monkeypatch.setattr(grp, "getgrgid", lambda _: grp.struct_group(entry))
    assert find_replaceable(shared / "home") == (None if is_private else shared)


def test_a_folder_with_an_access_control_list_that_permits_writing_is_no_place_for_a_home(tmp_path: Path) -> None:
    (listed := tmp_path / "listed").mkdir()
    entries = [(0x01, 7, 2**32 - 1), (0x02, 7, 4242), (0x04, 0, 2**32 - 1), (0x10, 7, 2**32 - 1), (0x20, 0, 2**32 - 1)]
    content = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)  # setfacl -m u:4242:rwx
    try:
        os.setxattr(listed, "system.posix_acl_access", content)
    except OSError:
        pytest.skip("the file system has no access control lists")
    assert stat.S_IMODE(listed.stat().st_mode) == 0o770 and listed.stat().st_gid == os.getgid()
    assert find_replaceable(listed / "home") == listed
    listed.chmod(0o700)  # the list permits nothing any more
    assert find_replaceable(listed / "home") is None


def test_a_home_that_is_a_file_is_refused(home: Path) -> None:
    home.write_text("x")
    with pytest.raises(UserError, match="Name another folder"):
        create_home()


def test_the_tracker_is_the_homes_own_unless_one_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tracking_is_local() and tracking_uri() == f"sqlite:///{home}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker:5000")
    assert not tracking_is_local() and tracking_uri() == "http://tracker:5000"


def test_settings_of_the_user_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    prepare_environment()
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:secret@host:5000/api failed", "http://host:5000/api failed"),
        ("postgresql://me:s:e:c@host/db", "postgresql://host/db"),
        ("postgresql://me:se/c@host/db", "postgresql://host/db"),
        ("http://host:5000/a/me@work failed", "http://host:5000/a/me@work failed"),
        ("https://token@host", "https://host"),
        ("sqlite:////home/me@work/mlflow.db", "sqlite:////home/me@work/mlflow.db"),
        ("mail me@host about http://host", "mail me@host about http://host"),
    ],
)
def test_names_and_passwords_in_urls_are_not_shown(text: str, shown: str) -> None:
    assert without_credentials(text) == shown


def test_the_homes_own_registry_is_the_same_through_the_server_of_up(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    assert registry_place() == "http://127.0.0.1:5000"
    servers.write_state(servers.ServicesState(pid=1, prefect=None, mlflow="http://127.0.0.1:5000"))
    assert registry_place() == "home"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker:5000")
    assert registry_place() == "http://tracker:5000"


def test_a_thread_keeps_the_home_and_the_tracker_with_which_it_began(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[tuple[Path, str]] = []

    def look() -> None:
        looked.append((home_path(), tracking_uri()))

    late = with_this_home(look)
    monkeypatch.setenv("FINETUNE_HOME", str(tmp_path / "another"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    thread = threading.Thread(target=late)
    thread.start()
    thread.join()
    assert looked == [(home, f"sqlite:///{home}/mlflow.db")]
    assert home_path() == tmp_path / "another"


@pytest.mark.parametrize("name", ["a%20b", "what?"])
def test_a_home_whose_path_libraries_would_take_for_a_url_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("FINETUNE_HOME", str(tmp_path / name))
    with pytest.raises(UserError, match="which paths in URLs of databases cannot have: name another folder"):
        create_home()
    assert not (tmp_path / name).exists()
