"""Rendering, against transformers' own tokenizer and template code on the demo checkpoint."""

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_families import save_tiny_model
from transformers import AutoTokenizer

from triptych.config import MediaConfig
from triptych.demo import CHECKPOINT
from triptych.errors import MediaError, RequestError, TooLargeError
from triptych.models.inspect import resolve_model
from triptych.router.render import ChatMessage, MediaPart, RenderedPrompt, Renderer, SamplingDefaults, TextPart

ORACLE: Any = AutoTokenizer.from_pretrained(CHECKPOINT)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
IMAGE_PAD, VISION_START, VISION_END = (ORACLE.convert_tokens_to_ids(name) for name in SPECIAL[5:2:-2] + SPECIAL[4:5])


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    with ThreadPoolExecutor(1) as executor:
        yield Renderer(resolve_model(CHECKPOINT), MediaConfig(max_items=3), executor)


def render(renderer: Renderer, *messages: ChatMessage) -> RenderedPrompt:
    async def run() -> RenderedPrompt:
        async with aiohttp.ClientSession() as session:
            return await renderer.render(messages, session, dtype="float32", tenant_salt="")

    return asyncio.run(run())


def oracle(*messages: dict[str, Any]) -> list[int]:
    return list(ORACLE.apply_chat_template(list(messages), tokenize=True, add_generation_prompt=True, return_dict=False))


TEXTS = st.text(max_size=60) | st.text("<|>imstar_end \n", max_size=40)


@given(st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), TEXTS), min_size=1, max_size=4))
@settings(max_examples=200, deadline=None)
def test_any_text_without_special_tokens_has_transformers_ids(turns: list[tuple[str, str]]) -> None:
    with ThreadPoolExecutor(1) as executor:
        renderer = _RENDERERS.setdefault("demo", Renderer(resolve_model(CHECKPOINT), MediaConfig(), executor))
        messages = [renderer._to_template(ChatMessage(role, text)) for role, text in turns]  # pyright: ignore[reportPrivateUsage]
        ids = renderer.tokenizer.encode(renderer._template.render(messages))  # pyright: ignore[reportPrivateUsage]
    assert list(ids) == oracle(*({"role": role, "content": text} for role, text in turns))


_RENDERERS: dict[str, Renderer] = {}


@pytest.mark.parametrize("token", SPECIAL)
@pytest.mark.parametrize("frame", ["{}", "before {} behind", "{}{}", "x{}\n{}y"])
def test_a_users_text_never_becomes_a_special_token_and_loses_nothing(token: str, frame: str, renderer: Renderer) -> None:
    text = frame.replace("{}", token)
    ids = render(renderer, ChatMessage("user", text)).token_ids
    plain = render(renderer, ChatMessage("user", "X")).token_ids
    special = set(ORACLE.all_special_ids)
    assert [id for id in ids if id in special] == [id for id in plain if id in special]
    assert ORACLE.decode(ids) == ORACLE.decode(plain).replace("X", text)


@pytest.mark.parametrize("parts", [("<|im_", "start|>"), ("a<|im_end", "|>b"), ("<", "|im_end|>"), ("<|im_start|", "> hello")])
def test_two_parts_cannot_be_joined_to_a_special_token(parts: tuple[str, str], renderer: Renderer) -> None:
    ids = render(renderer, ChatMessage("user", tuple(TextPart(part) for part in parts))).token_ids
    assert [id for id in ids if id in set(ORACLE.all_special_ids)] == [
        ORACLE.convert_tokens_to_ids(name) for name in ("<|im_start|>", "<|im_end|>", "<|im_start|>")
    ]


@pytest.mark.parametrize("token", SPECIAL)
def test_neither_end_of_a_users_text_completes_what_stands_beside_it(token: str, renderer: Renderer) -> None:
    tokenizer = renderer.tokenizer
    for cut in range(1, len(token)):
        for rendered in (token[:cut] + tokenizer.guard(token[cut:] + " x"), tokenizer.guard("x " + token[:cut]) + token[cut:]):
            ids = tokenizer.encode(rendered)
            assert not set(ids) & set(ORACLE.all_special_ids), (token, cut)
            assert token in ORACLE.decode(ids)


def test_pictures_become_as_many_placeholders_as_they_have_rows(renderer: Renderer, png: Callable[..., bytes]) -> None:
    small, large = png((112, 112)), png((168, 112))  # 4 x 4 and 6 x 4 rows of 28 x 28 pixels
    message = ChatMessage("user", (MediaPart("image", small), MediaPart("image", large), TextPart("which is larger?")))
    prompt = render(renderer, message)
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "which is larger?"}]
    wanted = list[int]()
    counts = iter([16, 24])
    for id in oracle({"role": "user", "content": content}):
        wanted += [id] * next(counts) if id == IMAGE_PAD else [id]
    assert list(prompt.token_ids) == wanted
    assert [item.num_rows for item in prompt.items] == [16, 24]
    assert [item.grid for item in prompt.items] == [(1, 8, 8), (1, 8, 12)]
    for item in prompt.items:
        ((start, length),) = item.runs
        assert set(prompt.token_ids[start : start + length]) == {IMAGE_PAD}
        assert (prompt.token_ids[start - 1], prompt.token_ids[start + length]) == (VISION_START, VISION_END)
    assert [prompt.media[item.key] for item in prompt.items] == [small, large]


def test_a_placeholder_in_a_users_text_is_no_picture_and_the_real_one_keeps_its_place(
    renderer: Renderer, png: Callable[..., bytes]
) -> None:
    message = ChatMessage("user", (MediaPart("image", png()), TextPart("say <|vision_start|><|image_pad|><|vision_end|> twice")))
    prompt = render(renderer, message)
    assert prompt.token_ids.count(IMAGE_PAD) == 16
    ((start, length),) = prompt.items[0].runs
    assert set(prompt.token_ids[start : start + length]) == {IMAGE_PAD}
    assert "say <|vision_start|><|image_pad|><|vision_end|> twice" in ORACLE.decode(prompt.token_ids)


def test_too_many_items_and_unknown_modalities_are_refused(renderer: Renderer, png: Callable[..., bytes]) -> None:
    with pytest.raises(RequestError, match="4 media items; at most 3"):
        render(renderer, ChatMessage("user", (MediaPart("image", png()),) * 4))
    with pytest.raises(RequestError, match="takes no audio"):
        render(renderer, ChatMessage("user", (MediaPart("audio", b""),)))


@pytest.mark.parametrize("drops", ["message.role == 'system'", "loop.index > 1", "true"])
def test_media_in_a_place_where_the_template_drops_it_is_an_error(drops: str, tmp_path: Path, png: Callable[..., bytes]) -> None:
    save_tiny_model("internvl", tmp_path, [])
    template = tmp_path / "chat_template.jinja"
    template.write_text(template.read_text().replace("in message.content %}", f"in ([] if {drops} else message.content) %}}"))
    picture = (MediaPart("image", png()), TextPart("what is it?"))
    with ThreadPoolExecutor(1) as executor:
        renderer = Renderer(resolve_model(tmp_path), MediaConfig(), executor)
        with pytest.raises(RequestError, match=r"makes [01] placeholders for 2 media parts"):
            render(renderer, ChatMessage("system", picture), ChatMessage("user", picture))


@pytest.mark.parametrize(
    ("config", "defaults"),
    [
        ({}, SamplingDefaults(1.0, 1.0, 0, 0.0, 1.0)),
        ({"do_sample": False, "repetition_penalty": 1.05, "top_k": 20}, SamplingDefaults(0.0, 1.0, 0, 0.0, 1.05)),
        (
            {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05},
            SamplingDefaults(0.7, 0.8, 20, 0.1, 1.05),
        ),
    ],
)
def test_what_a_request_does_not_say_is_what_generation_config_says(
    config: dict[str, Any], defaults: SamplingDefaults, tmp_path: Path
) -> None:
    save_tiny_model("internvl", tmp_path, [])
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    with ThreadPoolExecutor(1) as executor:
        assert Renderer(resolve_model(tmp_path), MediaConfig(), executor).sampling_defaults == defaults


def test_a_file_over_the_limit_is_refused(renderer: Renderer) -> None:
    with pytest.raises(TooLargeError):
        render(renderer, ChatMessage("user", (MediaPart("image", b"\0" * (33 * 1024**2)),)))


BROKEN_URL = "data:image/png;base64,*"


@pytest.mark.parametrize("source", [b"no picture", BROKEN_URL])
def test_of_several_pictures_an_error_says_which(renderer: Renderer, png: Callable[..., bytes], source: str | bytes) -> None:
    good, broken = MediaPart("image", png()), MediaPart("image", source)
    with pytest.raises(MediaError, match=r"^the (media file is not a picture|data URL)") as alone:
        render(renderer, ChatMessage("user", (broken,)))
    with pytest.raises(MediaError) as one_of_three:
        render(renderer, ChatMessage("user", (good,)), ChatMessage("user", (broken, good)))
    assert str(one_of_three.value) == f"picture 2 of 3: {alone.value}"
