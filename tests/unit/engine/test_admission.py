"""What is refused before it becomes state, with a sentence that says what is wrong."""

from dataclasses import replace

import msgspec
import pytest
from engine_rig import MODEL, item_of, key_of

from triptych.config import CacheConfig, EngineConfig, Role
from triptych.engine.admission import check_ec_ticket, check_encode, check_request
from triptych.engine.encode_queue import EncodeSpec
from triptych.engine.request import RequestSpec
from triptych.errors import ContextOverflowError, RequestError
from triptych.media.item import MediaItem
from triptych.output import ECTicket, KVTicket, sealed
from triptych.sampling_params import SamplingParams
from triptych.transfer.ticket import Ticket


def config_of(role: str, is_alone: bool = False) -> EngineConfig:
    cache = CacheConfig(block_size=4, num_kv_blocks=16, encoder_cache_rows=16, rows_per_page=4)
    return EngineConfig(model=MODEL, role=Role.parse(role), is_alone=is_alone, cache=cache)


def spec_of(num_tokens: int = 20, n: int = 4, items: tuple[MediaItem, ...] = ()) -> RequestSpec:
    return RequestSpec("r", tuple(range(num_tokens)), num_tokens, SamplingParams(max_tokens=n), items)


def runs_of(name: str, *runs: tuple[int, int], num_rows: int | None = None) -> MediaItem:
    return MediaItem(key_of(name), "image", runs, sum(length for _, length in runs) if num_rows is None else num_rows)


def ticket_for(num_tokens: int) -> KVTicket:
    return KVTicket("r", num_tokens, 4, 8, "float32", Ticket("p", "kv", (0,), (0,), 8, 8, "", 5.0, {}))


ALONE = config_of("EPD", is_alone=True)


@pytest.mark.parametrize("role", ["P", "D"])
def test_a_grid_that_is_out_of_proportion_to_its_rows_is_refused_before_anybody_counts_its_positions(role: str):
    def spec(grid: tuple[int, ...]) -> RequestSpec:
        item = msgspec.structs.replace(runs_of("a", (2, 4)), grid=grid)
        spec = replace(spec_of(items=(item,)), hands_over=role == "P")
        return replace(spec, kv_tickets=(ticket_for(19),)) if role == "D" else spec

    check_request(spec((1, 4, 4)), config_of(role))
    with pytest.raises(RequestError, match=r"grid \(1, 65536, 65536\) is too large for its 4 rows"):
        check_request(spec((1, 65536, 65536)), config_of(role))


@pytest.mark.parametrize("param", ["logit_bias", "stop_token_ids"])
@pytest.mark.parametrize("token_id", [-1, MODEL.vocab_size, 2**70])
def test_a_parameter_that_names_a_token_outside_the_vocabulary_is_refused_by_name(param: str, token_id: int):
    def sampling(token_ids: tuple[int, ...]) -> SamplingParams:
        if param == "logit_bias":
            return SamplingParams(max_tokens=4, logit_bias=dict.fromkeys(token_ids, 1.0))
        return SamplingParams(max_tokens=4, stop_token_ids=token_ids)

    check_request(replace(spec_of(), sampling=sampling((0, MODEL.vocab_size - 1))), ALONE)
    with pytest.raises(RequestError, match=f"^{param} names token {token_id}; the model's tokens are 0 to 19999") as refused:
        check_request(replace(spec_of(), sampling=sampling((0, token_id))), ALONE)
    assert refused.value.param == param


def test_a_request_that_exactly_fits_the_cache_is_taken_and_one_token_more_is_not():
    check_request(spec_of(60, 4), ALONE)
    with pytest.raises(ContextOverflowError, match=r"grow to 65 tokens.*holds 64"):
        check_request(spec_of(60, 5), ALONE)


def test_a_prompt_without_room_to_generate_overflows_the_context():
    roomy = replace(ALONE, cache=CacheConfig(block_size=16, num_kv_blocks=1000))
    check_request(spec_of(4095, 1), roomy)
    with pytest.raises(ContextOverflowError, match="4096 tokens"):
        check_request(spec_of(4096, 1), roomy)


@pytest.mark.parametrize(
    ("change", "sentence"),
    (
        ({"num_prompt_tokens": 0}, "num_prompt_tokens is 0"),
        ({"num_prompt_tokens": 21}, "num_prompt_tokens is 21"),
        ({"num_prompt_tokens": -1}, "num_prompt_tokens is -1"),
        ({"token_ids": (), "num_prompt_tokens": 0}, "num_prompt_tokens is 0"),
        ({"token_ids": (5, 20_000), "num_prompt_tokens": 2}, "vocabulary of 20000"),
        ({"token_ids": (5, -1), "num_prompt_tokens": 2}, "vocabulary"),
        ({"num_prompt_tokens": 16}, "4 tokens are generated already"),
    ),
)
def test_token_ids_that_make_no_sense_are_refused(change: dict[str, object], sentence: str):
    with pytest.raises(RequestError, match=sentence):
        check_request(replace(spec_of(), **change), ALONE)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "sampling",
    (
        {"max_tokens": 0},
        {"min_tokens": 5},
        {"min_tokens": -1},
        {"temperature": -0.1},
        {"temperature": 2.1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"logprobs": 21},
        {"logprobs": -1},
        {"min_tokens": 10**400},
        {"top_k": -(10**400)},
        {"max_tokens": 10**400, "min_tokens": 10**401},
    ),
)
def test_sampling_out_of_range_is_a_request_error_however_large_the_number(sampling: dict[str, float]):
    with pytest.raises(RequestError):
        check_request(replace(spec_of(), sampling=SamplingParams(**{"max_tokens": 4, **sampling})), ALONE)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("items", "sentence"),
    (
        ((runs_of("a"),), "no runs"),
        ((runs_of("a", (-2, 4)),), "ascending"),
        ((runs_of("a", (3, 0), num_rows=0),), "not empty"),
        ((runs_of("a", (3, 2), (4, 2)),), "claim the same token"),
        ((runs_of("a", (6, 2), (3, 2)),), "ascending"),
        ((runs_of("a", (3, 4), num_rows=5),), "has 5 rows, but its runs give 4"),
        ((runs_of("a", (18, 4)),), "up to token 22"),
        ((runs_of("a", (1, 17)),), "encoder cache holds 16"),
        ((runs_of("b", (10, 2)), runs_of("a", (3, 2))), "order of the prompt"),
        ((runs_of("a", (3, 4)), runs_of("b", (5, 4))), "claim the same token"),
        ((runs_of("a", (3, 4)), runs_of("a", (8, 5))), "twice in a request"),
    ),
)
def test_items_that_have_no_place_in_the_prompt_are_refused(items: tuple[MediaItem, ...], sentence: str):
    with pytest.raises(RequestError, match=sentence):
        check_request(spec_of(items=items), ALONE)


@pytest.mark.parametrize(
    "items",
    (
        (item_of("first", 0, 4),),
        (item_of("last", 16, 4),),
        (item_of("all", 0, 16),),
        (runs_of("gaps", (1, 2), (5, 2), (9, 1)),),
        (item_of("same", 0, 4), item_of("same", 4, 4)),
        (runs_of("woven", (1, 2), (8, 2)), runs_of("into", (4, 2), (12, 2))),
    ),
)
def test_items_at_the_edges_of_the_prompt_and_woven_into_one_another_are_taken(items: tuple[MediaItem, ...]):
    check_request(spec_of(items=items), ALONE)


@pytest.mark.parametrize(
    ("role", "change", "sentence"),
    (
        ("E", {}, "role is E: it encodes media and cannot generate"),
        ("D", {"hands_over": False}, "role is D: it cannot prefill"),
        ("ED", {"hands_over": False}, "role is ED: it cannot prefill"),
        ("P", {"hands_over": False}, "role is P: it cannot decode"),
        ("EP", {"hands_over": False}, "role is EP: it cannot decode"),
        ("P", {"kv_tickets": (ticket_for(4),), "hands_over": True}, "role is P: it takes no KV"),
        ("PD", {"kv_tickets": (ticket_for(4),)}, "role is PD: it takes no KV"),
        ("PD", {"hands_over": True}, "role is PD: it cannot hand a request over"),
        ("D", {"kv_tickets": (ticket_for(4),), "hands_over": True}, "role is D: it cannot hand a request over"),
    ),
)
def test_a_call_that_the_role_cannot_serve_is_refused_by_its_name(role: str, change: dict[str, object], sentence: str):
    with pytest.raises(RequestError, match=sentence):
        check_request(replace(spec_of(), **change), config_of(role))  # type: ignore[arg-type]


def test_an_epd_worker_alone_takes_and_gives_no_kv():
    with pytest.raises(RequestError, match="role is EPD: it takes no KV"):
        check_request(replace(spec_of(), kv_tickets=(ticket_for(4),)), ALONE)
    with pytest.raises(RequestError, match="role is EPD: it cannot hand a request over"):
        check_request(replace(spec_of(), hands_over=True), ALONE)


@pytest.mark.parametrize("num_tokens", (0, -1, 20, 21))
def test_a_kv_ticket_must_leave_a_token_to_compute(num_tokens: int):
    with pytest.raises(RequestError, match="leave at least one"):
        check_request(replace(spec_of(), kv_tickets=(ticket_for(num_tokens),)), config_of("D"))


@pytest.mark.parametrize("role", ("P", "D", "PD"))
def test_a_worker_without_a_tower_encodes_nothing(role: str):
    with pytest.raises(RequestError, match=f"role is {role}: it has no vision tower"):
        check_encode(EncodeSpec("e", key_of("a"), "image", 4), config_of(role))


@pytest.mark.parametrize("num_rows", (0, -4, 17))
def test_an_item_that_the_cache_can_never_hold_is_refused_at_once(num_rows: int):
    with pytest.raises(RequestError, match="--encoder-cache-rows"):
        check_encode(EncodeSpec("e", key_of("a"), "image", num_rows), config_of("E"))


def test_a_ticket_is_taken_from_who_has_the_secret_only():
    config = replace(config_of("P"), cluster_secret="ours-and-ours-only")
    ticket = ECTicket(key_of("a"), 4, 1, "float32", Ticket("p", "ec", (0,), (0,), 8, 8, "", 5.0, {}))
    check_ec_ticket(sealed(ticket, "ours-and-ours-only"), config)
    for other in (ticket, sealed(ticket, ""), sealed(ticket, "theirs")):
        with pytest.raises(RequestError, match="seal of this cluster"):
            check_ec_ticket(other, config)
