"""The files for containers are ones that Docker Compose and Kubernetes take, and hold no secret."""

from __future__ import annotations

import fnmatch
import re
import shlex
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from compose_spec import PyCompose

from flows.cli.main import parser
from tasks.services import container_init
from tasks.serving.server import DRAIN_S
from tests.test_infra import help_of

ROOT = Path(__file__).parent.parent
INFRA = ROOT / "infra"
DOCKERFILE = (INFRA / "Dockerfile").read_text()
COMPOSE = (INFRA / "compose.yaml").read_text()
EXAMPLE = (INFRA / ".env.example").read_text()
OWN = "localhost/finetune:latest"
SECRET = re.compile(r"(PASSWORD|SECRET|AUTH_STRING|ACCESS_KEY_ID|TOKEN)$")


def interpolate(text: str) -> str:
    """Compose's variables, with their defaults and the names of .env as values."""
    return re.sub(r"\$\{(\w+)(?::([-?])([^}]*))?\}", lambda found: found[3] if found[2] == "-" else found[1], text)


def services() -> dict[str, Any]:
    described: dict[str, Any] = yaml.safe_load(interpolate(COMPOSE))["services"]
    return described


def test_compose_file_is_one_of_the_compose_specification() -> None:
    read = PyCompose.from_yaml(yaml.safe_dump(yaml.safe_load(interpolate(COMPOSE))))  # which knows no merge keys
    assert set(read.service_names()) == {"postgres", "s3", "bucket", "prefect", "mlflow", "notify", "worker", "serve"}


def test_every_variable_of_the_compose_file_is_in_the_example_and_none_has_a_value() -> None:
    used = set(re.findall(r"\$\{(\w+)", COMPOSE)) - {"IMAGE"}
    assert set(re.findall(r"^(\w+)=$", EXAMPLE, re.MULTILINE)) == used
    assert re.findall(r"^\w+=.+$", EXAMPLE, re.MULTILINE) == []


def test_secrets_come_from_the_environment_and_are_in_no_command_line() -> None:
    for name, service in yaml.safe_load(COMPOSE)["services"].items():
        words = [
            *service.get("command", []),
            *service.get("entrypoint", []),
            *service.get("healthcheck", {}).get("test", []),
        ]
        assert [word for word in words if "${" in str(word)] == [], name
        for variable, value in service.get("environment", {}).items():
            if SECRET.search(variable):
                assert "${" in value, f"{name}: {variable}"
            assert not re.search(r"://[^/@]*:[^/@]*@", str(value)), f"{name}: {variable} has a password in its URL"


def test_only_loopback_of_the_machine_is_served() -> None:
    ports = {name: service.get("ports", []) for name, service in services().items()}
    assert {name for name, given in ports.items() if given} == {"prefect", "mlflow", "serve"}
    assert all(port.startswith("127.0.0.1:") for given in ports.values() for port in given)


def test_every_server_has_a_health_check_that_others_wait_for() -> None:
    described = services()
    for name, service in described.items():
        for other, wait in service.get("depends_on", {}).items():
            ends = described[other].get("healthcheck", {}).get("disable", False)
            assert wait["condition"] == ("service_completed_successfully" if ends else "service_healthy"), name
        if service["image"] == OWN and not service.get("healthcheck"):
            assert name == "worker" or "HEALTH_URL" in service["environment"], name


@pytest.mark.parametrize("name", ["prefect", "mlflow"])
def test_the_programs_of_the_compose_file_have_the_options_that_it_gives(name: str) -> None:
    command = services()[name]["command"]
    words = command[: 2 if command[0] == "mlflow" else 3]
    options = help_of(words)
    given = [word for word in command if word.startswith("--")]
    assert given and [option for option in given if option not in options] == []


def test_the_worker_of_the_image_has_the_options_that_it_is_given() -> None:
    (shell,) = re.findall(r"^CMD (\[.+\])$", DOCKERFILE, re.MULTILINE)
    command = shlex.split(yaml.safe_load(shell)[-1])
    options = help_of(["prefect", "worker", "start"])
    assert [word for word in command if word.startswith("--") and word != "--no-prompt" and word not in options] == []


def test_a_stopped_container_has_the_time_that_its_runs_need() -> None:
    assert container_init.RUNS_STOP_S < container_init.STOP_S
    grace = services()["worker"]["stop_grace_period"]
    assert float(grace.removesuffix("s")) > container_init.STOP_S
    assert manifest()["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > container_init.STOP_S


def manifest() -> dict[str, Any]:
    described: dict[str, Any] = yaml.safe_load((INFRA / "kubernetes/worker.yaml").read_text())
    return described


@pytest.mark.parametrize("version", ["1.30", kubernetes_validate.latest_version()])
def test_worker_manifest_is_one_that_kubernetes_takes(version: str) -> None:
    kubernetes_validate.validate(manifest(), version, strict=True)


@pytest.mark.parametrize("version", ["1.30", kubernetes_validate.latest_version()])
def test_served_model_of_kubernetes_has_no_rights_and_its_token_from_a_secret(version: str) -> None:
    described, service = yaml.safe_load_all((INFRA / "kubernetes/serve.yaml").read_text())
    for one in (described, service):
        kubernetes_validate.validate(one, version, strict=True)
    pod = described["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    parser().parse_args(container["args"][1:])
    assert container["securityContext"] == manifest()["spec"]["template"]["spec"]["containers"][0]["securityContext"]
    assert pod["securityContext"]["runAsNonRoot"] and container["envFrom"] == [
        {"secretRef": {"name": "finetune-serve"}}
    ]
    assert pod["terminationGracePeriodSeconds"] > DRAIN_S
    assert service["spec"]["selector"] == described["spec"]["selector"]["matchLabels"]


def test_worker_of_kubernetes_has_no_rights_and_its_secrets_from_a_secret() -> None:
    pod = manifest()["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] and container["securityContext"]["readOnlyRootFilesystem"]
    assert [variable["name"] for variable in container["env"] if SECRET.search(variable["name"])] == []
    assert container["envFrom"] == [{"secretRef": {"name": "finetune-worker"}}]
    assert container["volumeMounts"][0]["mountPath"] == re.findall(r"^VOLUME (.+)$", DOCKERFILE, re.MULTILINE)[0]


def test_worker_of_kubernetes_is_not_restarted_because_prefects_server_is_away() -> None:
    (container,) = manifest()["spec"]["template"]["spec"]["containers"]
    assert "livenessProbe" not in container and "readinessProbe" in container


def values(chart: str) -> dict[str, Any]:
    described: dict[str, Any] = yaml.safe_load((INFRA / f"kubernetes/{chart}-values.yaml").read_text())
    return described


def test_values_of_the_charts_hold_no_secret() -> None:
    for file in (INFRA / "kubernetes").glob("*-values.yaml"):
        settings = [line for line in file.read_text().splitlines() if not line.startswith("#")]
        assert [line for line in settings if re.search(r"(?i)password|secret_key|:[^/\s]+@", line)] == [], file.name


def test_pod_of_mlflows_chart_is_one_that_kubernetes_takes_with_these_values() -> None:
    given = values("mlflow")
    described = manifest()
    pod = {"securityContext": given["podSecurityContext"], "volumes": given["extraVolumes"]}
    container = {name: given[name] for name in ("env", "envFrom", "resources")}
    container |= {"name": "mlflow", "volumeMounts": given["extraVolumeMounts"]}
    described["spec"]["template"]["spec"] = {**pod, "containers": [container]}
    kubernetes_validate.validate(described, kubernetes_validate.latest_version(), strict=True)


def test_mlflows_server_has_the_options_that_the_chart_gives_it() -> None:
    options = help_of(["mlflow", "server"])
    given = [f"--{name.replace('_', '-')}" for name in values("mlflow")["server"]["value_options"]]
    assert "--app-name" in given and [option for option in given if option not in options] == []


def test_servers_of_compose_kubernetes_and_systemd_send_no_usage_statistics() -> None:
    compose = services()
    env = {chart: {**values(chart), **values(chart).get("server", {})}["env"] for chart in ("mlflow", "prefect-server")}
    settings = {
        "MLFLOW_DISABLE_TELEMETRY": ("true", "mlflow", "mlflow"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": ("false", "prefect", "prefect-server"),
    }
    for variable, (value, service, chart) in settings.items():
        assert compose[service]["environment"][variable] == value
        assert {"name": variable, "value": value} in env[chart]
        assert f"{variable}={value}" in (INFRA / f"systemd/{service}-server.service").read_text()


def test_prefects_chart_has_the_version_of_prefect_that_the_project_has() -> None:
    (pinned,) = re.findall(r"^prefect==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert values("prefect-server")["global"]["prefect"]["image"]["prefectTag"].split("-")[0] == pinned
    assert values("prefect-server")["server"]["basicAuth"] == {"enabled": True, "existingSecret": "prefect-auth"}


def test_git_ignores_the_file_of_secrets() -> None:
    assert ".env" in (ROOT / ".gitignore").read_text().splitlines()


def test_the_image_gets_the_code_and_no_home_or_secret() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    copied = {line[1:] for line in lines if line.startswith("!")}
    assert copied == {
        "flows",
        "tasks",
        "training",
        "deployments",
        "constraints.txt",
        "pyproject.toml",
        "README.md",
        "LICENSE",
    }
    assert any(fnmatch.fnmatch(".env", line.removeprefix("**/")) for line in lines[1:])


def test_the_image_runs_without_rights_and_its_settings_of_pip_are_mounted_only() -> None:
    assert re.findall(r"^USER (.+)$", DOCKERFILE, re.MULTILINE) == ["1000:1000"]
    arguments = re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE)
    assert arguments == ["BASE", "TORCH_INDEX", "EXTRAS"]  # arguments stay in an image's history
    installs = re.findall(r"^RUN (?:.+\\\n)+.*", DOCKERFILE, re.MULTILINE)
    assert all("type=secret,id=pip.conf" in install for install in installs if "pip install" in install)
