"""`EngineCore`: the step loop's body. Schedule, execute, update; no thread, no I/O, and its clock from outside."""

import logging
from collections.abc import Callable
from typing import Protocol

from triptych.config import EngineConfig
from triptych.engine.admission import check_encode, check_request
from triptych.engine.counters import EngineCounters
from triptych.engine.encode_queue import EncodeSpec
from triptych.engine.events import EncodeFailed, EngineEvent, Failed
from triptych.engine.progress_watch import ProgressWatch, describe
from triptych.engine.request import RequestSpec
from triptych.engine.scheduler import Scheduler
from triptych.errors import FailureReason, InternalError, OverloadedError, RequestError, TriptychError
from triptych.output import ECTicket, KVTicket, ModelRunnerOutput, SchedulerOutput

logger = logging.getLogger(__name__)


class Runner(Protocol):
    def execute_model(self, scheduler_output: SchedulerOutput, /) -> ModelRunnerOutput: ...


class EngineCore:
    """Its methods are called by one thread only. Events of calls come out of the next `step`."""

    def __init__(self, config: EngineConfig, runner: Runner, clock: Callable[[], float], has_atomic_items: bool = False) -> None:
        self._config = config
        self._runner = runner
        self._clock = clock
        self._refusals: list[EngineEvent] = []
        self._watch = ProgressWatch(config.num_kv_blocks * config.cache.block_size)
        self.scheduler = Scheduler(config, clock, has_atomic_items)
        self.counters = EngineCounters()

    def add_request(self, spec: RequestSpec) -> None:
        """What cannot be served ends with a `Failed` event and becomes no state."""
        try:
            check_request(spec, self._config)
            self._check_room(self.scheduler.num_waiting, "requests")
        except TriptychError as error:
            self._refusals.append(Failed(spec.request_id, error.message, error.type, error.status))
            return
        self.scheduler.add_request(spec)

    def add_encode(self, spec: EncodeSpec) -> None:
        try:
            check_encode(spec, self._config)
            self._check_room(self.scheduler.num_queued_encodes, "encodes")
        except TriptychError as error:
            reason = FailureReason.OVERLOADED if isinstance(error, OverloadedError) else FailureReason.BAD_MEDIA
            self._refusals.append(EncodeFailed(spec.encode_id, spec.key, error.message, reason))
            return
        self.scheduler.add_encode(spec)

    def announce(self, ticket: ECTicket) -> None:
        self.scheduler.announce(ticket)

    def deliver_kv(self, request_id: str, tickets: tuple[KVTicket, ...], token_ids: tuple[int, ...], is_last: bool) -> None:
        self.scheduler.deliver_kv(request_id, tickets, token_ids, is_last)

    def item_failed(self, request_id: str, key: str, message: str, reason: FailureReason) -> None:
        """An item cannot be had from anybody. That ends the request, unless it has the item by now, or somebody else's ticket for it."""
        if not self.scheduler.lacks(request_id, key):
            return
        if reason == FailureReason.BAD_MEDIA:
            self.scheduler.fail_request(request_id, message, RequestError.type, RequestError.status, reason)
        else:
            self.scheduler.fail_request(request_id, message, "ec_unavailable", 503, reason)

    def step(self) -> tuple[list[EngineEvent], bool]:
        """One step: the events since the last, and whether anything moved. If nothing did, another step makes sense only after a call, a wake-up
        from a transfer, or the next deadline."""
        num_waits = self.scheduler.num_item_waits
        output = self.scheduler.schedule()
        result, has_failed = self._execute(output)
        events = [*self._refusals, *self.scheduler.update(output, result)]
        self._refusals = []
        self.counters.count(output, result, events)
        has_moved = output.num_scheduled_tokens or output.encodes or events or _has_transferred(result)
        has_new_wait = self.scheduler.num_item_waits > num_waits  # without an event: the ticket is here, the next step loads it
        # What the connectors found out in a step that failed is reported by the next.
        has_moved = bool(has_moved or has_new_wait or has_failed)
        events += self._end_what_is_stuck(output, has_moved)
        return events, has_moved

    def _end_what_is_stuck(self, output: SchedulerOutput, has_moved: bool) -> list[EngineEvent]:
        """A bug must not leave requests waiting for ever: when passes lead nowhere, the first in line ends with an error, and others go on."""
        scheduler = self.scheduler
        problem = self._watch.observe(
            scheduler.num_advanced,
            sum(output.num_scheduled_tokens.values()),
            has_requests=scheduler.num_requests > 0,
            has_moved=has_moved,
            may_sleep=has_moved or scheduler.may_sleep,  # which looks at every request
        )
        if not problem:
            return []
        line = scheduler.line()
        logger.error("no progress: %s. In line: %s", problem, describe(line))
        scheduler.fail_request(
            line[0].request_id, f"the scheduler makes no progress: {problem}.", "no_progress", InternalError.status
        )
        return scheduler.take_events()

    def seconds_to_deadline(self) -> float | None:
        deadline = self.scheduler.next_deadline()
        return None if deadline is None else max(0.0, deadline - self._clock())

    def _execute(self, output: SchedulerOutput) -> tuple[ModelRunnerOutput, bool]:
        """What the step gave, and whether it failed as a whole."""
        try:
            return self._runner.execute_model(output), False
        except Exception as error:  # the step's edge: whatever the device says ends this step's requests, not the engine
            logger.exception(
                "a step failed; its %d requests and %d encodes end", len(output.num_scheduled_tokens), len(output.encodes)
            )
            message = f"the step failed: {error}"
            failed_requests = dict.fromkeys(output.num_scheduled_tokens, message)
            failed_encodes = {each.key: message for each in output.encodes}
            return ModelRunnerOutput(failed_requests=failed_requests, failed_encodes=failed_encodes), True

    def _check_room(self, num_waiting: int, what: str) -> None:
        if num_waiting >= self._config.scheduler.max_num_waiting:
            raise OverloadedError(f"{num_waiting} {what} wait already; try again later.")


def _has_transferred(result: ModelRunnerOutput) -> bool:
    """A load that ended makes room, or a request that can go on."""
    outputs = [each for each in (result.ec_connector_output, result.kv_connector_output) if each is not None]
    return any(output.finished_loads or output.failed_loads for output in outputs)
