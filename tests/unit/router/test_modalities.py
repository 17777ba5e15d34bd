"""Every kind of part and every route takes part, or says that it does not."""

from collections.abc import Callable
from typing import Any

import pytest

Serve = Callable[..., Any]

PICTURE = "data:image/png;base64,AAAA"
PARTS: dict[str, dict[str, Any]] = {
    "video": {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
    "audio": {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
}


@pytest.mark.parametrize("modality", PARTS)
@pytest.mark.parametrize("place", ["before", "behind"])
async def test_a_modality_that_the_model_does_not_take_is_refused_by_name_before_any_worker_hears_of_it(
    serve: Serve, png: Callable[..., bytes], modality: str, place: str
) -> None:
    text = {"type": "text", "text": "what is it?"}
    parts = [PARTS[modality], text] if place == "before" else [text, PARTS[modality]]
    async with serve("E1P1D1") as served:
        status, answer = await served.post({"messages": [{"role": "user", "content": parts}]})
        assert status == 400
        assert f"takes no {modality} input; it takes image" in answer["error"]["message"]
        assert all(not worker.record.generates and not worker.record.encodes for worker in served.workers.values())


@pytest.mark.parametrize("kind", ["image_embeds", "input_image", "audio_url", "file", "refusal"])
async def test_a_part_of_an_unknown_kind_is_refused_with_the_known_ones(serve: Serve, kind: str) -> None:
    async with serve("E1P1D1") as served:
        status, answer = await served.post({"messages": [{"role": "user", "content": [{"type": kind, kind: "x"}]}]})
        assert (status, answer["error"]["param"]) == (400, "messages.0.content.0")
        assert "image_url" in answer["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/embeddings", "/generate", "/v1/messages"])
async def test_a_route_that_is_not_served_is_a_404(serve: Serve, path: str) -> None:
    async with serve("E1P1D1") as served, served.session.post(served.url + path, json={"prompt": "x"}) as response:
        assert response.status == 404
