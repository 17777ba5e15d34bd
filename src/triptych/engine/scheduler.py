"""`Scheduler`: which tokens of which requests a step computes.

A request runs when its next token may be computed: its blocks are there, and no placeholder of the window belongs to an item that is
neither resident, nor encoded in this step, nor loaded in this step. So the runner never meets a missing embedding.

Requests that decode come first, then prompts by rank; a request that waits for an item lets others pass, one that waits for blocks does not.
When a running request gets no block, the last in line gives up its own and starts again later. See docs/scheduler.md.
"""

from bisect import insort
from collections.abc import Callable, Iterable
from itertools import count

from triptych.config import EngineConfig, Stage
from triptych.engine.encode_queue import EncodeSpec
from triptych.engine.events import EngineEvent, Failed, Finished, HandedOver, KVAwaited, KVPublished, NewTokens, PromptLogprobs
from triptych.engine.incoming_kv import IncomingKV
from triptych.engine.item_supply import ItemSupply
from triptych.engine.kv_cache_manager import KVCacheManager
from triptych.engine.kv_supply import KVSupply
from triptych.engine.prefix_cache import PrefixCache
from triptych.engine.request import Request, RequestSpec, RequestStatus, Timeline
from triptych.engine.step_plan import StepPlan
from triptych.engine.windows import Windows
from triptych.errors import FailureReason, RequestError
from triptych.output import (
    NO_KV_OUTPUT,
    CachedRequestData,
    ECTicket,
    KVTicket,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
    TokenLogprob,
)


class Scheduler:
    def __init__(self, config: EngineConfig, clock: Callable[[], float], has_atomic_items: bool = False) -> None:
        self._config = config
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._waiting: list[Request] = []  # by rank
        self._running: list[Request] = []
        self.kv = KVCacheManager(config.num_kv_blocks, config.cache.block_size)
        self.prefixes = PrefixCache(config, self.kv)
        self._items = ItemSupply(config, clock)
        self.cache = self._items.cache
        self._windows = Windows(self._items, config.scheduler.max_num_batched_tokens, has_atomic_items)
        self._kv_supply = KVSupply(config, clock, self.kv)
        self._events: list[EngineEvent] = []
        self._forgotten: list[str] = []  # the runner drops them in the next step
        self._arrivals = count()
        self.num_preempted = 0
        self.num_advanced = 0  # tokens computed further than their request had ever been, and requests that ended

    # --- calls from outside -----------------------------------------------------------------------------------------

    def add_request(self, spec: RequestSpec) -> None:
        """The caller has checked it (admission.py), and that its id is not in use."""
        now = self._clock()
        kv_deadline = now + self._config.connector.kv_timeout_s
        request = Request(
            request_id=spec.request_id,
            token_ids=list(spec.token_ids),
            num_prompt_tokens=spec.num_prompt_tokens,
            sampling=spec.sampling,
            items=spec.items,
            rank=(now - spec.age_s + spec.priority * self._config.scheduler.priority_aging_s, next(self._arrivals)),
            timeline=Timeline(arrived_at=now),
            hands_over=spec.hands_over,
            block_hashes=self.prefixes.block_hashes(spec),
            incoming=IncomingKV([*spec.kv_tickets], not spec.has_more_kv, kv_deadline) if spec.kv_tickets else None,
        )
        self._requests[spec.request_id] = request
        insort(self._waiting, request, key=lambda each: each.rank)
        if request.incoming is None:
            self.prefixes.look_up(request)
            if len(request.pending_items()) < len(request.items):
                self._events += self.prefixes.tell(request)
            self._secure_all(request, FailureReason.MISSING, now)
        elif request.is_early:
            self._events.append(KVAwaited(request.request_id))

    def deliver_kv(self, request_id: str, tickets: tuple[KVTicket, ...], token_ids: tuple[int, ...], is_last: bool) -> None:
        """Further tickets for a request that came early. One that is not here (any more) needs none."""
        if request_id in self._requests:
            self._take(self._kv_supply.deliver(self._requests[request_id], tickets, token_ids, is_last))

    def add_encode(self, spec: EncodeSpec) -> None:
        self._events += self._items.encodes.add(spec, self._clock())

    def prepared(self, key: str, inputs: object, preprocess_s: float) -> None:
        self._items.encodes.prepared(key, inputs, preprocess_s)

    def preparation_failed(self, key: str, message: str, reason: FailureReason) -> None:
        self._events += self._items.encodes.preparation_failed(key, message, reason)

    def announce(self, ticket: ECTicket) -> None:
        self._items.ec.announce(ticket, self._clock())

    def lacks(self, request_id: str, key: str) -> bool:
        """Whether the request waits for an item of which no ticket has come."""
        return self._items.lacks(request_id, key)

    def fail_request(self, request_id: str, message: str, type: str, status: int, reason: FailureReason | None = None) -> None:
        """End a request with an error; nothing happens if it has ended."""
        self._take([Failed(request_id, message, type, status, reason)])

    def abort(self, id: str) -> None:
        """A request or an encode whose caller has left. Idempotent; gives no event. An answer that it just missed is not needed, either."""
        if id in self._requests:
            self._drop(self._requests[id])
        self._items.encodes.abort(id)
        self.release(id)

    def release(self, id: str) -> None:
        """The ticket of a request or an encode is not needed any more. Idempotent."""
        self._events += self._items.encodes.release(id)
        self._kv_supply.release(id)

    # --- one step ---------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        now = self._clock()
        self._expire(now)
        plan = StepPlan(self._config.scheduler.max_num_batched_tokens, self._items.plan(now))
        self._start_kv_loads(plan, now)
        self._schedule_running(plan, now)
        self._schedule_waiting(plan, now)
        self._yield_to_waiting(plan, now)
        return self._to_output(plan)

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineEvent]:
        """Take in what the step gave; the events since the last call."""
        now = self._clock()
        self._take(self._items.update(output, result, self._requests, now))
        kv_output = result.kv_connector_output or NO_KV_OUTPUT
        self._take(self._kv_supply.update(kv_output))
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            request = self._requests.get(request_id)
            if request is None or not request.is_known_to_runner:
                continue  # it left during the step; one of its id may have come since
            if request_id in result.failed_requests:
                self.fail_request(request_id, result.failed_requests[request_id], "internal_error", 500)
            elif request_id in result.refused_requests:
                self.fail_request(request_id, result.refused_requests[request_id], RequestError.type, RequestError.status)
            elif request_id not in result.stalled_requests:
                if request_id in result.prompt_logprobs:
                    first = request.num_computed_tokens + 1  # each position tells of the token after it
                    self._events.append(PromptLogprobs(request_id, first, result.prompt_logprobs[request_id]))
                self._advance(request, num_tokens)
                if request_id in kv_output.published:
                    self._kv_supply.add_published(kv_output.published[request_id])
                is_complete = request_id in result.completed
                if request_id in result.sampled:
                    self._append(request, result.sampled[request_id], is_complete, now)
                elif is_complete:
                    self._finish(request, "stop")
                elif request_id in kv_output.published:
                    self._events.append(KVPublished(request_id, kv_output.published[request_id]))
        return self.take_events()

    def _take(self, events: list[EngineEvent]) -> None:
        """A `Failed` ends its request, unless that has ended; the others are news as they are."""
        for event in events:
            if isinstance(event, Failed):
                if event.id not in self._requests:
                    continue
                self._drop(self._requests[event.id])
            self._events.append(event)

    def take_events(self) -> list[EngineEvent]:
        events, self._events = self._events, []
        return events

    # --- state for the loop, the metrics and the tests ----------------------------------------------------------------

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def line(self) -> list[Request]:
        """All requests, first in line first."""
        return sorted(self._requests.values(), key=lambda each: each.rank)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_queued_encodes(self) -> int:
        return self._items.encodes.num_queued

    @property
    def num_leases(self) -> int:
        return self._items.kept.num_leases + self._kv_supply.num_leases

    @property
    def num_leases_expired(self) -> int:
        return self._items.kept.num_leases_expired + self._kv_supply.num_leases_expired

    @property
    def num_item_waits(self) -> int:
        return self._items.wanted.num_waits

    @property
    def num_item_waits_expired(self) -> int:
        return self._items.num_waits_expired

    def next_deadline(self) -> float | None:
        deadlines = [self._items.next_deadline(), self._kv_supply.next_deadline(self._requests.values())]
        return min((each for each in deadlines if each is not None), default=None)

    @property
    def may_sleep(self) -> bool:
        """Whether something that is under way will give reason for another step."""
        return self._kv_supply.is_copying or self.next_deadline() is not None

    def check_invariants(self) -> None:
        self.kv.check_invariants({each.request_id: each.num_computed_tokens for each in self._requests.values()})
        self._items.check_invariants(self._requests)
        assert len(self._running) + len(self._waiting) + self._kv_supply.num_loading == len(self._requests)
        for request in self._requests.values():
            if request.status == RequestStatus.WAITING:
                assert not self.kv.block_ids(request.request_id), "a waiting request has blocks"

    @property
    def _max_running(self) -> int:
        return self._config.scheduler.max_num_seqs - self._kv_supply.num_loading  # what loads now runs soon

    # --- choosing windows -------------------------------------------------------------------------------------------

    def _schedule_running(self, plan: StepPlan, now: float) -> None:
        in_order = sorted(self._running, key=lambda each: (len(each.token_ids) - each.num_computed_tokens > 1, each.rank))
        for request in in_order:
            if plan.budget <= 0:
                return
            if request.status != RequestStatus.RUNNING:
                continue  # preempted a moment ago
            num_tokens = self._window(request, plan, now)
            if num_tokens and self._allocate_or_preempt(request, num_tokens, plan):
                self._add_window(request, num_tokens, plan, now)

    def _schedule_waiting(self, plan: StepPlan, now: float) -> None:
        for request in list(self._waiting):
            if plan.budget <= 0 or len(self._running) >= self._max_running:
                return
            if request.incoming is not None:
                continue
            self._look_up_prefix(request, now)
            if self.prefixes.is_computed_by_another(request, self._running, plan):
                continue
            num_tokens = self._window(request, plan, now)
            if num_tokens and not self._start(request, num_tokens, plan, now):
                return

    def _start(self, request: Request, num_tokens: int, plan: StepPlan, now: float) -> bool:
        is_first_start = request.timeline.started_at is None
        if not self.prefixes.start(request, num_tokens):
            return False
        if is_first_start:
            self._events += self.prefixes.tell(request)
        self._waiting.remove(request)
        self._running.append(request)
        request.change_status(RequestStatus.RUNNING)
        self._add_window(request, num_tokens, plan, now)
        return True

    def _yield_to_waiting(self, plan: StepPlan, now: float) -> None:
        """If all that runs waits for items, a waiting request that can go on takes the place of the last in line: one that is before it, or
        that needs no item.

        Otherwise all that runs could wait for room in the cache that items of a request before it take, which gets no place to run. Or this
        worker and the producer could wait for each other: running requests for items that are not made while the producer's cache is full
        of tickets, which are not read while this cache is full of items of waiting requests, which get no blocks.
        """
        if plan.windows:
            return
        for request in list(self._waiting):
            if request.incoming is not None or not self._may_displace(request, plan):
                continue
            self._look_up_prefix(request, now)
            num_tokens = self._window(request, plan, now)
            if num_tokens and self._make_room(request, num_tokens, plan) and self._start(request, num_tokens, plan, now):
                return

    def _look_up_prefix(self, request: Request, now: float) -> None:
        """Blocks may have gone since the last look, or come: what the request needs of items changes with them."""
        before = request.pending_items()
        if self.prefixes.look_up(request):
            self._items.give_up_computed(request, before)
            self._secure_all(request, FailureReason.EVICTED, now)

    def _may_displace(self, request: Request, plan: StepPlan) -> bool:
        return bool(self._running) and (self._could_end(request, plan) or request.rank < max(each.rank for each in self._running))

    def _could_end(self, request: Request, plan: StepPlan) -> bool:
        """If the others gave up their blocks: it needs no item, and what leases hold leaves it enough."""
        has_items = all(self._items.has(item, plan.items) for item in request.pending_items())
        return has_items and self._fits(request, len(request.token_ids) + 1, self._running)

    def _fits(self, request: Request, num_tokens: int, without: Iterable[Request]) -> bool:
        ids = [each.request_id for each in without if each is not request]
        return self.kv.would_fit(request.request_id, request.findable_hashes, num_tokens, ids, self._kv_supply.written_block_ids)

    def _window(self, request: Request, plan: StepPlan, now: float) -> int:
        """How many tokens may be computed from `num_computed_tokens` on; 0 if the next one waits for an item."""
        num_tokens, missing = self._windows.cut(request, plan)
        if missing is not None:
            self._take(self._items.secure(request, missing, FailureReason.EVICTED, now))
            if request.status == RequestStatus.FINISHED:
                return 0  # what is here under the item's key is of another size
        if num_tokens == 0:
            request.timeline.block(now)
        return num_tokens

    def _add_window(self, request: Request, num_tokens: int, plan: StepPlan, now: float) -> None:
        request.timeline.start(now)
        plan.windows[request.request_id] = num_tokens
        plan.budget -= num_tokens
        if num_tokens > 1 or request.num_computed_tokens < request.num_prompt_tokens:
            self.prefixes.note_window(request, num_tokens, plan)
        for item in self._windows.items_within(request, num_tokens):
            plan.item_pages[item.key] = self.cache.pages(item.key)

    def _allocate_or_preempt(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        num_in_block = request.num_computed_tokens % self.kv.block_size
        if 0 < num_in_block <= self.kv.block_size - num_tokens:
            return True  # the last block, which is begun, has room: so it is in most steps of who decodes
        new = self.kv.allocate(request.request_id, request.num_computed_tokens + num_tokens)
        if new is None:
            if not self._make_room(request, num_tokens, plan):
                return False  # it keeps what it has, which whoever is before it can take
            new = self.kv.allocate(request.request_id, request.num_computed_tokens + num_tokens)
        plan.new_block_ids[request.request_id] = new or ()
        return new is not None  # blocks that a copy still writes come when it has ended

    def _make_room(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        """Preempt who is behind the request or came early, the last in line first, and no more than that takes; nobody, if it would not be
        enough. A request that could end takes from those before it, too, while nobody else goes on: they all wait for items."""
        may_pass = not plan.windows and self._could_end(request, plan)
        victims: list[Request] = []
        for victim in self._kv_supply.in_order_of_yielding(self._running):
            if victim is request:
                continue
            if victim.rank < request.rank and not victim.is_early and not may_pass:
                return False
            victims.append(victim)
            if len(self._running) - len(victims) < self._max_running and self._fits(
                request, request.num_computed_tokens + num_tokens, victims
            ):
                for each in victims:
                    self._preempt(each, plan)
                return True
        return False

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        plan.budget += plan.windows.pop(request.request_id, 0)
        if Stage.PREFILL not in self._config.role or request.status == RequestStatus.LOADING_KV:
            # without an encoder cache its pictures cannot be computed again here; whoever sent it has it prefilled once more
            message = "the decode worker ran out of KV blocks."
            self.fail_request(request.request_id, message, "kv_unavailable", 503, FailureReason.EVICTED)
            return
        self.num_preempted += 1
        self._running.remove(request)
        self._kv_supply.leave(request)
        self.kv.free(request.request_id)
        self.prefixes.look_up(request)
        request.incoming = None
        self._make_unknown_to_runner(request)
        request.change_status(RequestStatus.WAITING)
        insort(self._waiting, request, key=lambda each: each.rank)
        self._secure_all(request, FailureReason.EVICTED, self._clock())

    def _secure_all(self, request: Request, reason: FailureReason, now: float) -> None:
        for item in request.needed_items().values():
            self._take(self._items.secure(request, item, reason, now))
            if request.status == RequestStatus.FINISHED:
                return

    # --- KV from others ---------------------------------------------------------------------------------------------

    def _start_kv_loads(self, plan: StepPlan, now: float) -> None:
        """Whose prompt is still computed elsewhere stands in nobody's way: otherwise that worker could wait for blocks which it keeps for
        requests that wait here."""
        self._running += self._kv_supply.take_ready(now)
        for request in [each for each in self._waiting if self._kv_supply.may_start(each)]:
            while not (len(self._running) < self._max_running and self._kv_supply.start(request)):
                early = self._kv_supply.last_early
                if request.is_early:
                    break
                if early is None or self._kv_supply.has_blocks_coming:
                    return
                self._preempt(early, plan)
            else:
                self._waiting.remove(request)

    # --- progress and endings ---------------------------------------------------------------------------------------

    def _advance(self, request: Request, num_tokens: int) -> None:
        before = request.pending_items()
        self.num_advanced += request.advance(num_tokens)
        if before:
            self._items.give_up_computed(request, before)
        if request.num_computed_tokens % self.kv.block_size < num_tokens:  # a block is full
            self.prefixes.enter(request)

    def _append(self, request: Request, token: TokenLogprob, is_complete: bool, now: float) -> None:
        request.token_ids.append(token.token_id)
        request.timeline.sample(now)
        sampling, num_generated_tokens = request.sampling, request.num_generated_tokens
        if token.token_id in sampling.stop_token_ids and num_generated_tokens > sampling.min_tokens:
            self._finish(request, "stop")
            return
        self._events.append(NewTokens(request.request_id, (token,)))
        at_limit = len(request.token_ids) >= self._config.model.max_model_len
        if is_complete:
            self._finish(request, "stop")
        elif at_limit or num_generated_tokens >= sampling.max_tokens:
            self._finish(request, "length")
        elif request.hands_over:
            self._hand_over(request)

    def _finish(self, request: Request, reason: str) -> None:
        self._drop(request)
        self._events.append(Finished(request.request_id, reason, request.timeline.timings()))

    def _hand_over(self, request: Request) -> None:
        tickets = self._kv_supply.published(request)
        if not tickets:
            message = "the KV blocks were computed but not published."
            self.fail_request(request.request_id, message, "kv_unavailable", 503, FailureReason.INTERNAL)
            return
        self._kv_supply.keep(request.request_id)
        self._drop(request)
        self._events.append(HandedOver(request.request_id, tickets, request.timeline.timings()))

    def _drop(self, request: Request) -> None:
        """Free everything that the request holds, whatever its state."""
        if request.status == RequestStatus.RUNNING:
            self._running.remove(request)
        elif request.status == RequestStatus.WAITING:
            self._waiting.remove(request)
        self._kv_supply.leave(request)
        self.kv.free(request.request_id)
        self._items.give_up_all(request)
        self._make_unknown_to_runner(request)
        request.change_status(RequestStatus.FINISHED)
        self.num_advanced += 1
        del self._requests[request.request_id]

    def _make_unknown_to_runner(self, request: Request) -> None:
        if request.is_known_to_runner:
            self._forgotten.append(request.request_id)
            request.is_known_to_runner = False

    def _expire(self, now: float) -> None:
        self._take(self._items.expire(now))
        self._take(self._kv_supply.expire(self._requests.values(), now))

    # --- the runner's orders ----------------------------------------------------------------------------------------

    def _to_output(self, plan: StepPlan) -> SchedulerOutput:
        new: list[NewRequestData] = []
        cached: list[CachedRequestData] = []
        for request_id in plan.windows:
            request = self._requests[request_id]
            computed = request.num_computed_tokens
            if request.is_known_to_runner:
                cached.append(CachedRequestData(request_id, computed, plan.new_block_ids.get(request_id, ())))
            else:
                new.append(request.to_new_request(self.kv.block_ids(request_id)))
                request.is_known_to_runner = True
            self._kv_supply.save(request, computed + plan.windows[request_id])
        forgotten, self._forgotten = tuple(self._forgotten), []
        return SchedulerOutput(
            new_requests=tuple(new),
            cached_requests=tuple(cached),
            num_scheduled_tokens=plan.windows,
            encodes=plan.items.encodes.inputs,
            item_pages=plan.item_pages,
            freed_pages=self.cache.take_freed_pages(),
            freed_block_ids=self.kv.take_recycled(),
            finished_request_ids=forgotten,
            ec_connector_metadata=self._items.ec.metadata(plan.loads_with_need(), plan.items.encodes),
            kv_connector_metadata=self._kv_supply.plan(),
        )
