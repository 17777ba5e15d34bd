"""`ChaosCluster`: E2P2D2 in real processes that a test can hurt.

    clients ──▶ triptych route ──▶ a TcpForwarder per worker ──▶ workers of `triptych serve` (its own router has no clients)

`triptych serve` brings the supervisor, which starts a killed worker again from the fork server, within a second or two; a
`triptych worker` would import torch anew each time, 5 CPU-seconds. Connections are cut in the forwarders: to cut them from outside takes
ptrace rights or root, which a container seldom has. Workers cannot be told to register a forwarder's address, but a second router
can be told where they are: it looks for each until it is there, and again after each loss. Its own log and metrics
say what it has noticed.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

import psutil
from fault_plan import STAGES
from server_state import processes_of, read_metrics, worker_urls
from tcp_forwarder import TcpForwarder

from triptych.config import CLUSTER_SECRET_VARIABLE
from triptych.launch.background import BackgroundServer
from triptych.launch.options import free_port
from triptych.launch.parent_death import die_with_parent

LAYOUT = "E2P2D2"
ROLES: dict[str, str] = dict(zip(STAGES, "EPD", strict=True))
POLL_S = 0.05


async def until(is_true: Callable[[], Awaitable[bool]], what: str, timeout_s: float) -> None:
    """Looks every POLL_S. Raises `TimeoutError` that says what has not happened."""
    deadline_s = time.monotonic() + timeout_s
    while not await is_true():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        await asyncio.sleep(POLL_S)


@dataclass
class ChaosCluster:
    url: str  # of the router that the clients ask
    server: BackgroundServer
    route: "subprocess.Popen[bytes]"
    forwarders: dict[str, TcpForwarder]  # by the worker's name
    logs: dict[str, Path]

    def urls(self) -> dict[str, str]:
        return worker_urls(self.logs["serve"])

    def processes(self) -> dict[str, psutil.Process]:
        return processes_of(self.server)

    def all_processes(self) -> list[psutil.Process]:
        return [*self.processes().values(), psutil.Process(self.server.process.pid), psutil.Process(self.route.pid)]

    async def num_lost(self, stage: str) -> float:
        return (await read_metrics(self.url)).get(f"workers_lost_total{{{ROLES[stage]}}}", 0.0)

    async def has_both(self, stage: str) -> bool:
        return (await read_metrics(self.url))[f"workers{{{ROLES[stage]},ready}}"] == 2

    async def is_busy(self, worker: str) -> bool:
        return (await read_metrics(self.urls()[worker]))["streams"] > 0

    def follow(self) -> None:
        """Point the forwarders to where the workers are now."""
        for name, url in self.urls().items():
            self.forwarders[name].target_port = int(url.rpartition(":")[2])

    def stop(self) -> None:
        self.route.terminate()
        assert self.server.stop() == 0
        self.route.wait(30.0)


@asynccontextmanager
async def running_chaos_cluster(folder: Path, *flags: str, environment: dict[str, str]) -> AsyncGenerator[ChaosCluster]:
    """Ready to be asked. `folder` gets the logs. Whatever still runs in the end is killed."""
    logs = {name: folder / f"{name}.log" for name in ("serve", "route")}
    async with AsyncExitStack() as stack:
        serve_log, route_log = (stack.enter_context(log.open("w")) for log in logs.values())
        environment = {**environment, CLUSTER_SECRET_VARIABLE: "both-routers-share-it"}
        server = stack.enter_context(
            BackgroundServer("demo", "--layout", LAYOUT, "--port", "0", *flags, stderr=serve_log, environment=environment)
        )
        server.wait_until_ready()
        forwarders = {name: TcpForwarder() for name in worker_urls(logs["serve"])}
        for forwarder in forwarders.values():
            await forwarder.start()
            stack.push_async_callback(forwarder.stop)
        port = free_port("127.0.0.1", 0)
        route = _start_route(port, [forwarder.url for forwarder in forwarders.values()], route_log, environment)
        stack.callback(route.wait)
        stack.callback(route.kill)
        cluster = ChaosCluster(f"http://127.0.0.1:{port}", server, route, forwarders, logs)
        cluster.follow()
        await until(partial(_is_complete, cluster), "the router knows all workers", 30.0)
        yield cluster


def _start_route(port: int, urls: list[str], log: IO[str], environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    workers = [word for url in urls for word in ("--worker", url)]
    return subprocess.Popen(
        [sys.executable, "-m", "triptych", "route", "demo", "--layout", LAYOUT, "--port", str(port), *workers],
        stdout=log,
        stderr=log,
        env={**os.environ, **environment},
        preexec_fn=partial(die_with_parent, os.getpid()),
    )


async def _is_complete(cluster: ChaosCluster) -> bool:
    try:
        return all([await cluster.has_both(stage) for stage in STAGES])
    except OSError:  # it does not listen yet
        return False
