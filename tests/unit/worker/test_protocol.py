"""Messages go there and back unchanged, and what the protocol does not know is refused."""

import json
from typing import Any

import msgspec
import pytest
from worker_rig import config_of, encode_request, generate_request, key_of

from triptych.engine.events import (
    ECNeeded,
    Encoded,
    EncodeEvent,
    EncodeFailed,
    Failed,
    Finished,
    GenerateEvent,
    HandedOver,
    KVAwaited,
    KVPublished,
    NewTokens,
    StageTimings,
)
from triptych.errors import FailureReason
from triptych.output import ECTicket, KVTicket, TokenLogprob
from triptych.transfer.ticket import Ticket
from triptych.worker.protocol import (
    AbortRequest,
    ECDelivery,
    ECTransferParams,
    GenerateRequest,
    KVDelivery,
    KVTransferParams,
    RegisterRequest,
    ReleaseRequest,
    StartReport,
    WorkerInfo,
)

DATA = Ticket("e1", "ec", (3, 1), (7, 9), 4096, 5000, "0123456789abcdef", 30.0, {"shm": "/run/e1"})
EC_TICKET = ECTicket(key_of(0), 16, 192, "float32", DATA)
KV_TICKET = KVTicket("r", 20, 16, 4096, "float32", DATA)


def full_request() -> GenerateRequest:
    request = generate_request(seed=0)
    ec = ECTransferParams(request.ec_transfer_params.items, (EC_TICKET,))
    return msgspec.structs.replace(request, ec_transfer_params=ec, kv_transfer_params=KVTransferParams(tickets=(KV_TICKET,)))


MESSAGES = (
    generate_request(),
    full_request(),
    encode_request(will_stay=True),
    ECDelivery("r", key_of(0), EC_TICKET),
    ECDelivery("r", key_of(0), failure=FailureReason.BAD_MEDIA, message="broken"),
    ECDelivery("r", key_of(0)),
    KVDelivery("r", (KV_TICKET,), (5,), is_last=True),
    AbortRequest("r"),
    ReleaseRequest("r"),
    RegisterRequest("http://127.0.0.1:1"),
    StartReport(loaded=0.5, url="http://127.0.0.1:1"),
    WorkerInfo("E-1", "E", config_of("E").fingerprint, 4096, 256, 0),
)

GENERATE_EVENTS = (
    ECNeeded("r", key_of(0), FailureReason.EVICTED),
    NewTokens("r", (TokenLogprob(5, -0.5, ((5, -0.5), (6, -1.5))),)),
    KVPublished("r", KV_TICKET),
    KVAwaited("r"),
    HandedOver("r", (KV_TICKET,), StageTimings(prefill_s=0.5)),
    Finished("r", "stop", StageTimings(decode_s=1.5)),
    Failed("r", "no", "ec_unavailable", 503, FailureReason.TIMEOUT),
)
ENCODE_EVENTS = (
    Encoded("e", key_of(0), EC_TICKET, False, StageTimings(preprocess_s=0.1)),
    Encoded("e", key_of(0), None, True, StageTimings()),
    EncodeFailed("e", key_of(0), "broken", FailureReason.BAD_MEDIA),
)


def name_of(value: object) -> str:
    return type(value).__name__


@pytest.mark.parametrize("message", MESSAGES, ids=name_of)
def test_a_message_comes_back_as_it_was(message: msgspec.Struct):
    assert msgspec.json.decode(msgspec.json.encode(message), type=type(message)) == message


@pytest.mark.parametrize("message", MESSAGES, ids=name_of)
def test_an_unknown_field_of_a_message_is_refused(message: msgspec.Struct):
    fields: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(message))
    with pytest.raises(msgspec.ValidationError, match="colour"):
        msgspec.json.decode(msgspec.json.encode(fields | {"colour": "red"}), type=type(message))


@pytest.mark.parametrize(
    "path",
    (
        ("sampling_params",),
        ("ec_transfer_params",),
        ("ec_transfer_params", "items", 0),
        ("ec_transfer_params", "tickets", 0),
        ("ec_transfer_params", "tickets", 0, "data"),
        ("kv_transfer_params",),
        ("kv_transfer_params", "tickets", 0),
        ("kv_transfer_params", "tickets", 0, "data"),
    ),
)
def test_an_unknown_field_at_any_depth_is_refused(path: tuple[str | int, ...]):
    fields: Any = msgspec.json.decode(msgspec.json.encode(full_request()))
    inner = fields
    for step in path:
        inner = inner[step]
    inner["colour"] = "red"
    with pytest.raises(msgspec.ValidationError, match="colour"):
        msgspec.json.decode(msgspec.json.encode(fields), type=GenerateRequest)


@pytest.mark.parametrize(
    "key", ["", "cat", "0" * 63, "0" * 65, "A" * 64, "0" * 64 + "\n", "../" * 21 + "a", "/" + "0" * 63, "é" * 64]
)
@pytest.mark.parametrize("message", [full_request(), encode_request(), ECDelivery("r", key_of(0), EC_TICKET)], ids=name_of)
def test_a_key_that_is_no_digest_is_refused_wherever_it_stands(message: msgspec.Struct, key: str):
    """A key becomes a file's name in one data plane."""
    sent = msgspec.json.encode(message).decode()
    assert sent.count(key_of(0)) >= 1
    for number in range(sent.count(key_of(0))):
        pieces = sent.split(key_of(0))
        wrong = key_of(0).join(pieces[: number + 1]) + json.dumps(key)[1:-1] + key_of(0).join(pieces[number + 1 :])
        with pytest.raises(msgspec.ValidationError, match=r"Expected `str` matching regex"):
            msgspec.json.decode(wrong, type=type(message))


@pytest.mark.parametrize("id", ["", "x" * 257])
@pytest.mark.parametrize("message", [*MESSAGES[:4], *MESSAGES[6:8]], ids=name_of)
def test_an_id_has_a_bound(message: msgspec.Struct, id: str):
    fields: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(message))
    (name,) = fields.keys() & {"request_id", "encode_id", "id"}
    with pytest.raises(msgspec.ValidationError, match="length"):
        msgspec.json.decode(msgspec.json.encode(fields | {name: id}), type=type(message))


@pytest.mark.parametrize("field", ("request_id", "token_ids", "num_prompt_tokens", "sampling_params"))
def test_what_a_request_cannot_do_without_is_asked_for(field: str):
    fields: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(generate_request()))
    del fields[field]
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.json.decode(msgspec.json.encode(fields), type=GenerateRequest)


@pytest.mark.parametrize("event", GENERATE_EVENTS, ids=name_of)
def test_a_generate_event_comes_back_as_it_was(event: GenerateEvent):
    assert msgspec.json.decode(msgspec.json.encode(event), type=GenerateEvent) == event


@pytest.mark.parametrize("event", ENCODE_EVENTS, ids=name_of)
def test_an_encode_event_comes_back_as_it_was(event: EncodeEvent):
    assert msgspec.json.decode(msgspec.json.encode(event), type=EncodeEvent) == event


BAD_IDS = ("", "x" * 257, "a b", "a\nb", "a\n", "кот", "../../etc/passwd", "\0", 7, None)
BAD_KEYS = ("", "k", "0" * 63, "0" * 65, "0" * 64 + "\n", "G" * 64, "A" * 64, "../" * 21 + "x", 7)


@pytest.mark.parametrize(
    ("message", "path", "bad_values"),
    (
        (generate_request(), "request_id", BAD_IDS),
        (generate_request(), "token_ids", ([5] * (2**21 + 1), [0.5], ["5"])),
        (full_request(), "ec_transfer_params.items", ([None] * 4097,)),
        (full_request(), "ec_transfer_params.tickets", ([None] * 4097,)),
        (full_request(), "ec_transfer_params.items.0.key", BAD_KEYS),
        (full_request(), "ec_transfer_params.items.0.modality", ("x" * 17,)),
        (full_request(), "ec_transfer_params.items.0.runs", ([[0, 1]] * (2**16 + 1), [[1]], [[1, 2, 3]])),
        (full_request(), "ec_transfer_params.items.0.grid", ([1] * 9, [0], [-1, -1])),
        (full_request(), "sampling_params.stop_token_ids", ([5] * 1025,)),
        (encode_request(), "encode_id", BAD_IDS),
        (encode_request(), "key", BAD_KEYS),
        (encode_request(), "modality", ("x" * 17,)),
        (encode_request(), "grid", ([1] * 9, [0])),
        (ECDelivery("r", key_of(0)), "request_id", BAD_IDS),
        (ECDelivery("r", key_of(0)), "key", BAD_KEYS),
        (ECDelivery("r", key_of(0), message="no"), "message", ("x" * 4097,)),
        (ECDelivery("r", key_of(0), failure=FailureReason.TIMEOUT), "failure", ("bored",)),
        (AbortRequest("r"), "id", BAD_IDS),
        (ReleaseRequest("r"), "id", BAD_IDS),
        (RegisterRequest("http://127.0.0.1:1"), "url", ("x" * 301,)),
        (MESSAGES[-1], "worker_id", BAD_IDS),
        (MESSAGES[-1], "role", ("EPDD",)),
        (MESSAGES[-1], "kv_cache_tokens", (-1, 2**63)),
        (MESSAGES[-1], "prefix_cache_tokens", (-1, 2**63)),
        (MESSAGES[-1], "fingerprint.block_size", (-1, 0)),
    ),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_too_long_too_many_or_of_another_form_is_refused_with_the_fields_name(
    message: msgspec.Struct, path: str, bad_values: tuple[object, ...]
):
    *outer, field = path.split(".")
    for bad in bad_values:
        fields: Any = msgspec.json.decode(msgspec.json.encode(message))
        inner = fields
        for step in outer:
            inner = inner[int(step) if step.isdigit() else step]
        inner[field] = bad
        with pytest.raises(msgspec.ValidationError, match=rf"\.{field}"):
            msgspec.json.decode(msgspec.json.encode(fields), type=type(message))


def test_no_two_events_share_a_tag():
    tags = {type(event).__struct_config__.tag for event in (*GENERATE_EVENTS, *ENCODE_EVENTS)}
    assert len(tags) == 9
