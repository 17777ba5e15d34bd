"""The router's process. Run by `processes.py` as `python -m triptych.launch.router_process FD PARENT_PID`; never imports torch."""

import socket
import sys

from triptych.errors import TriptychError
from triptych.launch.messages import Reported, Route, receive, send
from triptych.launch.parent_death import die_with_parent, set_process_name
from triptych.launch.processes import ROUTER
from triptych.router.router import run_router
from triptych.worker.protocol import StartReport


def main() -> None:
    control_fd, parent_pid = (int(argument) for argument in sys.argv[1:])
    die_with_parent(parent_pid)
    set_process_name(ROUTER)
    control = socket.socket(fileno=control_fd)
    command = receive(control, Route)
    if command is None:
        return
    try:
        run_router(command.options)
    except TriptychError as error:
        send(control, Reported(ROUTER, StartReport(error=str(error))))
        sys.exit(1)


if __name__ == "__main__":
    main()
