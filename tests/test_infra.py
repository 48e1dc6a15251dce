"""The systemd units start programs that there are, with options that these have."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from importlib.metadata import distribution, entry_points
from pathlib import Path

import pytest

from flows.cli.main import parser

ROOT = Path(__file__).parent.parent
UNITS = sorted((ROOT / "infra").glob("*/*.service"))
PAGES = "".join((ROOT / "docs/how-to" / page).read_text() for page in ("team.md", "cluster.md"))


def started(unit: Path) -> list[str]:
    """The command of ExecStart: the program's name, then its arguments."""
    (line,) = re.findall(r"^ExecStart=(.+)$", unit.read_text(), re.MULTILINE)
    for name, value in re.findall(r"(\w+)=(\S+)", " ".join(re.findall(r"^Environment=(.+)$", unit.read_text(), re.M))):
        line = line.replace(f"${{{name}}}", value)
    program, *arguments = shlex.split(line)
    assert Path(program).parts[-3:-1] == (".venv", "bin")
    return [Path(program).name, *arguments]


def help_of(words: list[str]) -> str:
    """The program's help for its subcommand."""
    if words[0] == "ray":
        pytest.importorskip("ray", reason="without the extra ray")
    assert entry_points(group="console_scripts", name=words[0])
    if words[0] == "mlflow":  # whose --help takes seconds
        files = ("mlflow/cli/__init__.py", "mlflow/utils/cli_args.py")
        return "".join(Path(str(distribution("mlflow").locate_file(file))).read_text() for file in files)
    module = {"ray": "ray.scripts.scripts"}.get(words[0], words[0])
    argv = [sys.executable, "-m", module, *words[1:], "--help"]
    env = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=True, timeout=120).stdout


def test_every_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    if (systemd_analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not here")
    for unit in UNITS:  # nothing is installed here, and there is no user finetune
        text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", unit.read_text(), flags=re.MULTILINE)
        (tmp_path / unit.name).write_text(text)
    verify = subprocess.run([systemd_analyze, "verify", *map(str, tmp_path.iterdir())], capture_output=True, text=True)
    assert [line for line in verify.stderr.splitlines() if any(unit.stem in line for unit in UNITS)] == []
    assert len(UNITS) == 7 and all(unit.name in PAGES or unit.parent.name == "ray" for unit in UNITS)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: str(unit.stem))
def test_the_program_of_a_unit_has_the_options_that_the_unit_gives(unit: Path) -> None:
    program, *arguments = started(unit)
    if program == "finetune":
        parser().parse_args(arguments)
        return
    words = [word for word in arguments if word.isalpha() and not word.startswith("-")]
    subcommand = words[:2] if program == "prefect" else words[:1]
    options = help_of([program, *subcommand])
    given = [word for word in arguments if word.startswith("--") and word != "--no-prompt"]
    assert given and [option for option in given if option not in options] == []


def test_the_batch_script_of_slurm_is_one_that_bash_takes() -> None:
    script = ROOT / "infra/slurm/finetune.sbatch"
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True).stderr == ""
    options = [word for word in script.read_text().split() if word.startswith("compute.")]
    assert [option.partition("=")[0] for option in options] == ["compute.cluster", "compute.num_machines"]


def test_a_job_of_slurm_ends_as_its_run_does(tmp_path: Path) -> None:
    stand_ins = {
        "scontrol": 'case "$*" in *hostnames*) echo host1;; *) echo NodeName=host1 NodeAddr=127.0.0.1;; esac',
        "srun": "exit 3",
    }
    for name, lines in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "token").write_text("t")
    variables = {"FINETUNE_STORE": "s3://a/b", "FINETUNE_HOME": str(tmp_path), "SLURM_JOB_NODELIST": "host[1-2]"}
    variables |= {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    env = {**os.environ, **variables, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    argv = ["bash", str(ROOT / "infra/slurm/finetune.sbatch"), "small.yaml"]
    assert subprocess.run(argv, env=env, check=False).returncode == 3
    (tmp_path / "srun").write_text(
        "#!/bin/bash\ntrap 'sleep 0.2; exit 130' TERM\ntouch $0.on\nwhile :; do sleep 0.05; done\n"
    )
    job = subprocess.Popen(argv, env=env)
    while not (tmp_path / "srun.on").exists():
        time.sleep(0.01)
    job.terminate()
    assert job.wait() == 130
