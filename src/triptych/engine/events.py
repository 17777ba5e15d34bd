"""What the engine tells the outside about requests and encodes; sent as they are on a worker's event streams.

A generate request's stream is: any number of `ECNeeded`, `ECLoaded`, `PrefixHit`, `PromptLogprobs`, `KVPublished`, `KVAwaited` and `NewTokens`,
then exactly one terminal event: `Finished`, `HandedOver` (prefill done, decode goes on elsewhere) or `Failed`. An encode has exactly one terminal
event: `Encoded` or `EncodeFailed`.
"""

import msgspec

from triptych.errors import FailureReason
from triptych.output import ECTicket, KVTicket, TokenLogprob


class StageTimings(msgspec.Struct, frozen=True, omit_defaults=True):
    """Seconds that one worker spent on a request (or on one item), by what it did."""

    preprocess_s: float = 0.0  # bytes -> pixels -> tower inputs
    encode_queue_s: float = 0.0
    encode_s: float = 0.0
    ec_wait_s: float = 0.0  # prefill could not go on for want of an item (first wait to last arrival)
    ec_load_s: float = 0.0  # of the last item: ticket here to rows resident; part of ec_wait_s, unless prefill was still busy
    prefill_queue_s: float = 0.0  # arrival to first scheduled token, less ec_wait_s
    prefill_before_wait_s: float = 0.0  # part of prefill_s: what was computed before the last wait for an item began
    prefill_s: float = 0.0  # first scheduled token to first sampled token, less ec_wait_s
    kv_transfer_s: float = 0.0  # arrival of the last KV ticket to blocks resident
    decode_queue_s: float = 0.0  # blocks resident to first scheduled token
    decode_s: float = 0.0  # first scheduled decode step to last token


class Event(msgspec.Struct, frozen=True, tag_field="event"):
    """Base: `id` is the request's id, or the encode's."""

    id: str


class ECNeeded(Event, frozen=True, tag="ec_needed"):
    """The worker has not got an item that the request needs. Who holds the bytes must have it encoded, unless that is under way."""

    key: str
    reason: FailureReason


class ECLoaded(Event, frozen=True, tag="ec_loaded"):
    """An item that the request waited for is here, and its ticket is not needed any more."""

    key: str


class PrefixHit(Event, frozen=True, tag="prefix_hit"):
    """This much of the prompt need not be computed here: as it looks on arrival, if that covers an item, and as it is when the request starts.
    Items that lie before it are not needed (any more)."""

    num_tokens: int


class PromptLogprobs(Event, frozen=True, tag="prompt_logprobs"):
    """Of the prompt's tokens from number `start` on, each given those before it; the first token of a prompt has none. All have come before the
    answer's first token; some come again when a prompt is computed anew, so that a reader keeps them by their number."""

    start: int
    tokens: tuple[TokenLogprob, ...]


class NewTokens(Event, frozen=True, tag="new_tokens"):
    tokens: tuple[TokenLogprob, ...]


class KVPublished(Event, frozen=True, tag="kv_published"):
    """The KV of a chunk of the prompt can be read while the rest is computed."""

    ticket: KVTicket


class KVAwaited(Event, frozen=True, tag="kv_awaited"):
    """A decode worker knows the request, and further tickets can be delivered to it: an earlier delivery could have overtaken the request."""


class HandedOver(Event, frozen=True, tag="handed_over"):
    """Terminal for a prefill worker: the tokens so far were sent, and all of the KV is published."""

    tickets: tuple[KVTicket, ...]  # of all its parts, in order
    timings: StageTimings


class Finished(Event, frozen=True, tag="finished"):
    """Terminal. `reason` is "stop" (a stop token, which is not among the tokens sent) or "length"."""

    reason: str
    timings: StageTimings


class Failed(Event, frozen=True, tag="failed"):
    """Terminal. `status` and `type` as in errors.py; `reason` is set where another worker may do better."""

    message: str
    type: str
    status: int
    reason: FailureReason | None = None


class Encoded(Event, frozen=True, tag="encoded"):
    """Terminal. `ticket` is None where none is needed: the item stays in this worker, which prefills it or serves alone."""

    key: str
    ticket: ECTicket | None
    was_cached: bool
    timings: StageTimings


class EncodeFailed(Event, frozen=True, tag="encode_failed"):
    key: str
    message: str
    reason: FailureReason


class PreparationNeeded(msgspec.Struct, frozen=True):
    """Not sent: asks the worker to turn the encode's bytes into tower inputs, beside the engine thread."""

    key: str


TERMINAL_EVENTS = (HandedOver, Finished, Failed)  # of a generate request
GenerateEvent = (
    ECNeeded | ECLoaded | PrefixHit | PromptLogprobs | NewTokens | KVPublished | KVAwaited | HandedOver | Finished | Failed
)
EncodeEvent = Encoded | EncodeFailed
EngineEvent = GenerateEvent | EncodeEvent | PreparationNeeded
