"""The files for KubeRay have fields that KubeRay 1.6 has, around pods that Kubernetes takes, and ask for a token."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from flows.cli.main import parser
from tests.test_infra import help_of

ROOT = Path(__file__).parent.parent
FILES = {"RayCluster": "ray-cluster.yaml", "RayJob": "ray-job.yaml"}
SECRET = re.compile(r"(PASSWORD|SECRET|AUTH_STRING|ACCESS_KEY_ID|TOKEN)$")

# Of ray.io/v1: the fields that these files may use, with their types.
Fields = dict[str, Any]
TEXTS: Fields = {"*": str}
GROUP: Fields = {"rayStartParams": TEXTS, "template": {"metadata": dict, "spec": dict}}
CLUSTER: Fields = {
    "rayVersion": str,
    "authOptions": {"mode": {"disabled", "token"}, "secretName": str},
    "headGroupSpec": {**GROUP, "serviceType": {"ClusterIP", "NodePort", "LoadBalancer"}},
    "workerGroupSpecs": [{**GROUP, "groupName": str, "replicas": int, "minReplicas": int, "maxReplicas": int}],
}
SPECS: dict[str, Fields] = {
    "RayCluster": CLUSTER,
    "RayJob": {
        "entrypoint": str,
        "submissionMode": {"K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"},
        "backoffLimit": int,
        "activeDeadlineSeconds": int,
        "shutdownAfterJobFinishes": bool,
        "ttlSecondsAfterFinished": int,
        "rayClusterSpec": CLUSTER,
    },
}


def faults(found: Any, fields: Any, where: str = "spec") -> list[str]:
    """What of a resource is not of these fields and types."""
    if isinstance(fields, set):
        return [] if found in fields else [f"{where}: {found}"]
    if isinstance(fields, list):
        return [fault for index, one in enumerate(found) for fault in faults(one, fields[0], f"{where}[{index}]")]
    if isinstance(fields, type):
        return [] if type(found) is fields else [f"{where}: {found!r} is no {fields.__name__}"]
    known = {name: fields.get(name, fields.get("*")) for name in found}
    unknown = [f"{where}.{name}" for name, kind in known.items() if kind is None]
    return unknown + [
        fault
        for name, kind in known.items()
        if kind is not None
        for fault in faults(found[name], kind, f"{where}.{name}")
    ]


def resource(kind: str) -> dict[str, Any]:
    described: dict[str, Any] = yaml.safe_load((ROOT / "infra/kubernetes" / FILES[kind]).read_text())
    return described


def cluster(kind: str) -> dict[str, Any]:
    spec: dict[str, Any] = resource(kind)["spec"]
    return spec if kind == "RayCluster" else spec["rayClusterSpec"]


def groups(kind: str) -> list[dict[str, Any]]:
    return [cluster(kind)["headGroupSpec"], *cluster(kind)["workerGroupSpecs"]]


@pytest.mark.parametrize("kind", FILES)
def test_resources_have_fields_that_kuberay_has(kind: str) -> None:
    described = resource(kind)
    assert (described["apiVersion"], described["kind"]) == ("ray.io/v1", kind)
    assert faults(described["spec"], SPECS[kind]) == []
    described["spec"]["shutDown"] = True
    assert faults(described["spec"], SPECS[kind]) == ["spec.shutDown"]


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("version", ["1.30", kubernetes_validate.latest_version()])
def test_their_pods_are_ones_that_kubernetes_takes(kind: str, version: str) -> None:
    for group in groups(kind):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": group["template"]["spec"]}
        kubernetes_validate.validate(pod, version, strict=True)


@pytest.mark.parametrize("kind", FILES)
def test_ray_asks_for_a_token_and_pods_have_no_rights(kind: str) -> None:
    assert cluster(kind)["authOptions"]["mode"] == "token"
    for group in groups(kind):
        pod = group["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
        for container in pod["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"]
            values = [variable for variable in container.get("env", []) if "value" in variable]
            assert [variable["name"] for variable in values if SECRET.search(variable["name"])] == []


@pytest.mark.parametrize("kind", FILES)
def test_ray_has_the_options_that_it_is_started_with_in_the_version_of_the_project(kind: str) -> None:
    (pinned,) = re.findall(r"^ray==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert cluster(kind)["rayVersion"] == pinned
    options = help_of(["ray", "start"])
    given = {f"--{name}" for group in groups(kind) for name in group["rayStartParams"]}
    assert [option for option in given if option not in options] == []


def test_the_job_runs_a_command_of_the_project_on_a_recipe_that_is_mounted() -> None:
    program, *arguments = shlex.split(resource("RayJob")["spec"]["entrypoint"])
    assert program == "finetune"
    parsed = parser().parse_args(arguments)
    mounts = cluster("RayJob")["headGroupSpec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert Path(parsed.file).parent.as_posix() in [mount["mountPath"] for mount in mounts]
    machines = sum(group["replicas"] for group in cluster("RayJob")["workerGroupSpecs"])
    assert f"compute.num_machines={machines}" in arguments


def test_the_worker_beside_the_head_uses_the_ray_of_its_pod() -> None:
    pod = cluster("RayCluster")["headGroupSpec"]["template"]["spec"]
    head, worker = pod["containers"]
    assert pod["shareProcessNamespace"]
    env = {variable["name"]: variable for variable in worker["env"]}
    assert env["RAY_ADDRESS"]["value"] == f"127.0.0.1:{head['readinessProbe']['tcpSocket']['port']}"
    named = env["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]
    assert named == {"name": cluster("RayCluster")["authOptions"]["secretName"], "key": "auth_token"}
    shared = {"/tmp", "/dev/shm"}
    assert all(shared <= {mount["mountPath"] for mount in container["volumeMounts"]} for container in (head, worker))
