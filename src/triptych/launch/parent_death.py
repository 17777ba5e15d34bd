"""Ties a child's life to its parent's: whatever ends the parent, SIGKILL included, ends the child.

The launcher is the parent of the fork server and of the router, the fork server is the parent of the workers; so the death of one
takes everything below it along, and what a dead process held (sockets, memfd arenas) the kernel takes back.
"""

import ctypes
import os
import signal
import sys

from triptych.errors import StartError

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent dies; exits at once if `parent_pid` has died already.

    To be called by a child first of all, and from a parent's main thread: the kernel watches the thread that forked.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the request above
        os._exit(1)


def set_process_name(name: str) -> None:
    """Show the first 15 bytes of `name` in ps and top."""
    _prctl(_PR_SET_NAME, ctypes.create_string_buffer(name.encode()))


def _prctl(option: int, argument: "int | ctypes.Array[ctypes.c_char]") -> None:
    if sys.platform != "linux":
        raise StartError("triptych serve needs Linux (prctl, memfd); start from a Linux host or container.")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        raise StartError(f"prctl({option}) failed: {os.strerror(ctypes.get_errno())}.")
