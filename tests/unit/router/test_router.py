"""The real app on a loopback port, with fake workers behind it."""

import asyncio
import base64
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from triptych.config import ModelConfig
from triptych.demo import CHECKPOINT
from triptych.engine.arithmetic_runner import Fabric
from triptych.engine.events import Failed
from triptych.errors import FailureReason, OverloadedError, StartError
from triptych.router.fake_worker_client import FakeCosts, FakeWorkerClient
from triptych.router.options import RouterOptions
from triptych.router.router import run_router

Serve = Callable[..., Any]
TOKENIZER = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


def chat(text: str = "what colour is the circle?", **fields: Any) -> dict[str, Any]:
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 5,
        "temperature": 0,
        "seed": 1,
    } | fields


def picture_chat(*pictures: bytes, **fields: Any) -> dict[str, Any]:
    urls = ["data:image/png;base64," + base64.b64encode(picture).decode() for picture in pictures]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return chat(**fields) | {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "what is it?"}]}]}


def says(served: Any, text: str) -> list[int]:
    """Make every worker answer `text` and stop."""
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    for worker in served.workers.values():
        worker.runner.script = (*ids, TOKENIZER.token_to_id("<|im_end|>"))
    return ids


async def test_an_answer_has_openais_shape(serve: Serve) -> None:
    async with serve("P1D1") as served:
        says(served, "red circle")
        status, answer = await served.post(chat(max_tokens=50))
        (choice,) = answer["choices"]
        assert status == 200
        assert answer["object"] == "chat.completion"
        assert answer["id"].startswith("chatcmpl-")
        assert answer["model"] == "demo"
        assert choice["message"] == {"role": "assistant", "content": "red circle", "refusal": None}
        assert choice["finish_reason"] == "stop"
        assert choice["logprobs"] is None


async def test_usage_counts_the_prompt_the_answer_and_the_pictures_rows(serve: Serve, png: Callable[..., bytes]) -> None:
    async with serve("E1P1D1") as served:
        _, answer = await served.post(picture_chat(png((112, 112)), max_tokens=3))
        (request,) = served.workers["P0"].record.generates
        assert answer["usage"] == {
            "prompt_tokens": len(request.token_ids),
            "completion_tokens": 3,
            "total_tokens": len(request.token_ids) + 3,
            "prompt_tokens_details": {"cached_tokens": 0, "image_tokens": 16},  # 112 x 112 pixels in rows of 28 x 28
        }
        assert answer["choices"][0]["finish_reason"] == "length"


async def test_the_picture_reaches_the_encode_worker_as_it_was_sent(serve: Serve, png: Callable[..., bytes]) -> None:
    async with serve("E1P1D1") as served:
        await served.post(picture_chat(png()))
        assert served.workers["E0"].record.media == [png()]


async def test_a_stream_starts_with_the_role_and_ends_with_reason_usage_and_done(serve: Serve) -> None:
    async with serve("P1D1") as served:
        says(served, "red circle")
        events = await served.stream(chat(max_tokens=50, stream_options={"include_usage": True}))
        chunks = [json.loads(event) for event in events[:-1]]
        assert events[-1] == "[DONE]"
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        text = "".join(choice["delta"]["content"] or "" for chunk in chunks for choice in chunk["choices"])
        assert text == "red circle"
        assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]] == ["stop"]
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == len(TOKENIZER.encode("red circle", add_special_tokens=False).ids)
        assert set(chunks[-2]["timing"]) >= {"prefill", "decode", "router"}


async def test_tokens_arrive_one_by_one(serve: Serve) -> None:
    async with serve("PD1") as served:
        ids = says(served, "red circle, blue square")
        events = await served.stream(chat(max_tokens=50))
        assert len(events) == 1 + len(ids) + 1 + 1  # role, tokens, reason, [DONE]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_answer_and_the_work(stream: bool, serve: Serve) -> None:
    async with serve("PD1") as served:
        ids = says(served, "red circle, blue square")
        served.workers["PD0"].costs = FakeCosts(decode_s=0.001)
        body = chat(max_tokens=50, stop=[", blue", "zzz"], stream_options={"include_usage": True} if stream else None)
        if stream:
            chunks = [json.loads(event) for event in (await served.stream(body))[:-1]]
            text = "".join(choice["delta"]["content"] or "" for chunk in chunks for choice in chunk["choices"])
            usage, reason = chunks[-1]["usage"], chunks[-2]["choices"][0]["finish_reason"]
        else:
            _, answer = await served.post(body)
            text = answer["choices"][0]["message"]["content"]
            usage, reason = answer["usage"], answer["choices"][0]["finish_reason"]
        assert (text, reason) == ("red circle", "stop")
        until_stop = next(count for count in range(len(ids)) if ", blue" in TOKENIZER.decode(ids[:count]))
        assert usage["completion_tokens"] == until_stop
        assert len(served.workers["PD0"].record.aborted) == 1


async def test_logprobs_are_named_tokens(serve: Serve) -> None:
    async with serve("PD1") as served:
        ids = says(served, "red")
        _, answer = await served.post(chat(logprobs=True, top_logprobs=2, max_tokens=50))
        entries = answer["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in entries] == [TOKENIZER.decode([id]) for id in ids]
        assert entries[0]["bytes"] == list(TOKENIZER.decode([ids[0]]).encode())
        assert entries[0]["top_logprobs"][1] == {
            "token": TOKENIZER.decode([7]),
            "logprob": -2.0,
            "bytes": list(TOKENIZER.decode([7]).encode()),
        }
        assert served.workers["PD0"].record.generates[0].sampling_params.logprobs == 2


async def test_timing_adds_up_to_what_the_client_sees(serve: Serve, png: Callable[..., bytes]) -> None:
    async with serve("E1P1D1") as served:
        for worker in served.workers.values():
            worker.costs = FakeCosts(encode_s=0.05, prefill_s=0.03, decode_s=0.01, transfer_s=0.02)
        started = asyncio.get_running_loop().time()
        _, answer = await served.post(picture_chat(png(), max_tokens=3))
        elapsed_ms = (asyncio.get_running_loop().time() - started) * 1000
        timing = answer["timing"]
        assert set(timing) == {
            "preprocess", "encode_queue", "encode", "ec_transfer", "prefill_queue", "prefill", "kv_transfer", "decode", "router",
            "encode_retries", "replays",
        }  # fmt: skip
        assert timing["encode_retries"] == timing["replays"] == 0
        least = {"encode": 50, "ec_transfer": 20, "prefill": 30, "kv_transfer": 20, "decode": 20}
        assert {stage: round(timing[stage]) for stage, ms in least.items() if round(timing[stage]) < ms} == {}
        assert 140 <= sum(timing.values()) <= elapsed_ms


@pytest.mark.parametrize(
    ("fields", "param", "sentence"),
    [
        ({"n": 0}, "n", "at least 1 and at most 128"),
        ({"n": 129}, "n", "at least 1 and at most 128"),
        ({"best_of": 2}, "best_of", "best_of is not supported"),
        ({"tools": [{"type": "function"}]}, "tools", "tools is not supported"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_object"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice", "a list of strings"),
        ({"max_token": 3}, "max_token", "did you mean 'max_tokens'"),
        ({"temperature": 3}, "temperature", "at most 2"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"min_tokens": 9}, "min_tokens", "at most 5"),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stop": ""}, "stop", "1 to 1024"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "root", "content": "x"}]}, "messages.0.role", "'system'"),
        ({"messages": [{"role": "user", "content": [{"type": "txt", "text": "x"}]}]}, "messages.0.content.0", "image_url"),
        ({"messages": "hello"}, "messages", "list"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content", "string"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text", "required"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "data:,"}]}]},
            "messages.0.content.0.image_url", "dictionary",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content.0.image_url.url", "required",
        ),
        ({"stop": 5}, "stop", "string"),
        ({"min_p": 1.5}, "min_p", "at most 1"),
        ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
        ({"presence_penalty": 2.5}, "presence_penalty", "at least -2 and at most 2"),
        ({"frequency_penalty": -3}, "frequency_penalty", "at least -2 and at most 2"),
        ({"logit_bias": {"5": 101}}, "logit_bias[5]", "at least -100 and at most 100"),
        ({"logit_bias": {"1024": 1}}, "logit_bias", "has token id 1024; the model's are 0 to 1023"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "has the key '-1'; keys are token ids"),
        ({"logit_bias": {"red": 1}}, "logit_bias", "has the key 'red'; keys are token ids"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "keys are token ids"),
        ({"logit_bias": {"5": "high"}}, "logit_bias.5", "valid number"),
        ({"logit_bias": {str(number): 1 for number in range(1025)}}, "logit_bias", "at most 1024"),
        ({"logit_bias": [5]}, "logit_bias", "dictionary"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "at most 20"),
        ({"priority": 2**31}, "priority", "less than 2147483648"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "cannot be streamed"),
        ({"max_tokens": 5000}, None, "context of 4096"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
    ],
)  # fmt: skip
async def test_a_clients_mistake_is_a_400_that_says_what_and_where(
    fields: dict[str, Any], param: str | None, sentence: str, serve: Serve
) -> None:
    async with serve("P1D1") as served:
        status, answer = await served.post(chat(**fields))
        assert status == 400
        assert answer["error"]["type"] == "invalid_request_error"
        assert answer["error"]["param"] == param
        assert sentence in answer["error"]["message"]
        assert served.workers["P0"].record.generates == []


async def test_sampling_parameters_reach_prefill_and_decode_as_they_were_sent(serve: Serve) -> None:
    sent: dict[str, Any] = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.2, "presence_penalty": -0.5,
        "frequency_penalty": 2, "seed": 3, "min_tokens": 2,
    }  # fmt: skip
    async with serve("P1D1") as served:
        status, answer = await served.post(chat(**sent, logit_bias={"7": -100, "1023": 2.5}))
        assert status == 200, answer
        for name in ("P0", "D0"):
            sampling = served.workers[name].record.generates[0].sampling_params
            assert {field: getattr(sampling, field) for field in sent} == sent
            assert sampling.logit_bias == {7: -100.0, 1023: 2.5}


async def test_neutral_values_of_unsupported_fields_are_taken(serve: Serve) -> None:
    async with serve("P1D1") as served:
        neutral: dict[str, Any] = {
            "n": 1,
            "tools": None,
            "tool_choice": "auto",
            "response_format": {"type": "text"},
            "frequency_penalty": 0.0,
            "presence_penalty": None,
            "min_p": 0,
            "repetition_penalty": 1,
            "logit_bias": None,
            "prompt_logprobs": None,
            "best_of": 1,
            "user": "me",
        }
        status, _ = await served.post(chat(**neutral))
        assert status == 200


async def test_other_errors_have_the_same_shape(serve: Serve) -> None:
    async with serve("P1D1") as served:
        status, answer = await served.post(chat(model="gpt-9"))
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        status, answer = await served.post(chat(text="x" * 300_000))
        assert (status, answer["error"]["type"]) == (413, "invalid_request_error")
        status, answer = await served.get("/v1/nothing")
        assert status == 404
        assert "/v1/nothing" in answer["error"]["message"]
        async with served.session.post(served.url + "/v1/chat/completions", data=b"{not json") as response:
            assert response.status == 400
            assert "not valid JSON" in (await response.json())["error"]["message"]
        half = b'{"messages": [{"role": "user", "content": "\\ud800"}]}'  # half a surrogate pair
        async with served.session.post(served.url + "/v1/chat/completions", data=half) as response:
            assert response.status == 400


async def test_a_picture_without_encode_workers_in_the_layout_is_refused_with_the_remedy(
    serve: Serve, png: Callable[..., bytes]
) -> None:
    async with serve("P1D1") as served:
        status, answer = await served.post(picture_chat(png()))
        assert status == 400
        assert "--encode 1" in answer["error"]["message"]


async def test_an_item_larger_than_an_encoder_cache_names_the_setting(serve: Serve, png: Callable[..., bytes]) -> None:
    async with serve("E1P1D1") as served:
        # 1792 x 448 pixels become 64 x 16 = 1024 rows; the fakes hold 4096, so one is replaced by a smaller one
        worker = next(worker for worker in served.serving.pool.workers if worker.id == "E0")
        worker.info = msgspec.structs.replace(worker.info, encoder_cache_rows=1023)
        status, answer = await served.post(picture_chat(png((1792, 448))))
        assert status == 400
        assert "1024 rows" in answer["error"]["message"]
        assert "--encoder-cache-rows" in answer["error"]["message"]


async def test_broken_pictures_and_foreign_urls_are_400(serve: Serve) -> None:
    async with serve("E1P1D1") as served:
        status, answer = await served.post(picture_chat(b"no picture"))
        assert status == 400
        assert "picture" in answer["error"]["message"]
        body = chat() | {
            "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x"}}]}]
        }
        status, answer = await served.post(body)
        assert status == 400
        assert "--allow-media-domain" in answer["error"]["message"]


async def test_full_is_429_with_retry_after(serve: Serve) -> None:
    async with serve("PD1", worker_wait_s=0.0) as served:
        served.workers["PD0"].faults.generates.append(OverloadedError("full", retry_after_s=3.0))
        async with served.session.post(served.url + "/v1/chat/completions", json=chat()) as response:
            assert response.status == 429
            assert response.headers["retry-after"] == "3"


async def test_a_missing_stage_is_503_and_health_names_it(serve: Serve, png: Callable[..., bytes]) -> None:
    async with serve("E1P1D1", present=["P", "D"], worker_wait_s=0.0) as served:
        status, answer = await served.get("/health")
        assert (status, answer) == (503, {"status": "unavailable", "missing": ["encode"]})
        status, answer = await served.post(picture_chat(png()))
        assert (status, answer["error"]["type"], answer["error"]["code"]) == (503, "ec_unavailable", "no_worker")
        status, _ = await served.post(chat())
        assert status == 200


async def test_health_is_ok_with_every_stage_of_the_layout(serve: Serve) -> None:
    for layout in ("E1P1D1", "P1D1", "EPD1"):
        async with serve(layout) as served:
            assert await served.get("/health") == (200, {"status": "ok", "missing": []})


async def test_an_error_after_the_first_byte_is_an_event_and_then_the_end(serve: Serve) -> None:
    async with serve("P1D1", worker_wait_s=0.0) as served:
        served.workers["D0"].faults.die_after_tokens = 2
        events = await served.stream(chat())
        assert json.loads(events[-2])["error"]["type"] == "worker_unavailable"
        assert events[-1] == "[DONE]"


async def test_a_router_that_stops_ends_open_streams_with_an_error_event(serve: Serve) -> None:
    async with serve("PD1") as served:
        worker = served.workers["PD0"]
        worker.costs = FakeCosts(decode_s=0.02)
        streaming = asyncio.create_task(served.stream(chat(max_tokens=3000)))
        await until(lambda: len(worker.record.generates) == 1)
        await asyncio.sleep(0.1)
        await served.serving.pipeline.stop()
        events = await asyncio.wait_for(streaming, 2)
        assert "stopping" in json.loads(events[-2])["error"]["message"]
        assert events[-1] == "[DONE]"
        assert len(worker.record.aborted) == 1


async def test_a_worker_that_registers_is_used_and_one_with_other_weights_is_refused(
    serve: Serve, served: Any, demo_model: Any
) -> None:
    behind = FakeWorkerClient("PD9", "PD", Fabric())
    async with serve("PD1", present=[]) as router, served(behind) as (server, _):
        status, answer = await router.post({"url": server.url}, path="/workers")
        assert status == 400
        assert "weights_digest" in answer["error"]["message"]
        fingerprint = replace(behind.info.fingerprint, weights_digest=demo_model.weights_digest)
        behind.info = msgspec.structs.replace(behind.info, fingerprint=fingerprint)
        for _ in range(2):  # again does no harm
            status, answer = await router.post({"url": server.url}, path="/workers")
            assert (status, answer) == (200, {"id": "PD9", "role": "PD"})
        _, answer = await router.get("/workers")
        assert [worker["url"] for worker in answer["workers"]] == [server.url]
        status, _ = await router.post(chat())
        assert status == 200
        assert len(behind.record.generates) == 1
        await server.runner.cleanup()
        await until(lambda: router.serving.pool.workers == ())


async def test_a_worker_that_fell_silent_and_comes_back_has_nothing_left_to_do_and_is_used_again(
    serve: Serve, served: Any, demo_model: Any
) -> None:
    behind = FakeWorkerClient("PD9", "PD", Fabric())
    fingerprint = replace(behind.info.fingerprint, weights_digest=demo_model.weights_digest)
    behind.info = msgspec.structs.replace(behind.info, fingerprint=fingerprint)
    async with serve("PD1", present=[]) as router, served(behind) as (server, client):
        router.serving.pool.join(client)  # this one bears 0.2 s of silence
        behind.hang()
        asking = asyncio.create_task(router.post(chat()))
        await until(lambda: len(behind.record.generates) == 1)
        server.heartbeat_s = 0.0
        await until(lambda: router.serving.pool.workers == ())
        await until(lambda: len(behind.record.aborted) == 1)
        server.heartbeat_s = 0.02
        behind.running.set()
        status, _ = await router.post({"url": server.url}, path="/workers")  # as it does when it finds itself unwatched
        assert status == 200
        status, answer = await asking
        assert (status, answer["timing"]["replays"]) == (200, 1)
        assert len(behind.record.generates) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_says_how_often_something_had_to_be_done_again(
    stream: bool, serve: Serve, png: Callable[..., bytes]
) -> None:
    async with serve("E2P2D1") as served:
        served.workers["E0"].faults.encodes.append(FailureReason.INTERNAL)
        served.workers["D0"].faults.generates.append(Failed("", "no KV", "kv_unavailable", 503, FailureReason.STALE))
        if stream:
            events = await served.stream(picture_chat(png()))
            timing = next(chunk["timing"] for chunk in map(json.loads, reversed(events[:-1])) if chunk["timing"])
        else:
            _, answer = await served.post(picture_chat(png()))
            timing = answer["timing"]
        assert (timing["encode_retries"], timing["replays"]) == (1, 1)
        assert {name for name, value in timing.items() if isinstance(value, int)} == {"encode_retries", "replays"}


async def test_named_workers_are_looked_for_until_they_are_there(serve: Serve, served: Any, demo_model: Any) -> None:
    behind = FakeWorkerClient("PD9", "PD", Fabric())
    fingerprint = replace(behind.info.fingerprint, weights_digest=demo_model.weights_digest)
    behind.info = msgspec.structs.replace(behind.info, fingerprint=fingerprint)
    async with serve("PD1", present=[]) as router, served(behind) as (server, _):
        router.serving.membership.look_for([server.url])
        await until(lambda: [worker.id for worker in router.serving.pool.workers] == ["PD9"])


async def test_a_client_that_leaves_a_stream_or_waits_no_longer_aborts_it(serve: Serve) -> None:
    async with serve("PD1") as served:
        worker = served.workers["PD0"]
        worker.costs = FakeCosts(decode_s=0.02)
        response = await served.session.post(served.url + "/v1/chat/completions", json=chat(stream=True, max_tokens=3000))
        await response.content.readany()
        response.close()
        await until(lambda: len(worker.record.aborted) == 1)

        worker.hang()
        waiting = asyncio.create_task(served.post(chat()))
        await until(lambda: len(worker.record.generates) == 2)
        waiting.cancel()
        await until(lambda: len(worker.record.aborted) == 2)
        await until(lambda: served.serving.pipeline.num_in_flight == 0)


async def until(holds: Callable[[], bool]) -> None:
    """Poll, since what is waited for happens behind a socket; the test's time limit bounds it."""
    async with asyncio.timeout(5):
        while not holds():  # noqa: ASYNC110 (nothing there could set an event)
            await asyncio.sleep(0.005)


async def test_a_request_past_its_deadline_is_504(serve: Serve) -> None:
    async with serve("PD1", request_timeout_s=0.05) as served:
        served.workers["PD0"].hang()
        status, answer = await served.post(chat())
        assert (status, answer["error"]["type"]) == (504, "deadline_exceeded")
        assert "prefill at PD0" in answer["error"]["message"]


async def test_models_workers_and_metrics(serve: Serve) -> None:
    async with serve("P1D1") as served:
        await served.post(chat())
        status, models = await served.get("/v1/models")
        assert (status, [card["id"] for card in models["data"]]) == (200, ["demo"])
        _, workers = await served.get("/workers")
        assert [(worker["id"], worker["role"], worker["state"], worker["url"]) for worker in workers["workers"]] == [
            ("P0", "P", "ready", ""),  # in this process
            ("D0", "D", "ready", ""),
        ]
        _, text = await served.get("/metrics")
        assert 'triptych_requests_total{outcome="length",status="200"} 1.0' in text
        assert 'triptych_workers{role="P",state="ready"} 1.0' in text
        assert "triptych_ttft_seconds_count 1.0" in text


async def test_registering_what_is_no_worker_is_refused(serve: Serve) -> None:
    async with serve("P1D1") as served:
        status, answer = await served.post({"url": "file:///etc/passwd"}, path="/workers")
        assert status == 400
        assert "http" in answer["error"]["message"]
        status, _ = await served.post({"url": served.url}, path="/workers")  # the router itself: no info route
        assert status == 400
        status, _ = await served.post({"url": "http://127.0.0.1:9"}, path="/workers")
        assert status == 503


@pytest.mark.parametrize(("host", "secret", "num_warnings"), [("0.0.0.0", "", 1), ("0.0.0.0", "x" * 16, 0), ("127.0.0.1", "", 0)])
def test_a_router_that_other_hosts_can_reach_without_a_secret_says_so_as_it_starts(
    host: str,
    secret: str,
    num_warnings: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    demo_model: ModelConfig,
) -> None:
    def nothing(*_: object, **__: object) -> None:
        raise StartError("that is all.")

    monkeypatch.setattr("triptych.router.router.open_serving", nothing)
    with pytest.raises(StartError, match="that is all"):
        run_router(RouterOptions(demo_model, host=host, port=0, cluster_secret=secret))
    assert ["TRIPTYCH_CLUSTER_SECRET" in record.getMessage() for record in caplog.records] == [True] * num_warnings


def test_options_leave_room_for_the_largest_picture_in_base64(demo_model: ModelConfig) -> None:
    options = RouterOptions(model=demo_model)
    assert options.max_body_nbytes > options.media.max_media_nbytes * 4 / 3


async def test_a_models_card_is_found_by_its_name_and_no_other(serve: Serve) -> None:
    async with serve("P1D1") as served:
        _, models = await served.get("/v1/models")
        assert await served.get("/v1/models/demo") == (200, models["data"][0])
        for name in ("other", "some/other"):
            status, answer = await served.get(f"/v1/models/{name}")
            assert (status, answer["error"]["code"]) == (404, "model_not_found")
            assert f"no model '{name}'" in answer["error"]["message"]
