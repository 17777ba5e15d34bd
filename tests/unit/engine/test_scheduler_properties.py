"""The scheduler alone under random traffic and random faults of a runner that computes nothing: what holds in every step and at the end.

`SchedulerObserver` watches each step from the orders alone. Beside it: each request ends in one terminal event, or none if it was aborted, gets
just the tokens that were sampled for it, and at the end nothing is held.
"""

from collections import Counter
from dataclasses import dataclass, field
from random import Random

from engine_rig import TurnedClock, item_of
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from scheduler_observer import SchedulerObserver

from triptych.config import CacheConfig, ConnectorConfig, EngineConfig, Role, SchedulerConfig
from triptych.engine.arithmetic_runner import MODEL
from triptych.engine.core import EngineCore
from triptych.engine.encode_queue import EncodeSpec
from triptych.engine.events import (
    TERMINAL_EVENTS,
    ECNeeded,
    Encoded,
    EncodeFailed,
    EngineEvent,
    Failed,
    Finished,
    HandedOver,
    NewTokens,
    PreparationNeeded,
)
from triptych.engine.request import RequestSpec
from triptych.errors import FailureReason
from triptych.media.item import MediaItem
from triptych.output import (
    ECConnectorOutput,
    ECLoad,
    ECTicket,
    KVConnectorOutput,
    KVLoad,
    KVTicket,
    ModelRunnerOutput,
    SchedulerOutput,
    TokenLogprob,
)
from triptych.sampling_params import SamplingParams
from triptych.transfer.ticket import Ticket

NUM_EXAMPLES = 1200
STOP = 3
LEASE_S = 4.0
PICTURES = {"cat": 3, "dog": 6, "cow": 9}  # number of rows
ACTS = (*(4 * ["arrive"]), *(3 * ["step", "steps", "tell", "prepare"]), "abort", "release", "release", "time", "hold", "encode")
LOST = (FailureReason.STALE, FailureReason.PEER_LOST, FailureReason.CORRUPT)


@dataclass
class StubRunner:
    """Follows orders without computing anything, and as badly as it may. `is_well`: from now on nothing goes wrong."""

    rng: Random
    observer: SchedulerObserver
    clock: TurnedClock
    config: EngineConfig
    is_well: bool = False
    is_holding: bool = False  # loads do not end, unless a window needs them
    lengths: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])  # id -> tokens computed, tokens
    ec_loads: list[ECLoad] = field(default_factory=list[ECLoad])
    kv_loads: list[KVLoad] = field(default_factory=list[KVLoad])
    sampled: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    broken_promise: AssertionError | None = None

    def _goes_wrong(self, share: float) -> bool:
        return not self.is_well and self.rng.random() < share

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        try:
            return self._follow(output)
        except AssertionError as error:  # the engine takes it for a failed step
            self.broken_promise = error
            raise

    def _follow(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.observer.watch_orders(output, self.clock())
        for request_id in output.finished_request_ids:
            self.lengths.pop(request_id, None)
        for new in output.new_requests:
            self.lengths[new.request_id] = new.num_computed_tokens, len(new.token_ids)
        ec, kv = ECConnectorOutput(), KVConnectorOutput()
        result = ModelRunnerOutput(ec_connector_output=ec, kv_connector_output=kv)
        self.ec_loads += output.ec_connector_metadata.loads
        self.kv_loads += output.kv_connector_metadata.loads
        if self._goes_wrong(0.02):
            self._note_failed_step(output)
            raise RuntimeError("the device is gone for a moment")
        self._end_loads(ec, kv)
        for each in output.encodes:
            if self._goes_wrong(0.1):
                result.failed_encodes[each.key] = "the tower refuses it"
        missing = {*ec.failed_loads, *result.failed_encodes}
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            if self.observer.reads_any(request_id, num_tokens, missing):
                result.stalled_requests.add(request_id)
            elif self._goes_wrong(0.02):
                result.failed_requests[request_id] = "it cannot be computed"
            else:
                self._compute(request_id, num_tokens, result)
        self._publish(output, result, ec, kv)
        self.observer.watch_results(output, result)
        return result

    def _note_failed_step(self, output: SchedulerOutput) -> None:
        """As the engine's core reports it."""
        message = "the step failed"
        failed_requests = dict.fromkeys(output.num_scheduled_tokens, message)
        failed_encodes = {each.key: message for each in output.encodes}
        self.observer.watch_results(output, ModelRunnerOutput(failed_requests=failed_requests, failed_encodes=failed_encodes))

    def _end_loads(self, ec: ECConnectorOutput, kv: KVConnectorOutput) -> None:
        ec_loads, self.ec_loads = self.ec_loads, []
        for load in ec_loads:
            if self.is_holding and not load.is_needed:
                self.ec_loads.append(load)
            elif self._goes_wrong(0.15):
                ec.failed_loads[load.ticket.key] = self.rng.choice(LOST)
            else:
                ec.finished_loads.add(load.ticket.key)
        kv_loads, self.kv_loads = self.kv_loads, []
        for load in kv_loads:
            if self.is_holding:
                self.kv_loads.append(load)
            elif self._goes_wrong(0.2):
                kv.failed_loads[load.part] = self.rng.choice(LOST)
            else:
                kv.finished_loads.add(load.part)

    def _compute(self, request_id: str, num_tokens: int, result: ModelRunnerOutput) -> None:
        num_computed, length = self.lengths[request_id]
        num_computed += num_tokens
        if num_computed == length:
            token = self.rng.randrange(8)
            result.sampled[request_id] = TokenLogprob(token, -0.5)
            self.sampled.setdefault(request_id, []).append(token)
            length += 1
        self.lengths[request_id] = num_computed, length

    def _publish(self, output: SchedulerOutput, result: ModelRunnerOutput, ec: ECConnectorOutput, kv: KVConnectorOutput) -> None:
        metadata = output.ec_connector_metadata
        for key in (*metadata.saves, *metadata.republish):
            if key in result.failed_encodes or self._goes_wrong(0.1):
                ec.failed_saves[key] = FailureReason.INTERNAL
            else:
                ec.published[key] = ec_ticket(key, PICTURES[bytes.fromhex(key).rstrip(b"\0").decode()])
        for save in output.kv_connector_metadata.saves:
            if save.request_id in result.sampled and not self._goes_wrong(0.1):
                kv.published[save.request_id] = kv_ticket(save.request_id, save.num_tokens, self.config)


def ec_ticket(key: str, num_rows: int) -> ECTicket:
    return ECTicket(key, num_rows, MODEL.row_width, MODEL.dtype, _data("ec"))


def kv_ticket(request_id: str, num_tokens: int, config: EngineConfig) -> KVTicket:
    return KVTicket(request_id, num_tokens, config.cache.block_size, config.kv_block_nbytes, MODEL.dtype, _data("kv"))


def _data(arena: str) -> Ticket:
    return Ticket("elsewhere", arena, (0,), (0,), 1, 1, "", LEASE_S, {})


class Traffic:
    """One engine that encodes, prefills and decodes, takes and gives; and a router that may be slow, but forgets nothing."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        chunk = rng.choice((4, 7, 16, 64))
        block_size = rng.choice((2, 4))
        self.config = EngineConfig(
            MODEL,
            Role.parse("EPD"),
            is_alone=False,
            cache=CacheConfig(
                block_size=block_size,
                num_kv_blocks=rng.choice((52, 80, 200)) // block_size,
                enable_prefix_caching=rng.random() < 0.8,
                encoder_cache_rows=rng.choice((12, 20, 64)),
                rows_per_page=rng.choice((1, 4)),
            ),
            scheduler=SchedulerConfig(
                chunk, max_num_seqs=min(chunk, rng.choice((2, 4, 8))), max_encoder_rows=rng.choice((4, 12))
            ),
            connector=ConnectorConfig(ec_timeout_s=10.0, kv_timeout_s=10.0, ec_lease_s=LEASE_S, kv_lease_s=LEASE_S),
        )
        self.clock = TurnedClock()
        has_atomic_items = rng.random() < 0.2
        self.observer = SchedulerObserver(self.config, has_atomic_items)
        self.runner = StubRunner(rng, self.observer, self.clock, self.config)
        self.core = EngineCore(self.config, self.runner, self.clock, has_atomic_items)
        self.live: dict[str, RequestSpec] = {}
        self.ended: dict[str, EngineEvent] = {}
        self.tokens: dict[str, list[int]] = {}
        self.aborted: set[str] = set()
        self.needs: list[ECNeeded] = []
        self.asked_for: dict[str, ECNeeded] = {}  # encode id -> what it answers
        self.preparations: list[str] = []
        self.given: list[str] = []  # names under which tickets were given out
        self.num_named = 0

    def run(self, acts: list[str]) -> None:
        for act in acts:
            self.do(act)
        self.runner.is_well, self.runner.is_holding = True, False
        for _ in range(400):
            if not self.live:
                break
            for act in ("tell", "prepare", "release", "step"):
                self.do(act)
        assert not self.live, f"{list(self.live)} never end"
        for _ in range(2):  # encodes that nobody prepares are over, then the leases of those that ended with one
            self.clock.now += 20.0
            self.do("steps")
        self._check_nothing_is_held()

    def do(self, act: str) -> None:
        rng = self.rng
        match act:
            case "arrive":
                for _ in range(rng.choice((1, 1, 3))):
                    self._arrive()
            case "steps":
                for _ in range(4):
                    self._step()
            case "abort":
                if self.live:
                    request_id = rng.choice(list(self.live))
                    self.core.scheduler.abort(request_id)
                    self.observer.note_end(request_id)
                    self.aborted.add(request_id)
                    del self.live[request_id]
            case "release":
                if self.given:
                    name = self.given.pop(rng.randrange(len(self.given)))
                    self.observer.note_release(name)
                    self.core.scheduler.release(name)
            case "time":
                self.clock.now += rng.choice((0.5, 0.5, 2.0, 6.0, 90.0))
            case "hold":
                self.runner.is_holding = not self.runner.is_holding
            case "tell":
                self._answer_needs()
            case "prepare":
                self._prepare()
            case "encode":
                name = rng.choice(list(PICTURES))
                self._encode(item_of(name, 0, PICTURES[name]), will_stay=rng.random() < 0.3)
            case _:
                self._step()

    def _name(self, letter: str) -> str:
        self.num_named += 1
        return f"{letter}{self.num_named}"

    def _arrive(self) -> None:
        rng = self.rng
        request_id = self._name("r")
        token_ids, items = self._prompt()
        num_prompt_tokens = len(token_ids)
        comes_with_kv = rng.random() < 0.2
        generated = (rng.randrange(8),) if comes_with_kv else ()
        spec = RequestSpec(
            request_id,
            (*token_ids, *generated),
            num_prompt_tokens,
            SamplingParams(max_tokens=rng.randrange(2, 10), temperature=0.0, stop_token_ids=(STOP,)),
            items,
            hands_over=not comes_with_kv and rng.random() < 0.3,
            kv_tickets=(kv_ticket(request_id, num_prompt_tokens, self.config),) if comes_with_kv else (),
            priority=rng.choice((-1, 0, 0, 0, 1)),
            age_s=rng.choice((0.0, 0.0, 30.0)),
            cache_salt=rng.choice(("", "", "tenant")),
        )
        self.live[request_id] = spec
        self.observer.note_arrival(spec, self.clock())
        self.core.add_request(spec)

    def _prompt(self) -> tuple[tuple[int, ...], tuple[MediaItem, ...]]:
        """The beginning of one of two stories, the same for all who tell it, and mostly an end of its own."""
        story = Random(self.rng.randrange(2))
        token_ids: list[int] = []
        items: list[MediaItem] = []
        for _ in range(self.rng.randrange(4)):
            text = [story.randrange(8) for _ in range(story.randrange(1, 6))]
            name = story.choice(list(PICTURES))
            token_ids += text
            if self.rng.random() < 0.15:
                name = self.rng.choice(list(PICTURES))  # another picture at the same place
            if story.random() < 0.6:
                items.append(item_of(name, len(token_ids), PICTURES[name]))
                token_ids += [9] * PICTURES[name]
        token_ids += [self.rng.randrange(8) for _ in range(self.rng.randrange(4))]
        return tuple(token_ids or (1,))[:40], tuple(item for item in items if item.end <= 40)

    def _encode(self, item: MediaItem, will_stay: bool, need: ECNeeded | None = None) -> None:
        name = self._name("e")
        if need is not None:
            self.asked_for[name] = need
        self.given.append(name)
        self.core.add_encode(EncodeSpec(name, item.key, item.modality, item.num_rows, item.grid, will_stay))

    def _prepare(self) -> None:
        for key in self.preparations:
            if not self.runner.is_well and self.rng.random() < 0.1:
                self.core.scheduler.preparation_failed(key, "the pool is full", FailureReason.INTERNAL)
            else:
                self.core.scheduler.prepared(key, None, 0.0)
        self.preparations.clear()

    def _answer_needs(self) -> None:
        needs, self.needs = self.needs, []
        for need in needs:
            if need.id not in self.live:
                continue
            item = next(item for item in self.live[need.id].items if item.key == need.key)
            answer = self.rng.random()
            if answer < 0.5:
                self.core.announce(ec_ticket(item.key, item.num_rows))
            elif answer < 0.95 or self.runner.is_well:
                self._encode(item, True, need)
            else:
                self.core.item_failed(need.id, need.key, "nobody has it", FailureReason.BAD_MEDIA)

    def _step(self) -> None:
        self.clock.now += 0.01
        events, _ = self.core.step()
        if self.runner.broken_promise is not None:
            raise self.runner.broken_promise
        for event in events:
            self._note(event)
        self.core.scheduler.check_invariants()

    def _note(self, event: EngineEvent) -> None:
        if isinstance(event, PreparationNeeded):
            self.preparations.append(event.key)
            return
        assert event.id not in self.ended, f"{event} after the end"
        if isinstance(event, NewTokens):
            self.tokens.setdefault(event.id, []).extend(token.token_id for token in event.tokens)
        elif isinstance(event, ECNeeded):
            self.needs.append(event)
        elif isinstance(event, EncodeFailed) and event.id in self.asked_for:
            self.needs.append(self.asked_for[event.id])  # somebody else is asked
        elif isinstance(event, Encoded) and event.ticket is not None:
            self.observer.note_item_lease(event.key, event.id, self.clock())
        elif isinstance(event, TERMINAL_EVENTS) and event.id in self.live:
            self._end(event)

    def _end(self, event: Finished | HandedOver | Failed) -> None:
        if isinstance(event, HandedOver):
            self.observer.note_hand_over(event.id, self.clock())
            self.given.append(event.id)
        if isinstance(event, Failed):
            assert event.type != "no_progress", event
        else:
            sampled = self.runner.sampled.get(event.id, [])
            is_stopped = isinstance(event, Finished) and event.reason == "stop"
            assert self.tokens.get(event.id, []) == sampled[: len(sampled) - is_stopped], "tokens that were not sampled, or lost"
        self.observer.note_end(event.id)
        self.ended[event.id] = event
        del self.live[event.id]

    def _check_nothing_is_held(self) -> None:
        scheduler = self.core.scheduler
        assert scheduler.kv.num_free_blocks == scheduler.kv.num_blocks
        assert scheduler.cache.num_pinned == scheduler.num_leases == scheduler.num_item_waits == 0
        assert scheduler.num_queued_encodes == scheduler.num_running == scheduler.num_waiting == 0


@settings(max_examples=NUM_EXAMPLES, deadline=None, derandomize=True, database=None, phases=(Phase.generate, Phase.shrink))
@given(seed=st.integers(0, 2**32), acts=st.lists(st.sampled_from(ACTS), min_size=20, max_size=60))
def test_whatever_comes_budgets_hold_and_nothing_is_shared_but_equal_content_and_each_request_ends(seed: int, acts: list[str]):
    traffic = Traffic(seed)
    traffic.run(["arrive", *acts])


def test_the_traffic_leads_to_all_that_is_watched():
    seen: Counter[str] = Counter()
    for seed in range(100):
        rng = Random(seed)
        traffic = Traffic(seed)
        traffic.run([rng.choice(ACTS) for _ in range(40)])
        seen.update(type(event).__name__ for event in traffic.ended.values())
        seen.update(event.type for event in traffic.ended.values() if isinstance(event, Failed))
        seen["hits"] += traffic.observer.num_hits
        seen["preemptions"] += traffic.observer.num_preemptions
        seen["steps with a shared block"] += traffic.observer.num_shared
    kinds = ("Finished", "HandedOver", "internal_error", "ec_unavailable", "kv_unavailable", "invalid_request_error")
    assert all(seen[each] >= 5 for each in (*kinds, "hits", "preemptions", "steps with a shared block")), seen
