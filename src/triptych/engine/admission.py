"""What a worker refuses before it becomes state: requests and encodes that could never be served here."""

import math
from itertools import pairwise

from triptych.config import EngineConfig, Stage
from triptych.engine.encode_queue import EncodeSpec
from triptych.engine.request import RequestSpec
from triptych.errors import ContextOverflowError, RequestError
from triptych.media.item import MediaItem
from triptych.output import ECTicket, KVTicket, is_genuine
from triptych.sampling_params import SamplingParams
from triptych.transfer.ticket import Ticket

MAX_NAMES_LENGTH = 8192  # of all that a ticket calls by name, in characters
MAX_CELLS_PER_ROW = 64  # of a grid: a tower merges a few patches into a row


def check_request(spec: RequestSpec, config: EngineConfig) -> None:
    """Raise `RequestError` with a sentence that says what would be right."""
    check_role(spec, config)
    spec.sampling.check()
    _check_named_tokens(spec.sampling, config.model.vocab_size)
    if not 0 < spec.num_prompt_tokens <= len(spec.token_ids):
        raise RequestError(f"num_prompt_tokens is {spec.num_prompt_tokens}, but there are {len(spec.token_ids)} token ids.")
    if not all(0 <= token < config.model.vocab_size for token in spec.token_ids):
        raise RequestError(f"a token id is outside the model's vocabulary of {config.model.vocab_size}.")
    if len(spec.token_ids) >= config.model.max_model_len:
        raise ContextOverflowError(
            f"the prompt has {len(spec.token_ids)} tokens and leaves no room to generate: "
            f"the model's context is {config.model.max_model_len} tokens."
        )
    if spec.num_generated_tokens >= spec.sampling.max_tokens:
        raise RequestError(
            f"{spec.num_generated_tokens} tokens are generated already, and max_tokens is {spec.sampling.max_tokens}."
        )
    longest = min(len(spec.token_ids) + spec.sampling.max_tokens - spec.num_generated_tokens, config.model.max_model_len)
    capacity = config.num_kv_blocks * config.cache.block_size
    if longest > capacity:
        raise ContextOverflowError(
            f"the request may grow to {longest} tokens, but this worker's KV cache holds {capacity}; "
            "raise --kv-cache-mib or lower max_tokens."
        )
    _check_places(spec.items)
    for item in spec.items:
        _check_item(item, spec, config)
    check_kv_parts(spec.kv_tickets, len(spec.token_ids), config)


def check_kv_parts(tickets: tuple[KVTicket, ...], num_tokens: int, config: EngineConfig) -> None:
    """Raise `RequestError` if the tickets are not the parts of one request's KV, from the start on, or leave none of its tokens to compute."""
    end = 0
    for ticket in tickets:
        start = ticket.first_block * config.cache.block_size
        if start != end or ticket.request_id != tickets[0].request_id:
            raise RequestError(
                f"the KV ticket for tokens {start} to {ticket.num_tokens} of {ticket.request_id} does not follow the one for tokens "
                f"up to {end} of {tickets[0].request_id}; the parts of a request's KV come in order and without a gap."
            )
        end = ticket.num_tokens
        if not start < end < num_tokens:
            raise RequestError(f"the KV ticket is for {end} tokens of {num_tokens}; it must leave at least one to compute.")


def check_encode(spec: EncodeSpec, config: EngineConfig) -> None:
    """Raise `RequestError` for an encode that this worker cannot do."""
    check_tower(config)
    _check_rows(spec.num_rows, config)


def check_tower(config: EngineConfig) -> None:
    """Raise `RequestError` that names the role, if this worker cannot encode at all."""
    if not config.has_tower:
        raise RequestError(f"this worker's role is {config.role}: it has no vision tower and cannot encode.")


def check_takes_items(config: EngineConfig) -> None:
    """Raise `RequestError` that names the role, if this worker loads no items."""
    if not config.is_ec_consumer:
        raise RequestError(f"this worker's role is {config.role}: it takes no embeddings from others.")


def check_takes_kv(config: EngineConfig) -> None:
    """Raise `RequestError` that names the role, if this worker goes on with no KV of others."""
    if not config.is_kv_consumer:
        raise RequestError(f"this worker's role is {config.role}: it takes no KV from others.")


def check_role(spec: RequestSpec, config: EngineConfig) -> None:
    """Raise `RequestError` that names the role, if this worker has not got the stages that the request asks of it."""
    if not config.needs_kv_cache:
        raise RequestError(f"this worker's role is {config.role}: it encodes media and cannot generate.")
    if spec.kv_tickets:
        check_takes_kv(config)
    elif Stage.PREFILL not in config.role:
        raise RequestError(f"this worker's role is {config.role}: it cannot prefill, so kv_transfer_params.tickets are needed.")
    elif spec.has_more_kv:
        raise RequestError("kv_transfer_params.has_more is set without tickets; the first of them goes with the request.")
    if spec.hands_over and not config.is_kv_producer:
        raise RequestError(f"this worker's role is {config.role}: it cannot hand a request over to another worker.")
    if not spec.hands_over and Stage.DECODE not in config.role:
        raise RequestError(f"this worker's role is {config.role}: it cannot decode; set kv_transfer_params.do_remote_decode.")


def check_ec_ticket(ticket: ECTicket, config: EngineConfig) -> None:
    """Raise `RequestError` for a ticket that no member of the cluster has made, just as it is: it must not become an item's state."""
    what = f"the EC ticket for item {ticket.key[:12]}"
    _check_rows(ticket.num_rows, config)
    _check_extent(what, ticket.data, (ticket.model, ticket.dtype), config.num_encoder_pages)
    _check_seal(what, ticket, config)


def check_kv_ticket(ticket: KVTicket, config: EngineConfig) -> None:
    """The same for KV; whether it suits the request is `check_request`'s business."""
    _check_extent("the KV ticket", ticket.data, (ticket.request_id, ticket.dtype), config.num_kv_blocks)
    _check_seal("the KV ticket", ticket, config)


def _check_named_tokens(sampling: SamplingParams, vocab_size: int) -> None:
    for param, token_ids in (("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids)):
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise RequestError(f"{param} names token {token_id}; the model's tokens are 0 to {vocab_size - 1}.", param=param)


def _check_extent(what: str, data: Ticket, names: tuple[str, ...], max_pages: int) -> None:
    num_pages = max(len(data.pages), len(data.generations), len(data.page_checksums))
    if num_pages > max_pages:
        raise RequestError(f"{what} names {num_pages} pages, and this worker's cache has {max_pages}.")
    if not 0 <= data.lease_s < math.inf:
        raise RequestError(f"{what} has a lease of {data.lease_s} s; it must be 0 or more.")
    names = (*names, data.producer, data.arena, data.checksum, data.subject, *data.planes, *data.planes.values())
    if sum(map(len, names)) > MAX_NAMES_LENGTH:
        raise RequestError(f"the names in {what} are longer than {MAX_NAMES_LENGTH} characters in all.")


def _check_seal(what: str, ticket: ECTicket | KVTicket, config: EngineConfig) -> None:
    if not is_genuine(ticket, config.cluster_secret):
        raise RequestError(
            f"{what} has not the seal of this cluster: it was changed, or made by a worker that has another cluster secret."
        )


def _check_places(items: tuple[MediaItem, ...]) -> None:
    if not all(item.runs for item in items):
        raise RequestError("a media item has no runs, so it has no place in the prompt.")
    if list(items) != sorted(items, key=lambda item: item.start):
        raise RequestError("the media items of a request must be in the order of the prompt.")
    runs = sorted(run for item in items for run in item.runs)
    if any(start + length > following for (start, length), (following, _) in pairwise(runs)):
        raise RequestError("two media items of a request claim the same token.")
    if len({(item.key, item.num_rows) for item in items}) != len({item.key for item in items}):
        raise RequestError("a media item comes twice in a request, with different numbers of rows.")


def _check_item(item: MediaItem, spec: RequestSpec, config: EngineConfig) -> None:
    rows, end = 0, 0
    for start, length in item.runs:
        if start < end or length <= 0:
            raise RequestError("the runs of a media item must be ascending, disjoint and not empty.")
        rows, end = rows + length, start + length
    if rows != item.num_rows or end > spec.num_prompt_tokens:
        raise RequestError(f"a media item has {item.num_rows} rows, but its runs give {rows} up to token {end} of the prompt.")
    if math.prod(item.grid) > MAX_CELLS_PER_ROW * rows:  # positions are as many as the grid says
        raise RequestError(f"a media item's grid {item.grid} is too large for its {rows} rows.")
    if Stage.PREFILL in config.role:
        _check_rows(item.num_rows, config)


def _check_rows(num_rows: int, config: EngineConfig) -> None:
    capacity = config.num_encoder_pages * config.cache.rows_per_page
    if not 0 < num_rows <= capacity:
        raise RequestError(
            f"a media item has {num_rows} rows, but this worker's encoder cache holds {capacity}; raise --encoder-cache-rows."
        )
