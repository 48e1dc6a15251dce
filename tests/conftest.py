"""What tests share: an isolated Prefect server, a home folder of their own, and no network."""

from __future__ import annotations

import fcntl
import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.services.prefect_server import _create_database as create_prefect_database
from tests import fork_server
from tests.footprint import changed, footprint
from tests.servers import closed_port
from training.programs.check_model import CheckedModel

# Hundreds of processes import the same modules, and each would compile them.
sys.dont_write_bytecode = False
gc.set_threshold(50_000, 50, 50)  # most objects of the libraries and of 5,000 collected tests stay
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Read when the libraries are imported, and passed on to the programs that tests start.
_scratch = tempfile.TemporaryDirectory(prefix="finetune-tests-")
os.environ.update(
    DO_NOT_TRACK="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_HUB_OFFLINE="1",
    HYPOTHESIS_STORAGE_DIRECTORY=f"{_scratch.name}/hypothesis",
    MLFLOW_DISABLE_TELEMETRY="true",
    PREFECT_HOME=f"{_scratch.name}/prefect",
    PREFECT_RESULTS_LOCAL_STORAGE_PATH=f"{_scratch.name}/results",
    # One for all homes of the tests: making one takes seconds.
    PREFECT_SERVER_DATABASE_CONNECTION_URL=f"sqlite+aiosqlite:///{_scratch.name}/prefect.db",
    PREFECT_SERVER_ANALYTICS_ENABLED="false",
    PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS="60",
)
if "PYTEST_XDIST_WORKER" not in os.environ:
    fork_server.prepare(_scratch.name)
sys.executable = fork_server.forked_python()
for name in ("MLFLOW_TRACKING_URI", "PREFECT_API_URL"):
    os.environ.pop(name, None)
fork_server.refresh_prefect_settings()  # a worker process is a fork that has imported Prefect
# The home of code without a test's home: nothing may ever be written there.
_unused_home = Path(_scratch.name) / "home-of-no-test"
os.environ["FINETUNE_HOME"] = str(_unused_home)
_before = footprint(_unused_home)
_written: set[str] = set()

ROOT = Path(__file__).resolve().parents[1]
SLOW = (
    *("tests/flows/test_services.py", "tests/flows/test_sweep.py", "tests/flows/test_tool_calls.py"),
    *("tests/flows/test_serve.py", "tests/flows/test_run.py", "tests/flows/test_confidence.py"),
    *("tests/flows/test_hub.py", "tests/flows/test_folds.py", "tests/training/distributed/test_strategies.py"),
    *("tests/training/distributed/test_ranks.py", "tests/flows/test_notify.py", "tests/hub/test_stages.py"),
    *("tests/tasks/jobs/test_batch_memory.py", "tests/tasks/shared_store/test_shared_checkpoints.py"),
)
"""Modules of tests that take longest, the longest first."""


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails the session where a test, or a thread that outlived one, wrote outside the folders of the tests."""
    _written.update(map(str, changed(_before, footprint(_unused_home))))
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["written"] = sorted(_written)
    elif _written:
        print(f"\nwritten outside the tests' own folders: {', '.join(sorted(_written))}", file=sys.stderr)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Collects what a worker process of pytest-xdist found."""
    _written.update(getattr(node, "workeroutput", {}).get("written", ()))


def pytest_configure(config: pytest.Config) -> None:
    """Worker processes of pytest-xdist are forks of one that has imported the libraries."""
    if config.option.collectonly:
        return
    create_prefect_database(Path(_scratch.name, "prefect.db"))  # a server would migrate a new one for seconds
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    fork_server.start_server()  # here: below a supervisor of a test it would be killed with it
    if getattr(config.option, "tx", None):
        config.option.tx = [f"popen//python={sys.executable}" for _ in config.option.tx]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The modules that take longest come first, so that none of them runs alone at the end."""
    order = {ROOT / name: place for place, name in enumerate(SLOW)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


def pytest_xdist_auto_num_workers() -> int:
    """What `-n auto` means: one more than there are cores, for the longest tests wait for servers."""
    return (os.cpu_count() or 1) + 1


@pytest.fixture(autouse=True)
def search_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders in which code of a user's was found are forgotten after the test."""
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture(autouse=True, scope="module")
def prefect_prints() -> Iterator[None]:
    """A command that a test calls in this process silences Prefect's log by variables, which later processes would
    inherit."""
    before = {name for name in os.environ if name.startswith("PREFECT_LOGGING_")}
    yield
    for name in [name for name in os.environ if name.startswith("PREFECT_LOGGING_") and name not in before]:
        del os.environ[name]


@pytest.fixture
def model_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands in this process start no program that checks the model, which takes seconds."""
    for module in ("flows.cli.check", "flows.plan", "tasks.stages.load_model"):
        monkeypatch.setattr(f"{module}.require_model", lambda *_, **__: CheckedModel())


@pytest.fixture(scope="session")
def make_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], None]], Path]:
    """Makes a folder by a name and a function: of all processes that test, the first one to call makes it."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def make(name: str, fill: Callable[[Path], None]) -> Path:
        folder = shared / f"once-{name}"
        folder.mkdir(exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "made").exists():
                fill(folder)
                (folder / "made").touch()
        return folder

    return make


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Prefect server with a database of its own; one a session, since it takes a second to start."""
    from prefect.testing import utilities

    folder = tmp_path_factory.mktemp("prefect")
    create_prefect_database(folder / "prefect-test.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utilities, "mkdtemp", lambda: str(folder))
        patch.setattr(utilities, "_find_available_port", closed_port)
        with utilities.prefect_test_harness(server_startup_timeout=120):
            yield


@pytest.fixture(scope="session")
def fresh_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database of MLflow with all tables."""
    import mlflow

    from tasks.database_templates import create_database
    from tasks.tracking import connection

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    create_database(path, f"mlflow-{mlflow.__version__}", connection._migrate)
    return path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, not made yet, that FINETUNE_HOME names during the test."""
    folder = tmp_path / "home"
    monkeypatch.setenv("FINETUNE_HOME", str(folder))
    return folder


@pytest.fixture
def registry_home(home: Path, fresh_database: Path) -> Path:
    """The home, with an empty registry."""
    home.mkdir(mode=0o700)
    (home / "mlflow.db").write_bytes(fresh_database.read_bytes())
    return home
