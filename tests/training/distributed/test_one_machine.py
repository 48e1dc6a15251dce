"""Processes that train together while another user of the machine connects to them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
import subprocess
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from tests.fork_server import Fork
from tests.processes import listening_ports
from tests.waiting import wait_until
from training.problems import UserError

NOBODY = 65534


def join(folder: str, rank: int) -> None:
    """A rank that joins a group of two, adds numbers with it, and writes what came of it."""
    import torch
    from torch._C._distributed_c10d import AllreduceOptions, ProcessGroupGloo

    from training.distributed import one_machine

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    one_machine.use_store()
    store = next(one_machine._meet("env://", timedelta(seconds=60)))[0]
    Path(folder, f"ready{rank}").touch()
    wait_until(Path(folder, "go").exists)
    try:
        group = ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))
        numbers = torch.ones(3)
        group.allreduce([numbers], AllreduceOptions()).wait()
        result = str(numbers.tolist())
    except UserError as error:
        result = error.problems[0].message
    except Exception as error:
        result = repr(error)
    Path(folder, f"writing{rank}").write_text(json.dumps(result))
    Path(folder, f"writing{rank}").rename(Path(folder, f"result{rank}"))
    wait_until(Path(folder, "end").exists)
    os._exit(0)


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Fork]]:
    """Two ranks that have not yet connected. While the file of their store is locked, they wait for each other."""
    from training.distributed import one_machine

    environment: dict[str, str] = {}
    one_machine.create_store(environment)
    monkeypatch.setenv(one_machine.STORE, environment[one_machine.STORE])
    forks = [Fork(join, (str(tmp_path), rank)).start() for rank in range(2)]
    wait_until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)))
    yield forks
    (tmp_path / "end").touch()
    for fork in forks:
        fork.kill()
        fork.join()


@pytest.mark.skipif(os.getuid() != 0, reason="only root may connect in the name of another user")
def test_nothing_is_exchanged_if_another_user_s_process_has_taken_the_place_of_one(
    ranks: list[Fork], tmp_path: Path
) -> None:
    with contextlib.ExitStack() as connections, open(os.environ["FINETUNE_GROUP_STORE"]) as store:
        fcntl.flock(store, fcntl.LOCK_EX)
        (tmp_path / "go").touch()
        ports = wait_for_ports(ranks)
        os.seteuid(NOBODY)
        try:
            made = [connections.enter_context(socket.socket()) for _ in range(4 * len(ports))]
        finally:
            os.seteuid(0)
        for number, connection in enumerate(made):
            connection.connect(("127.0.0.1", ports[number // 4]))
            connection.sendall(struct.pack("=q", number % 4))  # gloo expects the number of a pair, counted from 0
        fcntl.flock(store, fcntl.LOCK_UN)
        results = [tmp_path / f"result{rank}" for rank in range(2)]
        wait_until(lambda: any(result.exists() for result in results))
        assert {json.loads(result.read_text()) for result in results if result.exists()} == {
            "a process of the user 'nobody' has connected in place of one of this training. Nothing was exchanged. "
            "End that process, or train in a container, and run the same command again."
        }
        for connection in made:
            connection.settimeout(0.2)
            with contextlib.suppress(TimeoutError, ConnectionError):
                assert connection.recv(1) == b""


@pytest.mark.skipif(os.getuid() != 0, reason="some systems permit filters of sockets to root alone")
def test_once_processes_are_connected_no_other_can_connect_to_them(ranks: list[Fork], tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    results = [tmp_path / f"result{rank}" for rank in range(2)]
    wait_until(lambda: all(result.exists() for result in results))
    assert [json.loads(result.read_text()) for result in results] == ["[2.0, 2.0, 2.0]"] * 2
    for port in wait_for_ports(ranks):
        with pytest.raises(TimeoutError):
            socket.create_connection(("127.0.0.1", port), timeout=0.3)


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_another_user_cannot_open_the_store_of_a_group(ranks: list[Fork]) -> None:
    ended = subprocess.run(["cat", os.environ["FINETUNE_GROUP_STORE"]], user=NOBODY, capture_output=True, text=True)
    assert ended.returncode == 1 and "Permission denied" in ended.stderr


def wait_for_ports(ranks: list[Fork]) -> list[int]:
    ports: list[int] = []

    def found() -> bool:
        ports[:] = [port for ends in listening_ports([rank.pid for rank in ranks]).values() for _, port in ends]
        return len(ports) == len(ranks)

    wait_until(found)
    return ports
