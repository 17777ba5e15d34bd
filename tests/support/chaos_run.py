"""`run_chaos`: clients ask a cluster whose workers are killed, stopped and cut off; then everything must be as it was.

A stage's two workers are never hurt at once: the next fault waits until the router lists both again, so that a live worker of each stage is there all
the time, and every answer must be the right one. A fault waits a little for its worker to be busy, so that it has somebody to hit.
"""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil
from chaos_cluster import ChaosCluster, running_chaos_cluster, until
from chat_load import ChatCase, Outcome, answers_of, ask, make_session, picture_url
from chat_parts import user
from fault_plan import FaultKind, PlannedFault, cases_of_client, chaos_cases, plan_faults
from server_state import Traces, descriptors, held_at, read_metrics, still_held, total

from triptych.launch.background import BackgroundServer

NUM_CLIENTS = 8
NUM_ROUTERS, NUM_WORKERS = 2, 6
DEADLINE_S = 60.0
STOPPED_S = 5.0
BUSY_TIMEOUT_S = 2.0
BACK_TIMEOUT_S = 60.0
IDLE_TIMEOUT_S = 30.0
PACE_TIMEOUT_S = 120.0
WHOLE_CACHE = (448, 448)  # pixels: 256 rows, which is all that a worker's encoder cache holds
FLAGS = (
    *("--num-threads", "1", "--num-kv-blocks", "192", "--encoder-cache-rows", "256", "--max-num-batched-tokens", "128"),
    *("--ec-lease-s", "15", "--kv-lease-s", "15"),  # longer than a stop, and shorter than the end's patience with a lost release
)


@dataclass(frozen=True, slots=True)
class Asked:
    client: int
    case: ChatCase
    is_stream: bool
    at_s: float
    seconds: float
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class FaultDone:
    fault: PlannedFault
    at_s: float
    was_busy: bool
    back_after_s: float

    def __str__(self) -> str:
        busy = "busy" if self.was_busy else "idle"
        return f"{self.at_s:7.2f} s  {self.fault.kind:8} {self.fault.worker:10} {busy}, back after {self.back_after_s:.2f} s"


@dataclass
class ChaosReport:
    """What happened in a run, and what was not as it must be."""

    seed: int
    folder: Path  # with the logs
    asked: list[Asked] = field(default_factory=list[Asked])
    faults: list[FaultDone] = field(default_factory=list[FaultDone])
    healings: Mapping[str, float] = field(default_factory=dict[str, float])  # the router's counters of what a fault has cost
    problems: list[str] = field(default_factory=list[str])

    def check_answers(self, wanted: Mapping[str, tuple[str, int]]) -> None:
        for each in self.asked:
            if each.outcome.answer != wanted[each.case.name]:
                how = "a stream" if each.is_stream else "one answer"
                self.problems.append(
                    f"client {each.client}, {each.case.name} as {how}, asked at {each.at_s:.2f} s, after {each.seconds:.2f} s: "
                    f"{each.outcome} instead of {wanted[each.case.name]}"
                )

    @property
    def num_healed(self) -> float:
        """Requests and items that met a fault and were begun anew."""
        return self.total("replays") + self.total("encode_retries")

    @property
    def num_replays_in_timings(self) -> float:
        return sum(each.outcome.timing.get("replays", 0.0) for each in self.asked)

    def total(self, counter: str) -> float:
        return sum(value for name, value in self.healings.items() if name.partition("{")[0] == f"{counter}_total")

    def log_tails(self, num_lines: int = 60) -> str:
        return "\n".join(
            f"--- {log}\n" + "\n".join(log.read_text().splitlines()[-num_lines:]) for log in sorted(self.folder.glob("*.log"))
        )

    def __str__(self) -> str:
        longest = max((each.seconds for each in self.asked), default=0.0)
        kinds = Counter(str(done.fault.kind) for done in self.faults)
        return "\n".join(
            [
                f"seed {self.seed}: {len(self.asked)} requests, the longest took {longest:.2f} s; faults: {dict(kinds)}",
                *map(str, sorted(self.faults, key=lambda done: done.at_s)),
                *(f"{name}: {value:g}" for name, value in self.healings.items()),
                *(f"WRONG: {problem}" for problem in self.problems),
            ]
        )


async def run_chaos(report: ChaosReport, *, num_faults: int, num_cases: int) -> None:
    """Fills the report, as far as it gets."""
    folder, seed = report.folder, report.seed
    shm_before = set(os.listdir("/dev/shm"))
    cases = chaos_cases(seed, num_cases)
    with (folder / "reference.log").open("w") as log, BackgroundServer("demo", "--port", "0", *FLAGS, stderr=log) as reference:
        wanted = await answers_of(reference.wait_until_ready(), cases)
    temp = folder / "tmp"
    temp.mkdir()
    async with running_chaos_cluster(folder, *FLAGS, environment={"TMPDIR": str(temp)}) as cluster:
        at_start = await AtStart.of(cluster)
        await _hurt_and_ask(cluster, seed, num_faults, cases, report)
        report.check_answers(wanted)
        await _check_nothing_is_held(cluster, at_start, report)
        traces = Traces(cluster.all_processes(), temp, shm_before)
        cluster.stop()
        if not traces.are_gone():
            report.problems.append(f"left after the end: {traces.left()}")


async def _hurt_and_ask(
    cluster: ChaosCluster, seed: int, num_faults: int, cases: Sequence[ChatCase], report: ChaosReport
) -> None:
    is_over = asyncio.Event()
    started_at = time.monotonic()
    clients = [
        asyncio.create_task(_client(cluster.url, seed, number, cases, started_at, is_over, report))
        for number in range(NUM_CLIENTS)
    ]
    try:
        async with asyncio.TaskGroup() as stages:
            for faults in plan_faults(seed, num_faults).values():
                stages.create_task(_hurt_stage(cluster, faults, started_at, report))
    finally:
        is_over.set()
        await asyncio.gather(*clients)
    counters = await read_metrics(cluster.url)
    report.healings = {
        name: value
        for name, value in counters.items()
        if name.startswith(("replays_total", "encode_retries_total", "workers_lost"))
    }


async def _client(
    url: str, seed: int, number: int, cases: Sequence[ChatCase], started_at: float, is_over: asyncio.Event, report: ChaosReport
) -> None:
    async with make_session() as session:
        for case, is_stream in cases_of_client(seed, number, cases):
            if is_over.is_set():
                return
            asked_at = time.monotonic()
            outcome = await ask(session, url, case, stream=is_stream, deadline_s=DEADLINE_S)
            report.asked.append(Asked(number, case, is_stream, asked_at - started_at, time.monotonic() - asked_at, outcome))


async def _hurt_stage(cluster: ChaosCluster, faults: Sequence[PlannedFault], started_at: float, report: ChaosReport) -> None:
    """One fault after the other. In between as many requests end as there are clients: how often one is hit must not depend on the machine."""
    num_asked = 0

    async def is_time(fault: PlannedFault) -> bool:
        return len(report.asked) >= num_asked and await cluster.has_both(fault.stage)

    for fault in faults:
        await asyncio.sleep(fault.pause_s)
        await until(partial(is_time, fault), f"requests end, and both {fault.stage} workers are there", PACE_TIMEOUT_S)
        was_busy = True
        try:
            await until(partial(cluster.is_busy, fault.worker), "", BUSY_TIMEOUT_S)
        except TimeoutError:
            was_busy = False
        at = time.monotonic()
        await _hurt(cluster, fault)
        report.faults.append(FaultDone(fault, at - started_at, was_busy, time.monotonic() - at))
        num_asked = len(report.asked) + NUM_CLIENTS


async def _hurt(cluster: ChaosCluster, fault: PlannedFault) -> None:
    """Until the router has noticed, where it must, and lists the worker again."""
    num_lost = await cluster.num_lost(fault.stage)
    old_url = cluster.urls()[fault.worker]
    match fault.kind:
        case FaultKind.KILL:
            cluster.processes()[fault.worker].kill()
            await until(partial(_has_moved, cluster, fault.worker, old_url), f"{fault.worker} is started again", BACK_TIMEOUT_S)
            cluster.follow()
            num_lost += 1
        case FaultKind.STOP:
            process = cluster.processes()[fault.worker]
            process.send_signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(STOPPED_S)  # the fault itself
            finally:
                process.send_signal(signal.SIGCONT)
            await read_metrics(old_url)  # it answers again
        case FaultKind.CUT:
            cluster.forwarders[fault.worker].cut()
            num_lost += 1
    await until(partial(_is_back, cluster, fault.stage, num_lost), f"the router lists {fault.worker} again", BACK_TIMEOUT_S)


async def _has_moved(cluster: ChaosCluster, worker: str, old_url: str) -> bool:
    return cluster.urls()[worker] != old_url


async def _is_back(cluster: ChaosCluster, stage: str, num_lost: float) -> bool:
    return await cluster.num_lost(stage) >= num_lost and await cluster.has_both(stage)


# --- when it is over -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AtStart:
    gauges: dict[str, dict[str, float]]  # by worker
    descriptors: dict[str, Counter[str]]  # by worker, or router

    @classmethod
    async def of(cls, cluster: ChaosCluster) -> "AtStart":
        return cls({name: await held_at(url) for name, url in cluster.urls().items()}, all_descriptors(cluster))


def all_descriptors(cluster: ChaosCluster) -> dict[str, Counter[str]]:
    processes = {**cluster.processes(), "route": psutil.Process(cluster.route.pid)}
    return {name: descriptors(process) for name, process in processes.items() if name != "fork-server"}


async def _check_nothing_is_held(cluster: ChaosCluster, at_start: AtStart, report: ChaosReport) -> None:
    await _use_whole_caches(cluster, report)
    report.problems += await still_held(cluster.urls(), at_start.gauges)
    in_flight = (await read_metrics(cluster.url))["requests_in_flight"]
    if in_flight:
        report.problems.append(f"the router still has {in_flight:g} requests in flight")

    async def are_explained() -> bool:
        return all(_is_explained(name, at_start.descriptors[name], now) for name, now in all_descriptors(cluster).items())

    try:
        await until(are_explained, "idle connections are closed", IDLE_TIMEOUT_S)
    except TimeoutError:
        report.problems.append(f"open descriptors are {all_descriptors(cluster)}, and were {at_start.descriptors} at the start")


def _is_explained(name: str, before: Counter[str], now: Counter[str]) -> bool:
    """A process listens; a router watches each worker. Since the start a worker may have got links, which stay: to each peer that it reads, with
    the peer's arena, and from each that reads it."""
    num_watches, num_read, num_readers = {
        "encode": (NUM_ROUTERS, 0, 2),
        "prefill": (NUM_ROUTERS, 2, 2),
        "decode": (NUM_ROUTERS, 2, 0),
        "router": (NUM_WORKERS, 0, 0),
        "route": (NUM_WORKERS, 0, 0),
    }[name.partition("-")[0]]
    return (
        now["inet"] == 1 + num_watches
        and 0 <= now["unix"] - before["unix"] <= num_read + num_readers
        and 0 <= now["other"] - before["other"] <= num_read
    )


async def _use_whole_caches(cluster: ChaosCluster, report: ChaosReport) -> None:
    """Items that fill a worker's whole encoder cache: a page that was lost would now be missed. One after the other they reach every worker."""
    counters = {
        name: "items_encoded" if name.startswith("encode") else "items_loaded" for name in cluster.urls() if name[0] in "ep"
    }
    before = {name: await total(cluster.urls()[name], counter) for name, counter in counters.items()}
    async with make_session() as session:
        for number in range(2 * len(counters)):
            url = picture_url(f"whole {number}", WHOLE_CACHE)
            case = ChatCase(f"whole cache {number}", user("describe the picture.", url), max_tokens=2)
            outcome = await ask(session, cluster.url, case, deadline_s=DEADLINE_S)
            if outcome.answer is None:
                report.problems.append(f"{case.name}: {outcome}")
    for name, counter in counters.items():
        if await total(cluster.urls()[name], counter) == before[name]:
            report.problems.append(f"{name} has not shown that its whole encoder cache can be had: no more {counter}")
