"""`accelerate launch`, whose processes meet on one interface: `python -m training.programs.launch OPTION …`.

They find each other at torch's store, a server without a login, which by default listens on all interfaces. Here it
listens on 127.0.0.1; with several machines, on the address of machine 0 (`--main_process_ip`). This process holds the
port from the start, so no other program can take it.
"""

from __future__ import annotations

import socket

from accelerate.commands.launch import launch_command, launch_command_parser


def main() -> None:
    """Runs `accelerate launch` with the options of the command line."""
    options = launch_command_parser().parse_args()
    if options.multi_gpu and not options.machine_rank:
        listening = socket.create_server((options.main_process_ip or "127.0.0.1", options.main_process_port))
        options.main_process_port = listening.getsockname()[1]
        _use_for_store(listening)
    launch_command(options)


def _use_for_store(listening: socket.socket) -> None:
    """Makes the store of torch's launcher in this process listen on this socket."""
    from accelerate.utils import launch
    from torch.distributed.elastic.rendezvous import RendezvousInfo, static_tcp_rendezvous

    from training.distributed.ranks import host_store

    class Rendezvous(static_tcp_rendezvous.StaticTCPRendezvous):
        def next_rendezvous(self) -> RendezvousInfo:
            self._store = self._store or host_store(listening, self.world_size, self.timeout)
            return super().next_rendezvous()

    static_tcp_rendezvous.StaticTCPRendezvous = Rendezvous  # type: ignore[misc]
    launch.is_port_in_use = lambda port: False  # it is: accelerate would choose another, on all interfaces


if __name__ == "__main__":
    main()
