"""Two Ray nodes on this machine, each with a home of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

NODES = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster()
for home in sys.argv[1:]:
    cluster.add_node(num_cpus=2, include_dashboard=False, env_vars={"FINETUNE_HOME": home})
print(cluster.address, *(node.all_processes["raylet"][0].process.pid for node in cluster.list_all_nodes()), flush=True)
sys.stdin.read()
cluster.shutdown()
"""


class Nodes(NamedTuple):
    """A cluster that runs."""

    address: str
    raylets: tuple[int, ...]
    """The process of Ray on each machine."""


@contextmanager
def ray_nodes(homes: Sequence[Path], **variables: str) -> Iterator[Nodes]:
    """A cluster with a node for each of these homes. `variables`: of all nodes."""
    for home in homes:
        home.mkdir(mode=0o700)
    nodes = subprocess.Popen(
        [sys.executable, "-c", NODES, *map(str, homes)],
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with nodes:
        assert nodes.stdout is not None and nodes.stdin is not None
        address, *raylets = next(line for line in nodes.stdout if ":" in line).split()
        yield Nodes(address, tuple(map(int, raylets)))
        nodes.stdin.close()
