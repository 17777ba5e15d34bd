"""Real workers in process: what each role loads and holds, one request through them, and leaving at any time."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, get_type_hints

import msgspec
import pytest
from worker_rig import (
    NUM_ROWS,
    assert_nothing_is_held,
    config_of,
    count_preparations,
    encode_request,
    generate_request,
    key_of,
    listen,
    moved,
    picture,
    running,
    until,
)

import triptych.worker.worker as worker_module
from triptych.engine.events import ECNeeded, Encoded, EncodeFailed, Failed, Finished, HandedOver
from triptych.errors import FailureReason, RequestError
from triptych.models.loader import LoadedModel, load_model
from triptych.output import SchedulerOutput
from triptych.runner.ec_connector import ECConnector
from triptych.runner.kv_connector import KVConnector
from triptych.runner.model_runner import ModelRunner
from triptych.sampling_params import SamplingParams
from triptych.worker.protocol import ECDelivery, EncodeRequest, GenerateRequest, KVTransferParams
from triptych.worker.worker import Worker


def runner_of(worker: Worker) -> ModelRunner:
    runner = worker._thread._core._runner  # pyright: ignore[reportPrivateUsage]
    assert isinstance(runner, ModelRunner)
    return runner


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[LoadedModel]:
    """The models that workers load in this test."""
    models: list[LoadedModel] = []

    def load(*arguments: Any) -> LoadedModel:
        models.append(load_model(*arguments))
        return models[-1]

    monkeypatch.setattr(worker_module, "load_model", load)
    return models


def parameters(loaded: LoadedModel) -> dict[str, int]:
    return {name: weight.numel() for name, weight in loaded.model.named_parameters()}


# --- what a role loads and holds


async def test_encode_and_prefill_and_decode_workers_load_the_model_in_parts_that_do_not_overlap(loaded: list[LoadedModel]):
    async with running(*(config_of(role) for role in ("EPD", "E", "P", "D"))):
        whole, tower, prefill, decode = (parameters(each) for each in loaded)
    assert tower
    assert all("visual" in name for name in tower), "an encode worker has no parameter of the language model"
    assert prefill
    assert not any("visual" in name for name in prefill), "a prefill worker has no parameter of the tower"
    assert decode == prefill
    assert not set(tower) & set(prefill)
    assert tower | prefill == whole


async def test_an_encode_worker_has_no_kv_block_and_no_block_table_group():
    async with running(config_of("E")) as (worker,):
        runner = runner_of(worker)
        assert worker.gauges()["kv_blocks"] == 0
        assert worker.info.kv_cache_tokens == 0
        assert runner.get_kv_cache_spec() == ()
        assert runner.kv_cache.arena.num_pages == 0
        assert runner.block_table.num_groups == 0


async def test_a_decode_worker_keeps_no_embeddings():
    async with running(config_of("D")) as (worker,):
        assert worker.info.encoder_cache_rows == 0
        assert worker.gauges()["encoder_cache_pages"] == 0


async def test_alone_the_connectors_are_the_no_ops_and_each_step_gets_the_same_object():
    async with running(config_of("EPD")) as (worker,):
        runner = runner_of(worker)
        assert type(runner.ec_connector) is ECConnector
        assert type(runner.kv_connector) is KVConnector
        step = runner.ec_connector.step(SchedulerOutput())
        assert runner.ec_connector.step(SchedulerOutput(freed_pages=(1,))) is step
        with step as output:
            assert output is None


@pytest.mark.parametrize("role", ("P", "D", "PD"))
async def test_pixels_never_reach_a_worker_without_a_tower(role: str):
    async with running(config_of(role)) as (worker,):
        with pytest.raises(RequestError, match=f"role is {role}: it has no vision tower"):
            await worker.encode(encode_request(), picture())
        await assert_nothing_is_held(worker)


def test_a_generate_request_has_no_field_that_could_carry_a_picture():
    kinds = {each.__name__ for each in _types_within(GenerateRequest)}
    assert "bytes" not in kinds
    assert "MediaItem" in kinds, "else the search found nothing"


def _types_within(kind: Any) -> set[Any]:
    found: set[Any] = set()
    hints: dict[str, Any] = {}
    if hasattr(kind, "__struct_fields__"):
        found.add(kind)
        hints = get_type_hints(kind)
    for inner in [*hints.values(), *getattr(kind, "__args__", ())]:
        found |= _types_within(inner) | ({inner} if isinstance(inner, type) else set())
    return found


# --- requests


async def test_a_worker_alone_answers_about_a_picture_and_holds_nothing_afterwards():
    async with running(config_of("EPD")) as (worker,):
        encode = asyncio.create_task(worker.encode(encode_request(will_stay=True), picture()))
        heard = await listen(worker.generate(generate_request(seed=0)))
        encoded = await encode
        assert isinstance(encoded, Encoded)
        assert encoded.ticket is None
        assert encoded.timings.preprocess_s > 0
        assert len(heard.tokens) == 4
        assert isinstance(heard.end, Finished)
        await assert_nothing_is_held(worker)


async def test_encode_prefill_and_decode_workers_give_the_tokens_of_one_that_does_it_all():
    async with running(config_of("EPD")) as (alone,):
        encode = asyncio.create_task(alone.encode(encode_request(will_stay=True), picture()))
        wanted = (await listen(alone.generate(generate_request(seed=0, n=6)))).tokens
        await encode
    request = generate_request(seed=0, n=6, hands_over=True)
    async with running(*(config_of(role) for role in "EPD"[:2]), config_of("D")) as (e, p, d):
        prefilling = asyncio.create_task(listen(p.generate(request)))
        encoded = await e.encode(encode_request(), picture())
        assert isinstance(encoded, Encoded)
        assert encoded.ticket is not None
        assert encoded.ticket.num_rows == NUM_ROWS
        await p.deliver(ECDelivery("r", key_of(0), encoded.ticket))
        first = await prefilling
        assert isinstance(first.end, HandedOver)
        kv = KVTransferParams(tickets=first.end.tickets)
        rest = await listen(d.generate(moved(request, first.tokens, kv)))
        assert isinstance(rest.end, Finished)
        assert first.tokens + rest.tokens == wanted
        await e.release("e")
        await p.release("r")
        for worker in (e, p, d):
            await assert_nothing_is_held(worker)


async def test_a_picture_that_two_requests_use_at_once_is_prepared_once_and_one_in_the_cache_not_again(
    monkeypatch: pytest.MonkeyPatch,
):
    async with running(config_of("EPD")) as (worker,):
        prepared = count_preparations(worker, monkeypatch)
        encodes = [worker.encode(encode_request(f"e{n}", will_stay=True), picture()) for n in range(2)]
        requests = [listen(worker.generate(generate_request(f"r{n}", seed=0))) for n in range(2)]
        listening = asyncio.gather(*requests)
        first, second = await asyncio.gather(*encodes)
        a, b = await listening
        assert isinstance(first, Encoded)
        assert isinstance(second, Encoded)
        assert a.tokens == b.tokens
        assert len(prepared) == 1
        again = await worker.encode(encode_request("again", will_stay=True), picture())
        assert isinstance(again, Encoded)
        assert again.was_cached
        assert len(prepared) == 1
        await worker.encode(encode_request("other", seed=1, will_stay=True), picture(1))
        assert len(prepared) == 2


async def test_bad_bytes_fail_their_own_encode_and_not_its_neighbour():
    async with running(config_of("E")) as (worker,):
        bad, good = await asyncio.gather(
            worker.encode(encode_request("bad", seed=7), b"not a picture"), worker.encode(encode_request("good"), picture())
        )
        assert isinstance(bad, EncodeFailed)
        assert bad.reason == FailureReason.BAD_MEDIA
        assert isinstance(good, Encoded)


async def test_a_router_that_promised_other_rows_than_the_workers_files_say_has_its_encode_failed_and_its_neighbour_not():
    """It is not the picture's fault: another worker may agree with the router."""
    async with running(config_of("E")) as (worker,):
        wrong = EncodeRequest("e", key_of(0), "image", 4, (1, 4, 4))
        failed, good = await asyncio.gather(worker.encode(wrong, picture()), worker.encode(encode_request("g", 1), picture(1)))
        assert isinstance(failed, EncodeFailed)
        assert failed.reason == FailureReason.INTERNAL
        assert "the router promised (1, 4, 4) and 4" in failed.message
        assert isinstance(good, Encoded)


async def test_an_unknown_modality_fails_alone():
    async with running(config_of("E")) as (worker,):
        failed = await worker.encode(EncodeRequest("e", key_of(0), "smell", 16, (1, 8, 8)), picture())
        assert isinstance(failed, EncodeFailed)
        assert "takes no smell input" in failed.message
        assert isinstance(await worker.encode(encode_request("next"), picture()), Encoded)
        assert worker.is_alive


async def test_a_missing_item_that_nobody_has_ends_the_request_with_its_reason():
    async with running(config_of("P")) as (worker,):
        listening = asyncio.create_task(listen(worker.generate(generate_request(seed=0, hands_over=True))))
        await until(worker, "item_waits", 1)
        await worker.deliver(ECDelivery("r", key_of(0), failure=FailureReason.BAD_MEDIA, message="a broken file"))
        heard = await listening
        assert isinstance(heard.others[0], ECNeeded)
        assert isinstance(heard.end, Failed)
        assert (heard.end.status, heard.end.message) == (400, "a broken file")
        await assert_nothing_is_held(worker)


async def test_a_delivery_for_another_item_than_its_ticket_is_refused():
    async with running(config_of("E"), config_of("P")) as (e, p):
        encoded = await e.encode(encode_request(), picture())
        assert isinstance(encoded, Encoded)
        with pytest.raises(RequestError, match="another item"):
            await p.deliver(ECDelivery("r", key_of(1), encoded.ticket))
        with pytest.raises(RequestError, match="role is E: it takes no embeddings"):
            await e.deliver(ECDelivery("r", key_of(0), encoded.ticket))


async def test_an_id_in_use_is_refused_and_the_request_that_has_it_goes_on():
    async with running(config_of("P")) as (worker,):
        first = asyncio.create_task(listen(worker.generate(generate_request(seed=0, hands_over=True))))
        await until(worker, "item_waits", 1)
        with pytest.raises(RequestError, match="in use"):
            await listen(worker.generate(generate_request(hands_over=True)))
        assert not first.done()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await assert_nothing_is_held(worker)


# --- leaving


class Gate:
    """Holds the preparation of pictures until it is opened."""

    def __init__(self, preprocess: Callable[..., object]) -> None:
        self._preprocess = preprocess
        self.is_reached = threading.Event()
        self.may_go_on = threading.Event()

    def __call__(self, *arguments: object) -> object:
        self.is_reached.set()
        assert self.may_go_on.wait(20)
        return self._preprocess(*arguments)


def hold_preparations(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> Gate:
    media = worker._media  # pyright: ignore[reportPrivateUsage]
    gate = Gate(media._preprocess)  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(media, "_preprocess", gate)
    return gate


async def test_an_encode_that_is_left_while_its_picture_is_prepared_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    async with running(config_of("E")) as (worker,):
        gate = hold_preparations(worker, monkeypatch)
        encode = asyncio.create_task(worker.encode(encode_request(), picture()))
        await asyncio.to_thread(gate.is_reached.wait, 20)
        encode.cancel()
        await asyncio.gather(encode, return_exceptions=True)
        await until(worker, "encodes_queued", 0)
        gate.may_go_on.set()
        await assert_nothing_is_held(worker)
        assert worker._media._held == {}  # pyright: ignore[reportPrivateUsage]
        assert isinstance(await worker.encode(encode_request("again"), picture()), Encoded)


async def test_an_encode_goes_on_for_the_one_of_two_who_stays(monkeypatch: pytest.MonkeyPatch):
    async with running(config_of("E")) as (worker,):
        gate = hold_preparations(worker, monkeypatch)
        leaves = asyncio.create_task(worker.encode(encode_request("leaves"), picture()))
        stays = asyncio.create_task(worker.encode(encode_request("stays"), picture()))
        await asyncio.to_thread(gate.is_reached.wait, 20)
        leaves.cancel()
        gate.may_go_on.set()
        encoded = await stays
        assert isinstance(encoded, Encoded)
        await worker.release("stays")
        await assert_nothing_is_held(worker)


async def test_a_stream_that_is_closed_early_aborts_its_request():
    async with running(config_of("EPD")) as (worker,):
        events = worker.generate(generate_request(n=500))
        await anext(events)
        await events.aclose()
        await assert_nothing_is_held(worker)


async def test_closing_ends_open_streams_with_an_error_also_while_a_picture_is_prepared(monkeypatch: pytest.MonkeyPatch):
    worker = Worker(config_of("EPD"))
    gate = hold_preparations(worker, monkeypatch)
    encode = asyncio.create_task(worker.encode(encode_request(will_stay=True), picture()))
    generate = asyncio.create_task(listen(worker.generate(generate_request(seed=0))))
    await until(worker, "item_waits", 1)
    await asyncio.to_thread(gate.is_reached.wait, 20)
    closing = asyncio.create_task(worker.close())
    failed, heard = await asyncio.wait_for(asyncio.gather(encode, generate), 20)
    gate.may_go_on.set()
    await closing
    assert isinstance(failed, EncodeFailed)
    assert failed.reason == FailureReason.PEER_LOST
    assert isinstance(heard.end, Failed)
    assert heard.end.status == 503
    assert not worker.is_alive
    assert isinstance((await listen(worker.generate(generate_request("late")))).end, Failed), "nothing hangs afterwards either"
    await worker.close()


@pytest.mark.parametrize(
    "values",
    (
        {"seed": 10**40},
        {"seed": -1},
        {"min_tokens": 10**400},
        {"top_k": 10**40},
        {"temperature": 1e-300},
        {"top_p": 1e-300},
        {"logprobs": 10**400},
    ),
    ids=lambda values: f"{next(iter(values))} of {len(str(next(iter(values.values()))))} digits",
)
async def test_numbers_of_any_size_do_not_end_the_engine(values: dict[str, float]):
    async with running(config_of("EPD")) as (worker,):
        request = generate_request()
        sampling: SamplingParams = msgspec.structs.replace(request.sampling_params, **{"temperature": 1.0, **values})
        heard = await listen(worker.generate(msgspec.structs.replace(request, sampling_params=sampling)))
        assert isinstance(heard.end, Finished | Failed)
        assert worker.is_alive
        await assert_nothing_is_held(worker)
