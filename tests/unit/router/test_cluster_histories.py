"""Random histories of a whole cluster on virtual time: the router's pipeline, pool and placement, workers of real engines, and faults.

Each history comes from one seed. A failure says which; to replay it, with what happened printed:

    PYTHONPATH=tests/support python tests/unit/router/test_cluster_histories.py 123

A layout behind the seed makes it calm weather there.
"""

import asyncio
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest
from faulty_cluster import SILENCE_S, FaultyCluster, Weather

from triptych.config import CacheConfig, ConnectorConfig, EngineConfig, SchedulerConfig, Stage
from triptych.engine.arithmetic_runner import MODEL, expected_tokens
from triptych.errors import TriptychError
from triptych.media.item import MediaItem
from triptych.router.fake_worker_client import FakeCosts
from triptych.router.running_request import GenerateJob
from triptych.router.timing import Stopwatch
from triptych.router.virtual_time import run_virtual
from triptych.sampling_params import SamplingParams

LAYOUTS = ("E1P1D1", "E2PD2", "EP2D2", "EPD2", "ED2P2", "E1EP1P1PD1D2", "E3P1D2", "EPD1")
PICTURE_ROWS = (3, 5, 8, 11, 6, 4)  # by the picture's number
TIMEOUT_S = 60.0  # of a request
WAIT_S = 20.0  # for an item, or for KV
LEASE_S = 12.0
SETTLED_S = WAIT_S + LEASE_S + 10.0
CALM_SETTLED_S = 2.0  # less than any lease: where nothing went wrong they are released and do not lapse
TEXT_S = 10.0  # a text-only request takes no longer where nothing befalls the workers that it needs
REPLAY = "replay it with PYTHONPATH=tests/support python tests/unit/router/test_cluster_histories.py"
RETRIES = 3  # fewer faults than that cannot use up the encodes of an item (3) or the replays of a request (3)


@dataclass
class Asked:
    """A request, and what became of it."""

    job: GenerateJob
    at_s: float
    leaves_after_s: float  # the client's patience
    outcome: str = ""  # "answered", "left", or the error's type
    error: TriptychError | None = None
    ended_s: float = 0.0

    @property
    def keys(self) -> list[str]:
        return list(self.job.media)

    @property
    def names(self) -> set[str]:
        """Of what can go wrong with this request alone: its items, and its calls to workers."""
        return {*self.keys} | {f"{self.job.request_id}-{call}" for call in range(1, 17)}


class History:
    def __init__(self, seed: int, *, is_calm: bool = False, layout: str = "") -> None:
        self.rng = rng = Random(seed)
        self.replay = f"{seed} {layout}"
        self.layout = layout or rng.choice((*["E2P2D2"] * 8, *LAYOUTS))
        self.is_roomy = is_calm or rng.random() < 0.3
        self.config = self._draw_config()
        self.costs = FakeCosts(
            preparation_s=rng.random() / 10,
            encode_s=rng.random(),
            prefill_s=rng.random() / 10,
            decode_s=rng.random() / 20,
            transfer_s=rng.choice([0.0, 0.002, 0.3]),
        )
        self.weather = Weather() if is_calm else self._draw_weather()
        self.num_harms = 0 if is_calm else rng.choice((0, 1, 1, 2, 2, 3, 5))
        self.arrivals_s = rng.choice((0.2, 5.0, 5.0))
        self.asked = [self._draw_request(number, is_calm) for number in range(rng.randrange(6, 13))]

    # --- what is drawn before anything happens

    def _draw_config(self) -> EngineConfig:
        rng = self.rng
        cache = CacheConfig(
            block_size=4,
            num_kv_blocks=256 if self.is_roomy else rng.choice((18, 24, 40)),
            encoder_cache_rows=256 if self.is_roomy else rng.choice((12, 16, 24, 36)),
            rows_per_page=4,
        )
        scheduler = SchedulerConfig(
            max_num_batched_tokens=rng.choice((5, 16, 64)),
            max_num_seqs=rng.choice((2, 5)),
            max_encoder_rows=rng.choice((8, 32)),
            max_num_waiting=1024 if self.is_roomy else rng.choice((1024, 1024, 1)),
        )
        connector = ConnectorConfig(ec_timeout_s=WAIT_S, kv_timeout_s=WAIT_S, ec_lease_s=LEASE_S / 2, kv_lease_s=LEASE_S)
        return EngineConfig(MODEL, is_alone=False, cache=cache, scheduler=scheduler, connector=connector)

    def _draw_weather(self) -> Weather:
        """Each kind of fault in a part of the histories only, so that most can be held to few faults."""
        rng = self.rng

        def share(most: float, of_histories: float = 0.25) -> float:
            return rng.random() * most if rng.random() < of_histories else 0.0

        return Weather(
            late=share(0.5, 0.5), late_s=rng.choice((0.05, 0.5, 3.0)), lost=share(0.15), twice=share(0.3), refused=share(0.15, 0.15),
            failed=share(0.1, 0.15), unread=share(0.2), unencoded=share(0.2, 0.2),
        )  # fmt: skip

    def _draw_request(self, number: int, is_calm: bool) -> Asked:
        rng = self.rng
        token_ids, items = [rng.randrange(1, 200) for _ in range(rng.randrange(1, 16))], list[MediaItem]()
        for _ in range(rng.choice((0, 0, 1, 1, 1, 1, 2, 3))):
            picture = rng.randrange(len(PICTURE_ROWS))
            rows, key = PICTURE_ROWS[picture], f"{picture + 1:08x}".ljust(64, "0")
            items.append(MediaItem(key, "image", ((len(token_ids), rows),), rows, (1, 4, 4)))
            token_ids += [5] * rows + [rng.randrange(1, 200) for _ in range(rng.randrange(1, 3))]
        sampling = SamplingParams(max_tokens=rng.randrange(1, 9), seed=rng.randrange(99))
        media = {item.key: item.key.encode() for item in items}
        job = GenerateJob(f"r{number}", tuple(token_ids), sampling, tuple(items), media, priority=rng.choice((0, 0, 0, 1, -1)))
        has_patience = is_calm or rng.random() < 0.85
        return Asked(job, at_s=self.arrivals_s * rng.random(), leaves_after_s=TIMEOUT_S + 1 if has_patience else 3 * rng.random())

    # --- what happens

    def run(self) -> list[str]:
        """The trace of all events. Raises `AssertionError` with the seed when something is not as it must be."""
        try:
            return run_virtual(self._run())
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.layout}, {REPLAY} {self.replay}") from error

    async def _run(self) -> list[str]:
        cluster = FaultyCluster(self.layout, self.config, self.costs, self.weather, self.rng, TIMEOUT_S)
        try:
            await asyncio.gather(*(self._ask(cluster, asked) for asked in self.asked), self._torment(cluster))
            await asyncio.sleep(SETTLED_S if cluster.log.faults else CALM_SETTLED_S)
        finally:
            self.trace = cluster.log.trace
            for worker in cluster.live:
                if worker.engine is not None and worker.engine.done():
                    worker.engine.result()  # raises what broke it
            for error in cluster.broken:
                raise error
        for asked in self.asked:
            self._check_outcome(cluster, asked)
        self._check_nothing_is_left(cluster)
        self._check_encodes(cluster)
        await cluster.close()
        return cluster.log.trace

    async def _ask(self, cluster: FaultyCluster, asked: Asked) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(asked.at_s)
        tokens: list[int] = []
        try:
            request = cluster.pipeline.run(asked.job, Stopwatch(loop.time))
            async with asyncio.timeout(asked.leaves_after_s), cluster.pipeline.admitted(), request as running:
                async for batch in running.tokens():
                    tokens += [token.token_id for token in batch]
            assert running._inbox.empty(), "something follows the end"  # pyright: ignore[reportPrivateUsage]
            asked.outcome = "answered"
        except TriptychError as error:
            asked.outcome, asked.error = error.type, error
        except TimeoutError:
            asked.outcome = "left"
        if asked.outcome != "answered":
            for key in asked.keys:  # its encodes may end unheard
                cluster.log.note(key, f"{asked.job.request_id} has ended")
        asked.ended_s = loop.time()
        cluster.log.say(f"{asked.job.request_id} {asked.outcome} {tokens}")
        job = asked.job
        expected = expected_tokens(job.token_ids, job.items, job.sampling.max_tokens, job.sampling.seed)
        assert tokens == expected[: len(tokens)], f"{job.request_id} got {tokens} and not {expected}"
        assert asked.outcome != "answered" or tokens == expected, f"{job.request_id} got {tokens} only of {expected}"

    async def _torment(self, cluster: FaultyCluster) -> None:
        for _ in range(self.num_harms):
            await asyncio.sleep(4 * self.rng.random())
            cluster.harm()
        await asyncio.sleep(SILENCE_S + 6)  # until who stands still goes on

    # --- what must be true of it

    def _check_outcome(self, cluster: FaultyCluster, asked: Asked) -> None:
        assert asked.ended_s - asked.at_s <= TIMEOUT_S + 0.01, f"{asked.job.request_id} did not end in time"
        is_slow = asked.ended_s - asked.at_s > TEXT_S
        if not asked.job.items and is_slow and asked.outcome != "left" and not cluster.is_slow:
            harmed = {id for id in cluster.touched if not cluster.workers[id].config.is_encoder_only}
            assert harmed or cluster.log.hits(asked.names), (
                f"text-only {asked.job.request_id} took {asked.ended_s - asked.at_s:.1f} s"
            )
        if asked.error is None:
            return
        why = f"{asked.job.request_id} ended with {asked.error.status}: {asked.error}"
        faults = [(hit, fault) for _, hit, fault in cluster.log.faults if hit in asked.names]
        match asked.error.status:
            case 400:
                assert any("bad_media" in fault for _, fault in faults), why
            case 429:
                assert any("full" in fault for _, fault in faults) or self.config.scheduler.max_num_waiting < 1024, why
            case 503 | 504:
                stages = [Stage.PREFILL, Stage.DECODE, *([Stage.ENCODE] if asked.job.items else [])]
                is_whole = all(cluster.healthy(stage) for stage in stages)
                num_faults = len(faults) + cluster.log.hits(cluster.touched)
                assert not is_whole or num_faults >= RETRIES, f"{why}; it met {faults} and {cluster.touched}"
            case _:
                raise AssertionError(why)

    def _check_nothing_is_left(self, cluster: FaultyCluster) -> None:
        for worker in cluster.live:
            scheduler, name = worker.core.scheduler, worker.info.worker_id
            held = {
                "streams": worker.num_streams,
                "running": scheduler.num_running,
                "waiting": scheduler.num_waiting,
                "encodes": scheduler.num_queued_encodes,
                "item waits": scheduler.num_item_waits,
                "leases": scheduler.num_leases,
                "pinned": scheduler.cache.num_pinned,
                "blocks": scheduler.kv.num_blocks - scheduler.kv.num_free_blocks,
            }
            assert not any(held.values()), f"{name} holds {held}"
        assert cluster.pipeline.num_in_flight == cluster.pipeline.num_encodes_under_way == 0
        assert [sum(worker.outstanding.values()) for worker in cluster.pool.workers] == [0] * len(cluster.pool.workers)
        tasks = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert [name for name in tasks if not name.startswith(("engine of", "watch"))] == []

    def _check_encodes(self, cluster: FaultyCluster) -> None:
        """Without faults and evictions every item is encoded once in the whole cluster."""
        workers = cluster.workers.values()
        encoded = Counter(key for worker in workers for key in worker.runner.encoded_keys)
        if not cluster.log.faults and not any(worker.core.scheduler.cache.num_evicted for worker in workers):
            assert encoded == {key: 1 for asked in self.asked for key in asked.keys}


BLOCK = 60


@pytest.mark.parametrize("block", range(10))
def test_whatever_happens_each_request_ends_once_and_right_and_nothing_is_left(block: int) -> None:
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        assert History(seed).run()


@pytest.mark.parametrize("layout", ["E2P2D2", *LAYOUTS])
def test_in_calm_weather_every_request_is_answered_and_every_item_encoded_once(layout: str) -> None:
    for seed in range(5):
        history = History(seed, is_calm=True, layout=layout)
        history.run()
        assert {asked.outcome for asked in history.asked} == {"answered"}


class WithoutEncodeWorkers(History):
    """They all stand still for most of it, while small caches fill with requests that wait for them."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, is_calm=True, layout="E2P2D2")
        self.config = replace(self.config, cache=replace(self.config.cache, num_kv_blocks=24, encoder_cache_rows=16))

    async def _torment(self, cluster: FaultyCluster) -> None:
        for worker in cluster.live:
            if worker.config.is_encoder_only:
                cluster.stop(worker, SILENCE_S - 1)


def test_text_is_served_at_once_while_pictures_wait() -> None:
    for seed in range(30):
        history = WithoutEncodeWorkers(seed)
        history.run()
        assert {asked.outcome for asked in history.asked} == {"answered"}
        times_s = [asked.ended_s - asked.at_s for asked in history.asked if not asked.job.items]
        assert max(times_s, default=0.0) < 3.0, f"seed {seed}: {times_s}"


def test_a_seed_gives_the_same_history_again() -> None:
    """Within a process, and in another one where sets have another order."""
    traces = {seed: History(seed).run() for seed in range(30, 40)}
    assert {seed: History(seed).run() for seed in traces} == traces
    code = f"from test_cluster_histories import History; print({{seed: History(seed).run() for seed in {list(traces)}}})"
    paths = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": paths}
    other = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert other.stdout.strip() == str(traces)


def main(seed: str, layout: str = "") -> None:
    history = History(int(seed), is_calm=layout != "", layout=layout)
    try:
        history.run()
    finally:
        print(history.layout, history.config, history.weather, history.costs, *history.trace, sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
