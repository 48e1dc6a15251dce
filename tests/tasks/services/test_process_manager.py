"""The services of `finetune up`."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tasks.servers import SERVE, is_healthy
from tasks.services.process_manager import _build_services
from tests.flows.served import register
from tests.servers import closed_port
from tests.training.counting import write_assistant
from tests.waiting import wait_until
from training.jobs.processes import descendants


@pytest.mark.slow
def test_a_served_model_is_a_service_that_keeps_its_port_and_its_address_is_not_awaited(
    home: Path, fresh_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.mkdir(mode=0o700)
    (home / "mlflow.db").write_bytes(fresh_database.read_bytes())
    register(write_assistant(tmp_path / "model"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    port = closed_port()
    service = _build_services({SERVE: port}, str(tmp_path), "counter")[-1]
    url = f"http://127.0.0.1:{port}"
    assert service.name == SERVE and service.ready()
    service.start()
    try:
        wait_until(lambda: is_healthy(url))
        assert service.supervisor is not None
        first = service.supervisor.pid
        (server, *_) = descendants(first)
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: service.restart_if_ended() or service.starts == 2)
        wait_until(lambda: is_healthy(url))
    finally:
        service.stop()
        for one in service.sockets:
            one.close()
    assert not descendants(service.supervisor.pid)
