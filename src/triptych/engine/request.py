"""`Request`: one generate request inside the engine, and the clock that says where its time went.

WAITING -> RUNNING -> FINISHED;  with KV tickets WAITING -> LOADING_KV -> RUNNING;  RUNNING -> WAITING when it is preempted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from triptych.engine.block_hashes import BlockHashes
from triptych.engine.encoder_cache_manager import Rank
from triptych.engine.events import StageTimings
from triptych.engine.incoming_kv import IncomingKV
from triptych.media.item import MediaItem
from triptych.output import KVTicket, NewRequestData
from triptych.sampling_params import SamplingParams


class RequestStatus(Enum):
    WAITING = auto()
    LOADING_KV = auto()
    RUNNING = auto()
    FINISHED = auto()


LEGAL_STATUS_CHANGES = {
    RequestStatus.WAITING: {RequestStatus.LOADING_KV, RequestStatus.RUNNING, RequestStatus.FINISHED},
    RequestStatus.LOADING_KV: {RequestStatus.RUNNING, RequestStatus.FINISHED},
    RequestStatus.RUNNING: {RequestStatus.WAITING, RequestStatus.FINISHED},
    RequestStatus.FINISHED: set[RequestStatus](),
}


@dataclass(slots=True)
class Timeline:
    """Marks on the engine's clock; `timings` turns them into durations."""

    arrived_at: float
    kv_complete_at: float | None = None  # the last ticket came, if it did not come with the request
    kv_resident_at: float | None = None
    started_at: float | None = None  # first window scheduled
    first_token_at: float | None = None
    last_token_at: float | None = None
    blocked_since: float | None = None  # cannot go on for want of an item
    ec_load_s: float = 0.0  # of the last item that was loaded
    computed_before_wait_s: float = 0.0  # from the start to the last wait, less earlier waits
    blocked_before_start_s: float = 0.0
    blocked_after_start_s: float = 0.0

    def block(self, now: float) -> None:
        if self.blocked_since is None:
            self.blocked_since = now

    def start(self, now: float) -> None:
        """A window was scheduled."""
        if self.blocked_since is not None:
            if self.started_at is None:
                self.blocked_before_start_s += now - self.blocked_since
            else:
                self.computed_before_wait_s = self.blocked_since - self.started_at - self.blocked_after_start_s
                self.blocked_after_start_s += now - self.blocked_since
            self.blocked_since = None
        if self.started_at is None:
            self.started_at = now

    def sample(self, now: float) -> None:
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now

    def timings(self) -> StageTimings:
        started = self.started_at if self.started_at is not None else self.arrived_at
        first = self.first_token_at if self.first_token_at is not None else started
        last = self.last_token_at if self.last_token_at is not None else first
        if self.kv_resident_at is not None:
            complete = self.kv_complete_at if self.kv_complete_at is not None else self.arrived_at
            return StageTimings(
                kv_transfer_s=self.kv_resident_at - complete,
                decode_queue_s=started - self.kv_resident_at,
                decode_s=last - started,
            )
        return StageTimings(
            ec_wait_s=self.blocked_before_start_s + self.blocked_after_start_s,
            ec_load_s=self.ec_load_s,
            prefill_before_wait_s=self.computed_before_wait_s,
            prefill_queue_s=started - self.arrived_at - self.blocked_before_start_s,
            prefill_s=first - started - self.blocked_after_start_s,
            decode_s=last - first,
        )


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """What a caller asks for. `token_ids` may hold generated tokens beyond `num_prompt_tokens`: the request moved here."""

    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    items: tuple[MediaItem, ...] = ()
    hands_over: bool = False  # publish the KV after the first token; decode goes on elsewhere
    kv_tickets: tuple[KVTicket, ...] = ()  # of the parts known, in order
    has_more_kv: bool = False  # other tickets follow, with the last the first token
    priority: int = 0  # lower is earlier
    age_s: float = 0.0  # how long it was under way before it came here
    cache_salt: str = ""  # requests with different salts share no KV blocks

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(slots=True, eq=False)
class Request:
    """Owned by the scheduler. `token_ids` grows by one with each sampled token.

    `num_computed_tokens` counts those whose KV is there: in the request's own blocks while it runs; while it waits, in blocks of the prefix
    cache, as it was when the request was looked at last.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    items: tuple[MediaItem, ...]
    rank: Rank
    timeline: Timeline
    hands_over: bool
    block_hashes: BlockHashes
    incoming: IncomingKV | None  # None: it is computed here
    num_computed_tokens: int = 0
    max_computed_tokens: int = 0  # the most that `num_computed_tokens` ever was
    num_cached_tokens: int = 0  # that the router was told last
    is_known_to_runner: bool = False
    status: RequestStatus = RequestStatus.WAITING
    # what `pending_items` found last, and for which `num_computed_tokens` that holds: [from, until)
    _pending: Sequence[MediaItem] = ()
    _pending_from: float = 1
    _pending_until: float = 0

    def change_status(self, status: RequestStatus) -> None:
        assert status in LEGAL_STATUS_CHANGES[self.status], f"{self.request_id}: {self.status} -> {status}"
        self.status = status

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def will_hand_over(self) -> bool:
        """Unless its first token ends it."""
        return self.hands_over and self.num_generated_tokens + 1 < self.sampling.max_tokens

    @property
    def is_early(self) -> bool:
        """It takes its KV from a worker that still computes the prompt."""
        return self.incoming is not None and not self.incoming.is_complete

    @property
    def kv_deadline(self) -> float | None:
        awaits_kv = self.status in (RequestStatus.WAITING, RequestStatus.LOADING_KV)
        return self.incoming.deadline if self.incoming is not None and awaits_kv else None

    @property
    def findable_hashes(self) -> Sequence[bytes]:
        """Of the blocks that may be taken from the prefix cache: none, if the log-probabilities of all of the prompt are wanted."""
        return self.block_hashes.findable(self.token_ids) if self.sampling.prompt_logprobs is None else ()

    def advance(self, num_tokens: int) -> int:
        """So many tokens more are computed. How many of them were never computed before."""
        self.num_computed_tokens += num_tokens
        num_new = self.num_computed_tokens - self.max_computed_tokens
        if num_new <= 0:
            return 0
        self.max_computed_tokens = self.num_computed_tokens
        return num_new

    def rank_of(self, item: MediaItem) -> Rank:
        return (*self.rank, item.start)

    def pending_items(self) -> Sequence[MediaItem]:
        """Items of which a token is still to be computed, in the order of the prompt."""
        if not self._pending_from <= self.num_computed_tokens < self._pending_until:
            self._pending = [item for item in self.items if item.end > self.num_computed_tokens]
            self._pending_from = self.num_computed_tokens
            self._pending_until = min((item.end for item in self._pending), default=math.inf)
        return self._pending

    def needed_items(self) -> dict[str, MediaItem]:
        """The pending items by key. A picture that comes again stands where it is needed next."""
        return {item.key: item for item in reversed(self.pending_items())}

    def next_row_of(self, item: MediaItem) -> int:
        """The first placeholder of a pending item that is not computed yet."""
        return next(max(start, self.num_computed_tokens) for start, n in item.runs if start + n > self.num_computed_tokens)

    def to_new_request(self, block_ids: tuple[int, ...]) -> NewRequestData:
        return NewRequestData(
            request_id=self.request_id,
            token_ids=tuple(self.token_ids),
            items=self.items,
            sampling=self.sampling,
            num_prompt_tokens=self.num_prompt_tokens,
            num_computed_tokens=self.num_computed_tokens,
            block_ids=block_ids,
        )
