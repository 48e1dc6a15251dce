"""`accelerate launch`, whose processes meet where no stranger does:
`python -m training.programs.accelerate_launch OPTION …`.

They find each other at torch's store, a server without a login, which by default listens on all interfaces. On one
machine there is no such server: see training.distributed.one_machine. With several machines, the store listens on the
address of machine 0 (`--main_process_ip`), and this process holds its port from the start, so no other program can take
it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from accelerate.commands import launch

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed.elastic.rendezvous import RendezvousInfo


def main() -> None:
    """Runs `accelerate launch` with the options of the command line."""
    # Accelerate would start CUDA here, which does not survive a fork, and the program may be a fork of this process. It
    # checks the number format itself.
    launch.is_bf16_available = lambda ignore_tpu: True
    options = launch.launch_command_parser().parse_args()
    if options.multi_gpu and options.num_machines == 1:
        from torch._C._distributed_c10d import HashStore

        from training.distributed import one_machine

        one_machine.create_store(os.environ)
        _use_store(lambda machines, timeout: HashStore())
    elif options.multi_gpu and not options.machine_rank:
        from accelerate.utils import launch as ports

        from training.distributed.ranks import host_store

        listening = socket.create_server((options.main_process_ip, options.main_process_port))
        options.main_process_port = listening.getsockname()[1]
        _use_store(lambda machines, timeout: host_store(listening, machines, timeout))
        ports.is_port_in_use = lambda port: False  # it is: accelerate would choose another, on all interfaces
    launch.launch_command(options)


def _use_store(create: Callable[[int, timedelta], Store]) -> None:
    """Makes this the store of torch's launcher in this process."""
    from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

    class Rendezvous(static_tcp_rendezvous.StaticTCPRendezvous):
        def next_rendezvous(self) -> RendezvousInfo:
            self._store = self._store or create(self.world_size, self.timeout)
            return super().next_rendezvous()

    static_tcp_rendezvous.StaticTCPRendezvous = Rendezvous  # type: ignore[misc]


if __name__ == "__main__":
    main()
