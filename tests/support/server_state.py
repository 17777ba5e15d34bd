"""What running processes hold, seen from outside: gauges, file descriptors, memory, and the traces that they could leave."""

import asyncio
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import aiohttp
import psutil
from prometheus_client.parser import text_string_to_metric_families

from triptych.launch.background import BackgroundServer

PATIENCE_S = 10.0  # for a process to go, once its end was decided
_ADDRESS = re.compile(r"^(\S+) (?:at (\S+) is ready|is back at (\S+))$", re.MULTILINE)


def eventually(is_true: Callable[[], bool], timeout_s: float = PATIENCE_S) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if is_true():
            return True
        time.sleep(0.02)
    return is_true()


def is_alive(process: psutil.Process) -> bool:
    """An orphan may stay a zombie where nobody waits for it."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def processes_of(server: BackgroundServer) -> dict[str, psutil.Process]:
    """The router's, the fork server's and the workers' that live, by the names that they show in ps."""
    found: dict[str, psutil.Process] = {}
    for child in psutil.Process(server.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess, FileNotFoundError):
            if is_alive(child):
                found[Path(f"/proc/{child.pid}/comm").read_text().strip()] = child
    return found


def worker_urls(log: Path) -> dict[str, str]:
    """Where each worker serves, by name, as `triptych serve` has said it in its log."""
    return {found[1]: found[2] or found[3] for found in _ADDRESS.finditer(log.read_text())}


class Traces:
    """What running clusters could leave behind: processes, listening ports, files in /dev/shm and files in the temp folder."""

    def __init__(self, processes: list[psutil.Process], folder: Path, shm_before: set[str]) -> None:
        self.processes = processes
        self.ports = {
            connection.laddr.port
            for process in self.processes
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        self._folder = folder
        self._shm_before = shm_before

    def left(self) -> list[str]:
        found = [f"process {process.pid}" for process in self.processes if is_alive(process)]
        found += [f"port {port}" for port in self.ports if is_listening(port)]
        found += [f"/dev/shm/{name}" for name in set(os.listdir("/dev/shm")) - self._shm_before]
        return found + [str(path) for path in self._folder.rglob("*") if not path.is_dir()]  # PyTorch makes an empty one

    def are_gone(self) -> bool:
        return eventually(lambda: not self.left())


def descriptors(process: psutil.Process) -> Counter[str]:
    """Open file descriptors by kind: inet and unix sockets, and everything else."""
    sockets = {kind: len(process.net_connections(kind)) for kind in ("inet", "unix")}
    return Counter(sockets | {"other": process.num_fds() - sum(sockets.values())})


async def read_metrics(url: str) -> dict[str, float]:
    """The counters and gauges of a router or a worker, as `name` or `name{label}`; a worker's without the role, which is the same in all.

    Over a connection that is gone afterwards.
    """
    connector, timeout = aiohttp.TCPConnector(force_close=True), aiohttp.ClientTimeout(total=10.0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session, session.get(f"{url}/metrics") as response:
        families = list(text_string_to_metric_families(await response.text()))
    values: dict[str, float] = {}
    samples = [sample for family in families if family.type in ("counter", "gauge") for sample in family.samples]
    for sample in samples:
        if sample.name.endswith("_created"):
            continue
        name = sample.name.removeprefix("triptych_")
        labels = [] if name.startswith("worker_") else list(sample.labels.values())
        values[name.removeprefix("worker_") + ("{" + ",".join(labels) + "}" if labels else "")] = sample.value
    return values


async def total(url: str, counter: str) -> float:
    """Of a counter over all of its labels."""
    return sum(value for name, value in (await read_metrics(url)).items() if name.partition("{")[0] == f"{counter}_total")


async def still_held(urls: dict[str, str], at_start: dict[str, dict[str, float]], timeout_s: float = 30.0) -> list[str]:
    """What workers still hold that they did not hold at the start, once nothing of it goes away any more: releases travel for a moment, and
    a lost one's lease has to lapse."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        found = [
            f"{worker}: {name} is {value:g}, and was {at_start[worker].get(name)} at the start"
            for worker, url in urls.items()
            for name, value in (await held_at(url)).items()
            if value != at_start[worker].get(name)
        ]
        if not found or time.monotonic() > deadline_s:
            return found
        await asyncio.sleep(0.1)


async def held_at(url: str) -> dict[str, float]:
    """A worker's gauges. An item that nobody pins may stay in its encoder cache: the pages can be had, so they count as free."""
    gauges = {name: value for name, value in (await read_metrics(url)).items() if not name.endswith("_total")}
    if gauges["encoder_cache_items_pinned"] == 0:
        gauges["encoder_cache_pages_free"] = gauges["encoder_cache_pages"]
    return gauges
