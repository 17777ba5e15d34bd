"""What `make bench-sched` runs: the CPU time that the scheduler takes for a step of 256 running requests, beside its target.

The runner is a stub that gives a token to whoever has computed all of its own, so that nothing is measured but `schedule` and `update`. Others on
the machine make a run slower, never faster, also in CPU time, since they share caches and cores: of five runs of each kind, which take turns, the
best one counts.
"""

import os
import sys
import time
from dataclasses import dataclass
from itertools import count
from statistics import median, quantiles

from rich.console import Console
from rich.table import Table

from triptych.config import CacheConfig, EngineConfig, Role, SchedulerConfig
from triptych.engine.arithmetic_runner import MODEL
from triptych.engine.request import RequestSpec
from triptych.engine.scheduler import Scheduler
from triptych.media.item import MediaItem
from triptych.output import ECConnectorOutput, ECTicket, ModelRunnerOutput, SchedulerOutput, TokenLogprob
from triptych.sampling_params import SamplingParams
from triptych.transfer.ticket import Ticket

LIMIT_MS = 2.0  # of the median step
NUM_REQUESTS, NUM_STEPS, NUM_WARM_UP, NUM_RUNS = 256, 200, 50, 5
NUM_PREFILLING = 26  # in the mixed step
SYSTEM_TOKENS, TEXT_TOKENS, PICTURE_ROWS, NUM_PICTURES = 64, 8, 32, 8  # of a prompt with pictures, which takes as many steps


@dataclass(frozen=True)
class Scenario:
    what: str
    num_prefilling: int
    num_waiting: int
    enable_prefix_caching: bool

    @property
    def limit_ms(self) -> float | None:
        """The target is for those that run; what a long line of waiting requests costs is shown beside it."""
        return None if self.num_waiting else LIMIT_MS


SCENARIOS = [
    Scenario(f"{what}, prefix caching {'on' if is_on else 'off'}", num_prefilling, num_waiting, is_on)
    for what, num_prefilling, num_waiting in (
        (f"{NUM_REQUESTS} decode", 0, 0),
        (f"{NUM_REQUESTS - NUM_PREFILLING} decode, {NUM_PREFILLING} prefill with pictures", NUM_PREFILLING, 0),
        (f"{NUM_REQUESTS} decode, {NUM_REQUESTS} wait for a picture", 0, NUM_REQUESTS),
    )
    for is_on in (True, False)
]


class StubRunner:
    """Gives a token to each request whose window ends at its last one; every load is there at once. Knows nothing of blocks."""

    def __init__(self) -> None:
        self._num_tokens: dict[str, int] = {}
        self._num_computed: dict[str, int] = {}

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in output.finished_request_ids:
            del self._num_tokens[request_id], self._num_computed[request_id]
        for new in output.new_requests:
            self._num_tokens[new.request_id] = len(new.token_ids)
            self._num_computed[new.request_id] = new.num_computed_tokens
        loaded = {load.ticket.key for load in output.ec_connector_metadata.loads}
        result = ModelRunnerOutput(ec_connector_output=ECConnectorOutput(finished_loads=loaded))
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            self._num_computed[request_id] += num_tokens
            if self._num_computed[request_id] == self._num_tokens[request_id]:
                self._num_tokens[request_id] += 1
                result.sampled[request_id] = TokenLogprob(self._num_tokens[request_id] % 1000, -0.5)
        return result


class Traffic:
    """Requests that decode to the end of the measurement, and beside them prompts with pictures of which one arrives in each step: those that
    end make room for the next."""

    def __init__(self, scenario: Scenario) -> None:
        config = EngineConfig(
            MODEL,
            Role.parse("PD"),
            is_alone=False,
            cache=CacheConfig(
                num_kv_blocks=64 * NUM_REQUESTS,
                encoder_cache_rows=1024 * PICTURE_ROWS,
                enable_prefix_caching=scenario.enable_prefix_caching,
            ),
            scheduler=SchedulerConfig(max_num_batched_tokens=2048, max_num_seqs=NUM_REQUESTS + scenario.num_waiting),
        )
        self._numbers = count()
        self._runner = StubRunner()
        self._scheduler = Scheduler(config, time.monotonic)
        self._missing: dict[str, list[MediaItem]] = {}  # of each prompt that is being computed
        for _ in range(NUM_REQUESTS - scenario.num_prefilling):
            self._add(100, (), NUM_STEPS + NUM_WARM_UP + 100)
        for _ in range(scenario.num_waiting):
            self._add(100, (MediaItem(f"{next(self._numbers):064x}", "image", ((0, PICTURE_ROWS),), PICTURE_ROWS),), 1)
        for _ in range(scenario.num_prefilling):
            self._add_prompt_with_pictures()

    def step(self) -> float:
        """The CPU seconds that the scheduler took."""
        for request_id in [each for each, items in self._missing.items() if not items]:
            del self._missing[request_id]
            self._add_prompt_with_pictures()
        for items in self._missing.values():
            self._scheduler.announce(_ticket(items.pop(0)))
        started_at = time.thread_time()
        output = self._scheduler.schedule()
        scheduled_at = time.thread_time()
        result = self._runner.execute_model(output)
        computed_at = time.thread_time()
        self._scheduler.update(output, result)
        return time.thread_time() - computed_at + scheduled_at - started_at

    def _add_prompt_with_pictures(self) -> None:
        starts = range(SYSTEM_TOKENS, SYSTEM_TOKENS + NUM_PICTURES * (PICTURE_ROWS + TEXT_TOKENS), PICTURE_ROWS + TEXT_TOKENS)
        items = tuple(
            MediaItem(f"{next(self._numbers):064x}", "image", ((start, PICTURE_ROWS),), PICTURE_ROWS) for start in starts
        )
        self._missing[self._add(items[-1].end + TEXT_TOKENS, items, 1)] = list(items)

    def _add(self, num_tokens: int, items: tuple[MediaItem, ...], max_tokens: int) -> str:
        number = next(self._numbers)
        tokens = (*range(SYSTEM_TOKENS), *(number + place for place in range(num_tokens - SYSTEM_TOKENS)))
        self._scheduler.add_request(
            RequestSpec(f"r{number}", tokens, num_tokens, SamplingParams(max_tokens, temperature=0.0), items)
        )
        return f"r{number}"


def _ticket(item: MediaItem) -> ECTicket:
    num_pages = -(-item.num_rows // 16)
    data = Ticket("e", "ec", tuple(range(num_pages)), (0,) * num_pages, 64, 64 * num_pages, "", 20.0, {})
    return ECTicket(item.key, item.num_rows, MODEL.row_width, MODEL.dtype, data)


def measure(scenario: Scenario) -> tuple[float, float]:
    """Milliseconds of a step: median and p99 of a run."""
    traffic = Traffic(scenario)
    steps = [1000 * traffic.step() for _ in range(NUM_STEPS + NUM_WARM_UP)][NUM_WARM_UP:]
    return median(steps), quantiles(steps, n=100)[-1]


def main() -> int:
    rounds = [[measure(scenario) for scenario in SCENARIOS] for _ in range(NUM_RUNS)]
    table = Table(caption=f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}")
    for heading in ("a step of", "median", "p99", "target", ""):
        table.add_column(heading, justify="left" if heading == "a step of" else "right")
    is_met = True
    for scenario, runs in zip(SCENARIOS, zip(*rounds, strict=True), strict=True):
        limit, (middle, last) = scenario.limit_ms, min(runs)
        is_met &= limit is None or middle <= limit
        target = "" if limit is None else f"≤ {limit:g} ms"
        verdict = "" if limit is None else "met" if middle <= limit else "missed"
        table.add_row(scenario.what, f"{middle:.2f} ms", f"{last:.2f} ms", target, verdict)
    Console().print(table)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
