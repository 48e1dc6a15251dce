"""The environment variables of commands, programs and servers. Each program and server gets only what it needs.

| process | gets |
|---|---|
| a command, a worker, and the runs that it starts | the whole environment, and ENVIRONMENT |
| a program of a job | BASE, the names in FINETUNE_PASS_ENV, and what its stage adds: HUB, BUCKETS, MLFLOW |
| the process that uses a Ray cluster | BASE, the names in FINETUNE_PASS_ENV, RAY_CLUSTER |
| a server | BASE, and its own settings: PREFECT_SERVER, or BASE alone for MLflow's |

Processes with several ranks or GPUs also get the variables of tasks/jobs/commands.py.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import re
import stat
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tasks.home import home_path
from training.jobs.resources import cores
from training.jobs.search_path import VARIABLE, search_path, start_variables
from training.local_files import open_regular, read_whole
from training.problems import Problem

ENVIRONMENT = {
    # Nothing about a user's runs leaves the machine unasked.
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    # Without a bar per file between the lines of the stages.
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    # Prefect would otherwise start its own server, which has no password.
    "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",
    "TOKENIZERS_PARALLELISM": "true",
}

ACCESS_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
"""The variables in which the Hub's clients look for an access token first."""

PROXIES = ("http_proxy", "https_proxy", "all_proxy")
LOOPBACK = ("127.0.0.1", "localhost", "::1")

# The bars of the Hub's clients are for a person who waits, not for a log.
WITHOUT_TERMINAL = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}

PASS_ENV = "FINETUNE_PASS_ENV"
"""The variable in which the user names further ones for the programs of jobs: `NAME,OTHER_*`."""

BASE = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "HOSTNAME", "LANG", "LANGUAGE", "LC_*", "TZ", "TZDIR", "XDG_*"),
    *("TMPDIR", "TMP", "TEMP", "TERM", "COLUMNS", "NO_COLOR", "LD_*", "GLIBC_TUNABLES", "MALLOC_*"),
    # Python and its libraries.
    *("PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "COVERAGE_*", "MPL*", "TQDM_*", "ARROW_*", "RAYON_*", "RUST_*"),
    *("FINETUNE_*", *ENVIRONMENT, *WITHOUT_TERMINAL, "DISABLE_TELEMETRY", "TF_CPP_*", "NLTK_DATA"),
    *("HF_*", "HUGGINGFACE_*", "TRANSFORMERS_*", "TOKENIZERS_*", "SAFETENSORS_*", "USE_*", "MLFLOW_*", "ORT_*"),
    # Arithmetic, GPUs, and processes that talk to each other.
    *("OMP_*", "GOMP_*", "KMP_*", "MKL_*", "OPENBLAS_*", "BLIS_*", "NUMEXPR_*", "VECLIB_*", "ONEDNN_*", "DNNL_*"),
    *("TORCH*", "PYTORCH_*", "ATEN_*", "TRITON_*", "FLASH_ATTENTION_*", "XFORMERS_*", "BNB_*", "DS_*", "DEEPSPEED_*"),
    *("CUDA_*", "CUBLAS_*", "CUDNN_*", "NVIDIA_*", "NVTE_*", "NCCL_*", "GLOO_*", "UCX_*", "FI_*", "TP_*"),
    *("SLURM_JOB_*", "SLURM_NODELIST", "SLURMD_NODENAME", "SLURM_TMPDIR"),
    # Compilers, for torch and DeepSpeed.
    *("CC", "CXX", "CPATH", "LIBRARY_PATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "MAX_JOBS", "NINJA_*"),
    # The network.
    *("http_proxy", "https_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
)
"""For each process, as names and their beginnings. Of the names that a beginning fits, those of a credential, and
values with a login in a URL, are left out."""
LEFT_OVER = ("TORCHELASTIC_*", "FINETUNE_GROUP_STORE", "FINETUNE_SWEEPS")
"""Of BASE, but of another launcher, or of the flow alone."""
_CREDENTIAL = re.compile(
    r"(?:^|_)(?:TOKENS?|SECRETS?|PASS(?:WORDS?|WD)?|KEYS?|AUTH|JWT|OIDC|CREDENTIALS?|USERNAME|DSN)(?:_|$)"
)
_LOGIN = re.compile(r"://[^/@\s]*@|://[^/:@\s]*:(?!\d+(?:/|$))[^@\s]+@")

HUB = (*ACCESS_TOKENS, "HF_*", "ACTIONS_ID_TOKEN_REQUEST_*", "GITHUB_ACTIONS")
"""For a program that writes to the Hugging Face Hub; a CI job may exchange its identity for a token."""
BUCKETS = ("AWS_*", "AZURE_*", "GOOGLE_*", "GCLOUD_*", "CLOUDSDK_*", "FSSPEC_*")
"""For a program that reads rows from a bucket or a web server, or writes files to a bucket."""
MLFLOW = ("MLFLOW_TRACKING_*", "MLFLOW_REGISTRY_URI", "DATABRICKS_*")
"""For a client of MLflow's server."""
DATABASE = ("PG*", "MYSQL_*")
"""For a process that opens a database of the user's, whose URL need not contain the password."""
PREFECT_SERVER = ("PREFECT_*", *DATABASE)
"""For a Prefect server, whose database may be the user's."""
NOT_OF_SERVER = ("PREFECT_API_KEY", "PREFECT_API_AUTH_STRING", PASS_ENV)
RAY_CLUSTER = ("RAY_*", *BUCKETS)
"""For the process that uses Ray: the machines of a cluster that it starts here have its environment."""


def prepare_environment() -> None:
    """Sets the variables that prefect, mlflow and huggingface_hub read on import, unless the user has set them."""
    for name, value in (ENVIRONMENT if sys.stderr.isatty() else ENVIRONMENT | WITHOUT_TERMINAL).items():
        os.environ.setdefault(name, value)
    if any(os.environ.get(name) for proxy in PROXIES for name in (proxy, proxy.upper())):
        # Clients of the servers here would send their requests, and the password, to the proxy.
        for name, other in (("no_proxy", "NO_PROXY"), ("NO_PROXY", "no_proxy")):
            hosts = [host.strip() for host in (os.environ.get(name) or os.environ.get(other) or "").split(",")]
            os.environ[name] = ",".join(dict.fromkeys(filter(None, [*hosts, *LOOPBACK])))
    if not os.environ.get("HOME"):
        with contextlib.suppress(KeyError):  # a user id without an entry, as containers may have
            os.environ["HOME"] = pwd.getpwuid(os.getuid()).pw_dir
    ignore_prefect_settings_here()


def ignore_prefect_settings_here() -> None:
    """Prefect, imported before or later, reads no settings in the working directory. It would look there again whenever
    it builds its settings, and find files that others who may write to a shared folder have put there meanwhile."""
    if sources := sys.modules.get(_PREFECT_SOURCES):
        _read_no_file_here(sources)
    elif not any(isinstance(finder, _PrefectSources) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PrefectSources())


_PREFECT_SOURCES = "prefect.settings.sources"
_PREFECT_FILES = (".env", "prefect.toml", "pyproject.toml")
_PREFECT_VARIABLE = re.compile(rb"(?i)(?:\A|[\r\n])[ \t\v\f'\"]*(?:export[ \t\v\f]+)?['\"]?prefect_")
_MOST_DOTS = 50
"""Of a line of pyproject.toml that is parsed, if the file mentions Prefect."""


class _PrefectSources:
    """Finds the module of Prefect that reads files of settings, and changes it when it is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Called for each import."""
        spec = PathFinder.find_spec(name, path) if name == _PREFECT_SOURCES else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                _read_no_file_here(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _read_no_file_here(sources: Any) -> None:
    read = sources._read_toml_file
    sources._read_toml_file = lambda path: {} if str(path) in _PREFECT_FILES else read(path)
    sources.FilteredDotEnvSettingsSource._read_env_files = lambda source: {}
    sources.dotenv = SimpleNamespace(dotenv_values=lambda path: {})


def find_environment_problems() -> list[Problem]:
    """Problems of the variables that would end libraries with a traceback, whatever they are used for, and of files in
    the working directory that libraries would read as settings."""
    problems = list(_find_foreign_settings())
    if not os.environ.get("HOME"):
        message = f"is not set, and user {os.getuid()} has no home folder: set it to a folder that you may write to."
        problems.append(Problem(kind="environment", where="HOME", message=message))
    certificates = os.environ.get("SSL_CERT_FILE")
    if certificates and not _has_certificates(Path(certificates)):
        message = f"{certificates} is no file with certificates: name one, or unset the variable."
        problems.append(Problem(kind="environment", where="SSL_CERT_FILE", message=message))
    return problems


def _find_foreign_settings() -> Iterator[Problem]:
    """Prefect takes settings from files of the working directory, which may have come with rows: they name a server for
    passwords and rows, and code that configures logging."""
    readers: dict[str, tuple[str, Callable[[bytes], bool]]] = {
        ".env": ("Prefect", lambda text: bool(_PREFECT_VARIABLE.search(text))),
        "prefect.toml": ("Prefect", lambda text: bool(text.strip())),
        "pyproject.toml": ("Prefect", _has_prefect_table),
        "matplotlibrc": ("matplotlib", lambda text: os.stat("matplotlibrc").st_uid not in (os.getuid(), 0)),
    }
    for name, (library, has_settings) in readers.items():
        try:
            status = os.stat(name)
            if stat.S_ISDIR(status.st_mode):  # a virtual environment may be in .env
                continue
            if stat.S_ISREG(status.st_mode):
                with open_regular(Path(name)) as file:
                    if not has_settings(read_whole(file)):
                        continue
        except OSError as error:
            if error.errno != errno.EFBIG:  # there is none, or none that can be read
                continue
        message = f"{library} would take settings from this file in the working directory, which may have come with "
        message += "rows or a model. Set them in the environment or in a profile (`prefect config set`), and remove "
        message += "them here, or call finetune in another folder."
        yield Problem(kind="environment", where=name, message=message)


def _has_prefect_table(text: bytes) -> bool:
    """Whether a pyproject.toml has settings of Prefect's. One that could have some and cannot be parsed counts, too:
    the parser's memory grows with the square of the parts of a key."""
    if b"prefect" not in text:
        return False
    if max(line.count(b".") for line in text.splitlines()) > _MOST_DOTS:
        return True
    try:
        return "prefect" in tomllib.loads(text.decode()).get("tool", {})
    except ValueError:  # Prefect ignores it too
        return False
    except RecursionError:
        return True


def _has_certificates(file: Path) -> bool:
    try:
        return b"-----BEGIN" in file.read_bytes()
    except OSError:
        return False


def passed(patterns: Iterable[str]) -> dict[str, str]:
    """The variables of this process whose names fit the patterns."""
    patterns = tuple(patterns)
    return {name: value for name, value in os.environ.items() if _fits(name, patterns)}


def environment(added: Mapping[str, str]) -> dict[str, str]:
    """The environment of a job's program on this machine; `added` is what its stage adds."""
    return base_environment() | added_environment(added)


def base_environment(*patterns: str) -> dict[str, str]:
    """The variables of BASE, those named in FINETUNE_PASS_ENV, and those whose names match one of the patterns."""
    named = [name.strip() for name in os.environ.get(PASS_ENV, "").split(",")]
    return _base() | passed([*named, *patterns])


def server_environment(own: Iterable[str]) -> dict[str, str]:
    """The environment of a server, with the variables that fit the patterns `own`."""
    return {name: value for name, value in (_base() | passed(own)).items() if name not in NOT_OF_SERVER}


def _base() -> dict[str, str]:
    """The variables of BASE. Rank numbers and launcher settings, which may be left over from a shell, a notebook or a
    scheduler, are not among them."""
    return {name: value for name, value in passed(BASE).items() if name in BASE or not _is_private(name, value)}


def _is_private(name: str, value: str) -> bool:
    return bool(_CREDENTIAL.search(name) or _LOGIN.search(value)) or _fits(name, LEFT_OVER)


@cache
def _fits(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def added_environment(added: Mapping[str, str]) -> dict[str, str]:
    """The variables of all jobs, and `added`, which has precedence."""
    defaults = {
        # The number of threads changes how sums are rounded: a later try must round in the same way.
        "OMP_NUM_THREADS": str(cores()),
        # Threads that spin while they wait starve each other as soon as anything else runs: with one other busy process
        # on two cores, a training step took three times as long. Threads that sleep at once cost a tenth of a step on
        # quiet cores. With this count a thread spins for some 0.1 ms before it sleeps, which avoids both.
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "3000",
        # A training step frees and allocates tensors of megabytes. By default glibc returns them to the system, which
        # then clears 50 MB of pages at every step: a tenth of the step's time on a CPU.
        "MALLOC_MMAP_THRESHOLD_": str(2**30),
        "MALLOC_TRIM_THRESHOLD_": str(2**34),
        # Memory in pages of 2 MB, where Linux gives them on request: a training step is a tenth faster on a CPU, and a
        # copy of weights that were not used for some seconds takes a fifth of the time.
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        # torch loads compiled code and pickles from here, Triton's kernels among them. By default it is a folder of
        # /tmp with the user's name, which another user can create first.
        "TORCHINDUCTOR_CACHE_DIR": str(home_path() / "compiled"),
    }
    if "OMP_WAIT_POLICY" in os.environ:
        del defaults["GOMP_SPINCOUNT"]  # it would have precedence over the user's policy
    env = {name: os.environ.get(name, value) for name, value in defaults.items()}
    # A checkout comes first: a `training` folder of the user's must not hide ours. Programs then take over the search
    # path of this process, so that both import the same modules.
    env |= start_variables()
    env[VARIABLE] = os.pathsep.join(search_path())
    env |= {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    env |= {"USE_HUB_KERNELS": "NO"}  # transformers would run code of the Hub where the package kernels is installed
    env |= {"HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1", "MLFLOW_DISABLE_TELEMETRY": "true"}
    return {**env, **added}
