"""Whose embeddings a request may meet: those of its own `cache_salt`, of the same content, prepared the same way; a client's id says nothing."""

import asyncio
import base64
from collections.abc import Callable
from typing import Any

import pytest

from triptych.router.fake_worker_client import FakeCosts
from triptych.router.render import ChatMessage, MediaPart, TextPart

Serve = Callable[..., Any]
Png = Callable[..., bytes]


def ask(picture: bytes, part: dict[str, Any] | None = None, url: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """`part` and `url` go into the picture's part and into its `image_url`."""
    address = "data:image/png;base64," + base64.b64encode(picture).decode()
    image = {"type": "image_url", "image_url": {"url": address, **(url or {})}, **(part or {})}
    messages = [{"role": "user", "content": [image, {"type": "text", "text": "what is it?"}]}]
    return {"messages": messages, "max_tokens": 2, "seed": 1, **fields}


async def keys_of(served: Any, *bodies: dict[str, Any]) -> list[str]:
    """The key under which each request's picture went to prefill and decode, one request after another."""
    keys: list[str] = []
    for body in bodies:
        status, answer = await served.post(body)
        assert status == 200, answer
        items = [served.workers[name].record.generates[-1].ec_transfer_params.items for name in ("P0", "D0")]
        assert items[0] == items[1]
        keys.append(items[0][0].key)
    return keys


def encoded(served: Any) -> list[str]:
    return [request.key for request in served.workers["E0"].record.encodes]


async def test_requests_of_one_salt_share_an_encode_and_those_of_two_do_not(serve: Serve, png: Png) -> None:
    async with serve("E1P1D1") as served:
        salts = ("a", "b", "a", None, "b", None, "A")
        keys = await keys_of(served, *(ask(png(), cache_salt=salt) for salt in salts))
        assert [keys.index(key) for key in keys] == [0, 1, 0, 3, 1, 3, 6]
        assert encoded(served) == [keys[0], keys[1], keys[3], keys[6]]


async def test_requests_that_run_together_share_an_encode_only_within_a_salt(serve: Serve, png: Png) -> None:
    async with serve("E1P1D1") as served:
        served.workers["E0"].costs = FakeCosts(encode_s=0.05)
        salts = ("a", "b", "a", "b", "c")
        answers = await asyncio.gather(*(served.post(ask(png(), cache_salt=salt)) for salt in salts))
        assert [status for status, _ in answers] == [200] * 5
        assert len(encoded(served)) == len(set(encoded(served))) == 3


@pytest.mark.parametrize("salt", ["", "x" * 257, 5, ["a"]])
async def test_a_salt_that_is_no_string_of_1_to_256_characters_is_refused(serve: Serve, png: Png, salt: Any) -> None:
    async with serve("E1P1D1") as served:
        status, answer = await served.post(ask(png(), cache_salt=salt))
        assert (status, answer["error"]["param"]) == (400, "cache_salt")
        assert encoded(served) == []


@pytest.mark.parametrize("place", ["part", "url"])
async def test_a_clients_id_is_no_part_of_a_key(serve: Serve, png: Png, place: str) -> None:
    """The same id for other content of equal size is another item; the same content under another id is the same one."""
    first, second = png(colour=(1, 2, 3)), png(colour=(1, 2, 4))
    assert len(first) == len(second)
    async with serve("E1P1D1") as served:
        bodies = [ask(first, **{place: {"uuid": "cat"}}), ask(second, **{place: {"uuid": "cat"}})]
        keys = await keys_of(served, *bodies, ask(first, **{place: {"uuid": "../../etc/passwd"}}), ask(first))
        assert [keys.index(key) for key in keys] == [0, 1, 0, 0]
        assert served.workers["E0"].record.media == [first, second]


async def test_a_clients_id_finds_nothing_by_itself_and_has_a_bound(serve: Serve, png: Png) -> None:
    async with serve("E1P1D1") as served:
        assert (await served.post(ask(png(), part={"uuid": "cat"})))[0] == 200
        for part, where in (({"image_url": None, "uuid": "cat"}, "image_url"), ({"uuid": "x" * 257}, "uuid")):
            status, answer = await served.post(ask(png(), part=part))
            assert (status, answer["error"]["param"]) == (400, f"messages.0.content.0.{where}")


async def test_detail_is_taken_and_changes_nothing(serve: Serve, png: Png) -> None:
    async with serve("E1P1D1") as served:
        keys = await keys_of(served, ask(png()), *(ask(png(), url={"detail": value}) for value in ("auto", "low", "high", None)))
        assert len(set(keys)) == 1
        status, answer = await served.post(ask(png(), url={"detail": "huge"}))
        assert status == 400
        assert "detail" in answer["error"]["message"]


@pytest.mark.parametrize("options", [{"max_pixels": 1003520}, {"do_resize": False}])
async def test_processor_options_of_a_request_are_refused_rather_than_lost_on_the_way(
    serve: Serve, png: Png, options: dict[str, Any]
) -> None:
    async with serve("E1P1D1") as served:
        status, answer = await served.post(ask(png(), mm_processor_kwargs=options))
        assert (status, answer["error"]["param"]) == (400, "mm_processor_kwargs")
        assert "mm_processor_kwargs is not supported" in answer["error"]["message"]
        assert (await served.post(ask(png(), mm_processor_kwargs={})))[0] == 200


async def test_the_workers_dtype_is_part_of_a_key(serve: Serve, png: Png) -> None:
    """The router computes nothing, so it has the dtype from who does."""
    async with serve("E1P1D1") as served:
        assert served.serving.pool.dtype == served.workers["E0"].info.fingerprint.dtype == "float32"
        prompt = await render(served, png(), "float32")
        assert await keys_of(served, ask(png())) == [prompt]
        assert prompt != await render(served, png(), "float16")


async def render(served: Any, picture: bytes, dtype: str) -> str:
    message = ChatMessage("user", (MediaPart("image", picture), TextPart("what is it?")))
    prompt = await served.serving.chat.renderer.render([message], served.session, dtype=dtype, tenant_salt="")
    return prompt.items[0].key
