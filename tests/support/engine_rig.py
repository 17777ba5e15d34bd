"""Engines on a turned clock over the arithmetic runner: what a router and media pools would do, by hand."""

from dataclasses import dataclass, field

from triptych.config import CacheConfig, ConnectorConfig, EngineConfig, Role, SchedulerConfig
from triptych.engine.arithmetic_runner import MODEL, ArithmeticRunner, Fabric, expected_tokens
from triptych.engine.core import EngineCore
from triptych.engine.encode_queue import EncodeSpec
from triptych.engine.events import Encoded, EngineEvent, Failed, Finished, HandedOver, NewTokens, PreparationNeeded
from triptych.engine.request import RequestSpec
from triptych.media.item import MediaItem
from triptych.output import KVTicket
from triptych.sampling_params import SamplingParams


class TurnedClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def key_of(name: str) -> str:
    return name.encode().hex().ljust(64, "0")


def item_of(name: str, start: int, num_rows: int) -> MediaItem:
    return MediaItem(key_of(name), "image", ((start, num_rows),), num_rows)


@dataclass
class Engine:
    """One worker's engine, with what its events said so far."""

    core: EngineCore
    runner: ArithmeticRunner
    clock: TurnedClock
    tokens: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    ends: dict[str, Finished | Failed | HandedOver] = field(default_factory=dict[str, Finished | Failed | HandedOver])
    encoded: dict[str, Encoded] = field(default_factory=dict[str, Encoded])
    preparations: list[str] = field(default_factory=list[str])
    events: list[EngineEvent] = field(default_factory=list[EngineEvent])

    def step(self) -> bool:
        self.clock.now += 0.001
        events, has_moved = self.core.step()
        for event in events:
            self.note(event)
        scheduler = self.core.scheduler
        scheduler.check_invariants()
        return has_moved

    def run(self, max_steps: int = 2000) -> None:
        """As the engine thread does, until a step says that nothing moved; prepares whatever is asked for at once."""
        for _ in range(max_steps):
            for key in self.preparations:
                self.core.scheduler.prepared(key, {"key": key}, 0.0)
            self.preparations.clear()
            if not self.step() and not self.preparations:
                return
        raise AssertionError(f"the engine still moves after {max_steps} steps")

    def add(
        self,
        request_id: str,
        tokens: list[int],
        items: tuple[MediaItem, ...] = (),
        n: int = 4,
        *,
        hands_over: bool = False,
        stops: tuple[int, ...] = (),
        priority: int = 0,
        age_s: float = 0.0,
        cache_salt: str = "",
        sampling: SamplingParams | None = None,
    ) -> None:
        sampling = sampling or SamplingParams(max_tokens=n, temperature=0.0, stop_token_ids=stops)
        spec = RequestSpec(
            request_id,
            tuple(tokens),
            len(tokens),
            sampling,
            items,
            hands_over,
            priority=priority,
            age_s=age_s,
            cache_salt=cache_salt,
        )
        self.core.add_request(spec)

    def encode(self, encode_id: str, item: MediaItem, will_stay: bool = False) -> None:
        self.core.add_encode(EncodeSpec(encode_id, item.key, item.modality, item.num_rows, item.grid, will_stay))

    def note(self, event: EngineEvent) -> None:
        self.events.append(event)
        if isinstance(event, PreparationNeeded):
            self.preparations.append(event.key)
        elif isinstance(event, NewTokens):
            self.tokens.setdefault(event.id, []).extend(token.token_id for token in event.tokens)
        elif isinstance(event, Encoded):
            self.encoded[event.id] = event
        elif isinstance(event, Finished | Failed | HandedOver):
            assert event.id not in self.ends, "two terminal events"
            self.ends[event.id] = event


def make_engine(
    role: str = "EPD",
    *,
    is_alone: bool = False,
    fabric: Fabric | None = None,
    block_size: int = 4,
    num_kv_blocks: int = 64,
    chunk: int = 64,
    encoder_rows: int = 64,
    max_num_seqs: int = 8,
    lease_s: float = 30.0,
    worker_id: str = "",
    clock: TurnedClock | None = None,
    prefix_caching: bool = True,
) -> Engine:
    config = EngineConfig(
        model=MODEL,
        role=Role.parse(role),
        is_alone=is_alone,
        cache=CacheConfig(
            block_size=block_size,
            num_kv_blocks=num_kv_blocks,
            enable_prefix_caching=prefix_caching,
            encoder_cache_rows=encoder_rows,
            rows_per_page=4,
        ),
        scheduler=SchedulerConfig(max_num_batched_tokens=chunk, max_num_seqs=min(max_num_seqs, chunk), max_encoder_rows=32),
        connector=ConnectorConfig(ec_timeout_s=10.0, kv_timeout_s=10.0, ec_lease_s=lease_s, kv_lease_s=lease_s),
    )
    clock = clock or TurnedClock()
    runner = ArithmeticRunner(config, fabric or Fabric(), worker_id or role)
    return Engine(EngineCore(config, runner, clock), runner, clock)


def wanted(tokens: list[int], items: tuple[MediaItem, ...] = (), n: int = 4) -> list[int]:
    return expected_tokens(tokens, items, n)


def tickets_of(engine: Engine, request_id: str) -> tuple[KVTicket, ...]:
    end = engine.ends[request_id]
    assert isinstance(end, HandedOver)
    return end.tickets


def assert_nothing_is_held(engine: Engine) -> None:
    """No pin, no lease, no wait, no block."""
    scheduler = engine.core.scheduler
    assert scheduler.kv.num_free_blocks == scheduler.kv.num_blocks
    assert scheduler.cache.num_pinned == 0
    assert scheduler.num_leases == 0
    assert scheduler.num_item_waits == 0
    assert scheduler.num_queued_encodes == 0
    assert scheduler.num_running == scheduler.num_waiting == 0
