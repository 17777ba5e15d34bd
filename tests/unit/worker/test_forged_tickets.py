"""A ticket that this cluster has not made is refused at a worker's door, and nobody who waits for the right one notices."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
from worker_rig import (
    assert_nothing_is_held,
    between_steps,
    config_of,
    encode_request,
    generate_request,
    held_by,
    key_of,
    listen,
    moved,
    picture,
    running,
    until,
)

from triptych.config import EngineConfig
from triptych.engine.events import ECNeeded, Encoded, Finished, HandedOver
from triptych.errors import RequestError
from triptych.output import ECTicket
from triptych.worker.protocol import ECDelivery, ECTransferParams, KVDelivery, KVTransferParams
from triptych.worker.worker import Worker


def member(role: str, secret: str = "of-this-cluster-only") -> EngineConfig:
    return replace(config_of(role, is_alone=False), cluster_secret=secret)


async def encode(worker: Worker, seed: int = 0) -> ECTicket:
    encoded = await worker.encode(encode_request(f"e{seed}", seed), picture(seed))
    assert isinstance(encoded, Encoded)
    assert encoded.ticket is not None
    return encoded.ticket


def _stripped(ticket: ECTicket, _: ECTicket) -> ECTicket:
    return msgspec.structs.replace(ticket, seal="")


def _rows_of_another_item(ticket: ECTicket, other: ECTicket) -> ECTicket:
    return msgspec.structs.replace(ticket, data=other.data)


def _seal_of_another_item(ticket: ECTicket, other: ECTicket) -> ECTicket:
    return msgspec.structs.replace(ticket, seal=other.seal)


@pytest.mark.parametrize("forge", (_stripped, _rows_of_another_item, _seal_of_another_item))
async def test_a_forged_delivery_is_refused_and_the_request_gets_the_right_one(forge: Callable[[ECTicket, ECTicket], ECTicket]):
    async with running(member("E"), member("PD")) as (e, pd):
        ticket, other = await encode(e), await encode(e, seed=1)
        waiting = asyncio.create_task(listen(pd.generate(generate_request(seed=0))))
        await until(pd, "item_waits", 1)
        with pytest.raises(RequestError, match="has not the seal of this cluster"):
            await pd.deliver(ECDelivery("r", key_of(0), forge(ticket, other)))
        await between_steps(pd)
        assert held_by(pd)["item_waits"] == 1
        await pd.deliver(ECDelivery("r", key_of(0), ticket))
        heard = await waiting
        assert isinstance(heard.end, Finished)
        assert sum(isinstance(event, ECNeeded) for event in heard.others) == 1, "it never asked again"
        await assert_nothing_is_held(pd)


async def test_a_generate_call_with_a_forged_ticket_is_refused_before_it_becomes_state():
    async with running(member("E"), member("PD")) as (e, pd):
        forged = _stripped(await encode(e), await encode(e))
        request = generate_request(seed=0)
        items = request.ec_transfer_params.items
        with pytest.raises(RequestError, match="has not the seal of this cluster"):
            pd.generate(msgspec.structs.replace(request, ec_transfer_params=ECTransferParams(items, (forged,))))
        await assert_nothing_is_held(pd)


async def test_a_ticket_of_a_cluster_with_another_secret_is_refused():
    async with running(member("E", "of-another-cluster"), member("PD")) as (e, pd):
        ticket = await encode(e)
        with pytest.raises(RequestError, match="another cluster secret"):
            await pd.deliver(ECDelivery("r", key_of(0), ticket))
        await assert_nothing_is_held(pd)


async def test_kv_is_taken_from_the_cluster_only():
    async with running(member("P"), member("D"), member("D", "of-another-cluster")) as (p, d, stranger):
        request = generate_request(hands_over=True)
        first = await listen(p.generate(request))
        assert isinstance(first.end, HandedOver)
        (ticket,) = first.end.tickets
        forged = msgspec.structs.replace(ticket, data=msgspec.structs.replace(ticket.data, page_checksums=()))
        for worker, wrong in ((d, forged), (d, msgspec.structs.replace(ticket, seal="")), (stranger, ticket)):
            with pytest.raises(RequestError, match="has not the seal of this cluster"):
                worker.generate(moved(request, first.tokens, KVTransferParams(tickets=(wrong,))))
            with pytest.raises(RequestError, match="has not the seal of this cluster"):
                await worker.deliver_kv(KVDelivery("x", (ticket, wrong)))
            await assert_nothing_is_held(worker)
        with pytest.raises(RequestError, match="takes no KV from others"):
            await p.deliver_kv(KVDelivery("x", (ticket,)))
        await d.deliver_kv(KVDelivery("never known", (ticket,), (5,), is_last=True))
        rest = await listen(d.generate(moved(request, first.tokens, KVTransferParams(tickets=(ticket,)))))
        assert isinstance(rest.end, Finished)
