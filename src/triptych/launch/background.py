"""`BackgroundServer`: `triptych serve` as the child of a script, for demos, benchmarks and tests."""

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from typing import IO

from triptych.errors import StartError
from triptych.launch.parent_death import die_with_parent


class BackgroundServer:
    """Starts `triptych serve` with `arguments` and returns at once; use as a context manager, which stops it. Main thread only.

    `stderr` is where its progress and log lines go; by default the script's own. The server dies with the script.
    """

    def __init__(self, *arguments: str, stderr: IO[str] | None = None, environment: Mapping[str, str] = {}) -> None:
        self.started_at = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "triptych", "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, **environment},
            preexec_fn=partial(die_with_parent, os.getpid()),
        )

    def wait_until_ready(self, timeout_s: float = 120.0) -> str:
        """Its URL. Raises `StartError` if it ends instead, or takes longer."""
        assert self.process.stdout is not None
        deadline_s = self.started_at + timeout_s
        readable, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline_s - time.monotonic()))
        found = re.search(r"http://\S+", self.process.stdout.readline()) if readable else None
        if found is None:
            self.kill()
            what = "ended before it was ready" if readable else f"was not ready within {timeout_s:g} s"
            raise StartError(f"triptych serve {what}.")
        return found.group(0)

    def stop(self, timeout_s: float = 30.0) -> int:
        """As Ctrl-C does; its exit code. Raises `subprocess.TimeoutExpired`."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        """At once; its children go along (parent_death.py)."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> "BackgroundServer":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            try:
                self.stop()
            finally:
                self.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()
