"""Messages between router and workers: msgspec structs as JSON over HTTP; unknown fields are refused.

    POST /inference/v1/generate   GenerateRequest -> server-sent events, each `data: <GenerateEvent as JSON>`
    POST /inference/v1/encode     EncodeRequest in the header `x-triptych-encode` (JSON), the media file's bytes as the body -> EncodeEvent
    POST /inference/v1/ec         ECDelivery -> 204: an item announced, or the news that it cannot be had
    POST /inference/v1/kv         KVDelivery -> 204: further KV tickets for a request that came while its prompt is computed elsewhere
    POST /inference/v1/abort      AbortRequest -> 204; closing a generate or encode connection aborts it, too
    POST /inference/v1/release    ReleaseRequest -> 204: the ticket of a request or an encode is not needed any more
    GET  /inference/v1/info       WorkerInfo
    GET  /inference/v1/watch      a stream that says `data: {}` every second and ends with the process: its end is the worker's death
    GET  /health                  200 while the engine thread lives
    GET  /metrics                 Prometheus text

All but the last two are for members of the cluster: `authorization: Bearer` with its secret, if it has one; else a 401. What is longer or
larger than a type here says is refused as it is decoded.

An error is `{"error": {"message", "type", "param", "code"}}` with its HTTP status. A call that the worker's role cannot serve is a 400
that names the role. Shapes follow vLLM's token-in-token-out `generate`.
"""

from typing import Annotated, Self

import msgspec
from msgspec import Meta

from triptych.config import EngineConfig, Fingerprint
from triptych.engine.encode_queue import EncodeSpec
from triptych.engine.request import RequestSpec
from triptych.errors import FailureReason
from triptych.media.item import Grid, MediaItem, Modality
from triptych.media.key import ItemKey
from triptych.output import ECTicket, KVTicket
from triptych.sampling_params import SamplingParams

GENERATE_PATH = "/inference/v1/generate"
ENCODE_PATH = "/inference/v1/encode"
EC_PATH = "/inference/v1/ec"
KV_PATH = "/inference/v1/kv"
ABORT_PATH = "/inference/v1/abort"
RELEASE_PATH = "/inference/v1/release"
INFO_PATH = "/inference/v1/info"
WATCH_PATH = "/inference/v1/watch"
ENCODE_HEADER = "x-triptych-encode"

MAX_TEXT_LEN = 4096
MAX_URL_LEN = 300

CallId = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[A-Za-z0-9._:-]+\Z")]  # goes into headers and logs as it is
Text = Annotated[str, Meta(max_length=MAX_TEXT_LEN)]
Count = Annotated[int, Meta(ge=0, le=2**62)]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


KVTickets = Annotated[tuple[KVTicket, ...], Meta(max_length=2**16)]  # in order; at least a block each


class KVTransferParams(Message, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    do_remote_decode: bool = False  # prefill: publish the KV and hand over after the first token
    tickets: KVTickets = ()  # decode: where the parts of the KV lie that are known
    has_more: bool = (
        False  # the others, and the first token, follow by POST /inference/v1/kv, once the worker has said `KVAwaited`
    )


class ECTransferParams(Message, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    items: Annotated[tuple[MediaItem, ...], Meta(max_length=4096)] = ()
    # Those known already; others follow by POST /inference/v1/ec.
    tickets: Annotated[tuple[ECTicket, ...], Meta(max_length=4096)] = ()


class GenerateRequest(Message, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`token_ids` is prompt plus, for a decode worker or after a fault, the tokens generated so far.

    A decode worker gets the items without their embeddings: positions need the grids.
    """

    request_id: CallId
    token_ids: Annotated[tuple[int, ...], Meta(max_length=2**21)]  # the model's own limit is refused at admission, in its words
    num_prompt_tokens: int
    sampling_params: SamplingParams
    ec_transfer_params: ECTransferParams = ECTransferParams()
    kv_transfer_params: KVTransferParams = KVTransferParams()
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] = 0
    age_s: Annotated[float, Meta(ge=0)] = 0.0  # how long it was under way before it came here
    cache_salt: Annotated[str, Meta(max_length=256)] = ""  # requests with different salts share no KV blocks

    def to_spec(self) -> RequestSpec:
        """Without the tickets, which are announced one by one."""
        return RequestSpec(
            request_id=self.request_id,
            token_ids=self.token_ids,
            num_prompt_tokens=self.num_prompt_tokens,
            sampling=self.sampling_params,
            items=self.ec_transfer_params.items,
            hands_over=self.kv_transfer_params.do_remote_decode,
            kv_tickets=self.kv_transfer_params.tickets,
            has_more_kv=self.kv_transfer_params.has_more,
            priority=self.priority,
            age_s=self.age_s,
            cache_salt=self.cache_salt,
        )


class EncodeRequest(Message, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    encode_id: CallId
    key: ItemKey
    modality: Modality
    num_rows: int
    grid: Grid = ()
    will_stay: bool = False  # the same worker prefills it: no ticket is needed

    def to_spec(self) -> EncodeSpec:
        return EncodeSpec(self.encode_id, self.key, self.modality, self.num_rows, self.grid, self.will_stay)


class ECDelivery(Message, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Exactly one of `ticket` and `failure` is set, or neither: the item is resident in the worker already (it encoded it)."""

    request_id: CallId
    key: ItemKey
    ticket: ECTicket | None = None
    failure: FailureReason | None = None
    message: Text = ""


class KVDelivery(Message, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Tickets that follow those which the worker knows; one that it knows does no harm. The last delivery has all of them."""

    request_id: CallId  # the decode worker's
    tickets: KVTickets
    token_ids: Annotated[tuple[int, ...], Meta(max_length=2**21)] = ()  # with the last: what prefill has sampled
    is_last: bool = False


class AbortRequest(Message, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    id: CallId  # a request's or an encode's


class ReleaseRequest(Message, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    id: CallId  # a request's (its KV blocks) or an encode's (its item's pages): the lease ends now


class WorkerInfo(Message, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    worker_id: CallId
    role: Annotated[str, Meta(max_length=3)]
    fingerprint: Fingerprint
    max_model_len: Count
    encoder_cache_rows: Count  # the largest item it can hold
    kv_cache_tokens: Count  # the longest request it can hold
    prefix_cache_tokens: Count = 0  # of earlier prompts, which it can keep

    @classmethod
    def of(cls, config: EngineConfig, worker_id: str) -> Self:
        kv_cache_tokens = config.num_kv_blocks * config.cache.block_size
        return cls(
            worker_id=worker_id,
            role=str(config.role),
            fingerprint=config.fingerprint,
            max_model_len=config.model.max_model_len,
            encoder_cache_rows=config.num_encoder_pages * config.cache.rows_per_page,
            kv_cache_tokens=kv_cache_tokens,
            prefix_cache_tokens=kv_cache_tokens if config.cache.enable_prefix_caching else 0,
        )


class RegisterRequest(Message, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a worker sends to `POST /workers` of the router, which then asks `INFO_PATH` and watches it."""

    url: Annotated[str, Meta(max_length=MAX_URL_LEN)]


class StartReport(Message, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a starting worker tells whoever started it."""

    loaded: float = 0.0  # share of the weights read, 0 to 1
    url: str = ""  # set when it serves
    error: str = ""  # set when it gave up
