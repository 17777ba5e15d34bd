"""The contract between scheduler and runner: they meet in these dataclasses and nowhere else.

One engine step is `Scheduler.schedule() -> SchedulerOutput -> ModelRunner.execute_model() -> ModelRunnerOutput ->
Scheduler.update()`. The scheduler decides (which tokens, which blocks, which pages, which loads), the runner obeys. Within one step the
runner applies a `SchedulerOutput` in this order: freed pages and blocks, connector loads, finished requests, new requests, cached
requests, encodes, forward, connector saves.

Torch-free: prepared tower inputs travel as `object`.
"""

from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from triptych.errors import FailureReason
from triptych.media.item import MediaItem
from triptych.media.key import ItemKey
from triptych.sampling_params import SamplingParams
from triptych.transfer.seal import is_sealed, seal_of
from triptych.transfer.ticket import Ticket

# --- what travels between processes -------------------------------------------------------------------------------


class ECTicket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A published encoder-cache item. The consumer checks every field against its own model before it reads."""

    key: ItemKey
    num_rows: int
    row_width: int
    dtype: str
    data: Ticket  # its subject is the key
    model: str = ""  # digest of the weights that made the rows
    seal: str = ""  # see `sealed`


class KVTicket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a request's published KV: its blocks from number `first_block` on, up to the one that holds token `num_tokens - 1`.

    The parts of a request follow each other without gap or overlap, so all but the last end with a full block.
    """

    request_id: str
    num_tokens: int  # from the start of the prompt to the end of this part
    block_size: int
    block_nbytes: int
    dtype: str
    data: Ticket  # its subject is the request's id
    first_block: int = 0
    seal: str = ""  # see `sealed`


TicketT = TypeVar("TicketT", ECTicket, KVTicket)


def sealed(ticket: TicketT, cluster_secret: str) -> TicketT:
    """The ticket as its producer gives it out: nobody without the cluster's secret can make one, or change a field of it.

    Raises `msgspec.ValidationError` for a ticket that nobody could decode.
    """
    # As it will arrive: a lease of 20 is one of 20.0.
    ticket = msgspec.json.decode(msgspec.json.encode(ticket), type=type(ticket))
    return msgspec.structs.replace(ticket, seal=seal_of(cluster_secret, *_sealed_fields(ticket)))


def is_genuine(ticket: ECTicket | KVTicket, cluster_secret: str) -> bool:
    """Whether a member of the cluster has made the ticket just as it is."""
    return is_sealed(ticket.seal, cluster_secret, *_sealed_fields(ticket))


def _sealed_fields(ticket: ECTicket | KVTicket) -> tuple[bytes, bytes]:
    return type(ticket).__name__.encode(), msgspec.json.encode(msgspec.structs.replace(ticket, seal=""), order="deterministic")


MIN_LOGPROB = -9999.0  # in place of minus infinity, which JSON has not got; as in OpenAI's answers and vLLM's


class TokenLogprob(msgspec.Struct, frozen=True, omit_defaults=True):
    """Natural logarithms of the model's own distribution (before biases, bans, penalties, temperature and filters)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most probable first
    rank: int = 0  # 1 for the most probable token; 0 where no logprobs were asked for


# --- scheduler -> runner -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NewRequestData:
    """A request the runner has not seen, or one that was preempted and starts again."""

    request_id: str
    token_ids: tuple[int, ...]  # prompt, plus what was generated before a preemption or a move
    items: tuple[MediaItem, ...]
    sampling: SamplingParams
    num_prompt_tokens: int
    num_computed_tokens: int  # > 0 when KV blocks were loaded
    block_ids: tuple[int, ...]


class CachedRequestData(msgspec.Struct, frozen=True):
    """What changed for a request that the runner knows."""

    request_id: str
    num_computed_tokens: int
    new_block_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EncodeInput:
    """One item which the tower computes in this step, into `pages` of the encoder cache."""

    key: str
    modality: str
    num_rows: int
    grid: tuple[int, ...]
    pages: tuple[int, ...]
    inputs: object  # what ModelAdapter.preprocess returned


@dataclass(frozen=True, slots=True)
class ECLoad:
    """Read `ticket` into `pages`. If `is_needed`, a window of this step reads the rows: the step waits for it."""

    ticket: ECTicket
    pages: tuple[int, ...]
    is_needed: bool


@dataclass(frozen=True, slots=True)
class ECConnectorMetadata:
    loads: tuple[ECLoad, ...] = ()
    saves: tuple[str, ...] = ()  # keys that this step adds and that are published after it
    republish: tuple[str, ...] = ()  # keys resident already, for which a new ticket is wanted
    lease_s: float = 0.0
    timeout_s: float = 0.0  # bound on the wait for needed loads


KVPart = tuple[str, int]  # the id of the request that takes it, and the number of the part's first block


@dataclass(frozen=True, slots=True)
class KVLoad:
    """Read `ticket`, less its first `num_skipped` blocks, into `block_ids`, while other requests run."""

    request_id: str
    ticket: KVTicket
    block_ids: tuple[int, ...]
    num_skipped: int = 0

    @property
    def part(self) -> KVPart:
        return self.request_id, self.ticket.first_block


@dataclass(frozen=True, slots=True)
class KVSave:
    """Publish `block_ids`, the request's blocks from number `first_block` on: this step completes the KV of its first `num_tokens` tokens."""

    request_id: str
    num_tokens: int
    block_ids: tuple[int, ...]
    first_block: int = 0


@dataclass(frozen=True, slots=True)
class KVConnectorMetadata:
    loads: tuple[KVLoad, ...] = ()
    saves: tuple[KVSave, ...] = ()
    lease_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    new_requests: tuple[NewRequestData, ...] = ()
    cached_requests: tuple[CachedRequestData, ...] = ()
    # request id -> tokens of this step, in batch order
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict[str, int])
    encodes: tuple[EncodeInput, ...] = ()
    # where each item lies which a window of this step reads: key -> pages
    item_pages: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    freed_pages: tuple[int, ...] = ()  # encoder-cache pages whose content is given up: recycle before anything is written
    freed_block_ids: tuple[int, ...] = ()  # published KV blocks that get another content: recycle likewise
    finished_request_ids: tuple[str, ...] = ()  # the runner forgets them
    ec_connector_metadata: ECConnectorMetadata = ECConnectorMetadata()
    kv_connector_metadata: KVConnectorMetadata = KVConnectorMetadata()


EMPTY_EC_METADATA = ECConnectorMetadata()
EMPTY_KV_METADATA = KVConnectorMetadata()


# --- runner -> scheduler -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class ECConnectorOutput:
    """Filled by the connector during its step."""

    published: dict[str, ECTicket] = field(default_factory=dict[str, ECTicket])
    finished_loads: set[str] = field(default_factory=set[str])  # keys resident now
    failed_loads: dict[str, FailureReason] = field(default_factory=dict[str, FailureReason])
    # resident, but could not be published
    failed_saves: dict[str, FailureReason] = field(default_factory=dict[str, FailureReason])


@dataclass(slots=True)
class KVConnectorOutput:
    published: dict[str, KVTicket] = field(default_factory=dict[str, KVTicket])  # by request id
    finished_loads: set[KVPart] = field(default_factory=set[KVPart])
    failed_loads: dict[KVPart, FailureReason] = field(default_factory=dict[KVPart, FailureReason])
    failed_saves: dict[str, FailureReason] = field(default_factory=dict[str, FailureReason])  # by request id


NO_EC_OUTPUT = ECConnectorOutput()
NO_KV_OUTPUT = KVConnectorOutput()


@dataclass(slots=True)
class ModelRunnerOutput:
    """What a step gave. A scheduled request is in exactly one of: `sampled` (its window ended at its last known token),
    `failed_requests`, `refused_requests`, `stalled_requests`, or none (a prompt chunk that was computed)."""

    sampled: dict[str, TokenLogprob] = field(default_factory=dict[str, TokenLogprob])
    # request id -> the prompt's tokens after each position of the window, where they are asked for
    prompt_logprobs: dict[str, tuple[TokenLogprob, ...]] = field(default_factory=dict[str, tuple[TokenLogprob, ...]])
    # request ids: the answer has the form that was asked for, with the token of this step, or if there is none without it
    completed: set[str] = field(default_factory=set[str])
    failed_requests: dict[str, str] = field(default_factory=dict[str, str])  # request id -> sentence
    refused_requests: dict[str, str] = field(
        default_factory=dict[str, str]
    )  # likewise, where what the client asks for is the reason
    stalled_requests: set[str] = field(default_factory=set[str])  # not computed: an item they need failed to load
    failed_encodes: dict[str, str] = field(default_factory=dict[str, str])  # key -> sentence
    ec_connector_output: ECConnectorOutput | None = None
    kv_connector_output: KVConnectorOutput | None = None
    encode_s: float = 0.0  # time in the tower
