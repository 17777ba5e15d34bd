"""EC connectors under real workers of the demo model: the answer is that of one process, and what breaks is one item."""

import asyncio
import os
import re
from pathlib import Path

import msgspec
import pytest
from outside_package import install
from worker_rig import assert_nothing_is_held, config_of, encode_request, generate_request, key_of, listen, picture, running

from triptych.engine.events import ECNeeded, Encoded, EncodeFailed, Finished, HandedOver
from triptych.errors import ConfigError, FailureReason
from triptych.output import ECTicket
from triptych.worker.protocol import ECDelivery, ECTransferParams, GenerateRequest, KVTransferParams
from triptych.worker.worker import Worker

DOCS = Path(__file__).parents[2] / "docs" / "encoder-cache.md"


@pytest.fixture
def pigeon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package of the docs, installed."""
    (source,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    (group,) = re.findall(r'```toml\n\[project.entry-points."triptych.ec_connectors"\]\n(.*?)```', DOCS.read_text(), re.DOTALL)
    name, _, value = group.strip().partition(" = ")
    install(tmp_path, monkeypatch, "pigeon", source, {name: value.strip('"')})


async def encode(worker: Worker, encode_id: str = "e", seed: int = 0) -> ECTicket:
    encoded = await worker.encode(encode_request(encode_id, seed), picture(seed))
    assert isinstance(encoded, Encoded)
    assert encoded.ticket is not None
    return encoded.ticket


async def tokens_of_one_process(seed: int, n: int) -> list[int]:
    async with running(config_of("EPD")) as (alone,):
        encoding = asyncio.create_task(alone.encode(encode_request(seed=seed, will_stay=True), picture(seed)))
        heard = await listen(alone.generate(generate_request(seed=seed, n=n)))
        await encoding
    return heard.tokens


def files_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.is_file())


def with_tickets(request: GenerateRequest, *tickets: ECTicket) -> GenerateRequest:
    return msgspec.structs.replace(request, ec_transfer_params=ECTransferParams(request.ec_transfer_params.items, tickets))


@pytest.mark.parametrize("connector", ("file", "pigeon"))
@pytest.mark.usefixtures("pigeon")
async def test_encode_prefill_and_decode_workers_give_the_tokens_of_one_process(tmp_path: Path, connector: str):
    wanted = await tokens_of_one_process(seed=0, n=6)
    configs = [config_of(role, is_alone=False, ec_connector=connector, ec_path=tmp_path) for role in ("E", "P", "D")]
    async with running(*configs) as (e, p, d):
        request = generate_request(seed=0, n=6, hands_over=True)
        first = await listen(p.generate(with_tickets(request, await encode(e))))
        assert isinstance(first.end, HandedOver)
        kv = KVTransferParams(tickets=first.end.tickets)
        moved = msgspec.structs.replace(request, token_ids=(*request.token_ids, *first.tokens), kv_transfer_params=kv)
        rest = await listen(d.generate(moved))
        assert first.tokens + rest.tokens == wanted
        await e.release("e")
        await p.release("r")
        for worker in (e, p, d):
            await assert_nothing_is_held(worker)
    suffix = {"file": ".safetensors", "pigeon": ".npy"}[connector]
    assert files_in(tmp_path) == [f"{key_of(0)}{suffix}"]


async def test_a_worker_with_a_connector_that_does_not_exist_does_not_start():
    with pytest.raises(ConfigError, match="ec_connector is 'pigeon', which does not exist"):
        Worker(config_of("E", ec_connector="pigeon"))


async def test_an_item_in_a_file_outlives_the_worker_that_encoded_it_and_is_used_by_the_next(tmp_path: Path):
    wanted = await tokens_of_one_process(seed=0, n=4)
    producer, consumer = (config_of(role, is_alone=False, ec_connector="file", ec_path=tmp_path) for role in ("E", "PD"))
    async with running(producer) as (e,):
        ticket = await encode(e)
    async with running(consumer) as (pd,):
        assert (await listen(pd.generate(with_tickets(generate_request(seed=0), ticket)))).tokens == wanted
    inode = (tmp_path / f"{key_of(0)}.safetensors").stat().st_ino
    async with running(producer) as (e,):
        assert (await encode(e)).data.checksum == ticket.data.checksum
    assert (tmp_path / f"{key_of(0)}.safetensors").stat().st_ino == inode


async def test_a_damaged_file_is_asked_for_again_and_healed(tmp_path: Path):
    wanted = await tokens_of_one_process(seed=0, n=4)
    configs = [config_of(role, is_alone=False, ec_connector="file", ec_path=tmp_path) for role in ("E", "PD")]
    async with running(*configs) as (e, pd):
        ticket = await encode(e)
        path = tmp_path / f"{key_of(0)}.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        needed: asyncio.Queue[ECNeeded] = asyncio.Queue()

        async def answer() -> list[int]:
            tokens: list[int] = []
            async for event in pd.generate(with_tickets(generate_request(seed=0), ticket)):
                match event:
                    case ECNeeded():
                        needed.put_nowait(event)
                    case Finished():
                        return tokens
                    case _:
                        tokens += [token.token_id for token in getattr(event, "tokens", ())]
            raise AssertionError("no end")

        answering = asyncio.create_task(answer())
        assert (await needed.get()).reason is FailureReason.CORRUPT
        assert not path.exists()
        await pd.deliver(ECDelivery("r", key_of(0), await encode(e, "again")))
        assert await answering == wanted


async def test_a_full_disk_fails_the_item_with_a_sentence_and_the_worker_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fsync(_: int) -> None:
        raise OSError(28, "No space left on device")

    async with running(config_of("E", ec_connector="file", ec_path=tmp_path)) as (e,):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            failed = await e.encode(encode_request("full"), picture())
            assert isinstance(failed, EncodeFailed)
            assert failed.reason is FailureReason.INTERNAL
            assert failed.message
        assert (await encode(e, "again")).key == key_of(0)
        assert e.is_alive
        await e.release("again")
        await assert_nothing_is_held(e)
