"""`Renderer`: a conversation to token ids, once for all workers, with the placeholders of its media items in place.

    messages -> [media: fetch, header, layout, key] -> template -> placeholders become each item's text -> token ids -> where the rows lie

A placeholder comes from a media part and from nothing else: see `PromptTokenizer`.
"""

import asyncio
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from triptych.config import MediaConfig, ModelConfig
from triptych.errors import RequestError
from triptych.media.fetch import decode_data_url, fetch
from triptych.media.header import read_header
from triptych.media.item import MediaItem, item_name
from triptych.media.key import media_key
from triptych.models.inspect import read_eos_token_ids
from triptych.models.layout.adapter import ItemLayout, find_items
from triptych.models.layout.registry import get_layout_adapter, read_json
from triptych.models.weights import check_unchanged
from triptych.router.chat_template import ChatTemplate
from triptych.router.prompt_tokenizer import PromptTokenizer


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True)
class MediaPart:
    """`source` is a URL (data, http, https), or the file's bytes as they are."""

    modality: str
    source: str | bytes


Part = TextPart | MediaPart


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """`role` is not a user's free text: it goes into the template as it is."""

    role: str
    content: str | tuple[Part, ...]

    @property
    def media(self) -> list[MediaPart]:
        return [part for part in self.content if isinstance(part, MediaPart)] if not isinstance(self.content, str) else []


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """`items` in the order of their placeholders; `media` has each item's file by key."""

    token_ids: tuple[int, ...]
    items: tuple[MediaItem, ...] = ()
    media: Mapping[str, bytes] = field(default_factory=dict[str, bytes])

    @property
    def num_rows(self) -> dict[str, int]:
        """Placeholder tokens by modality."""
        return {
            modality: sum(item.num_rows for item in self.items if item.modality == modality)
            for modality in dict.fromkeys(item.modality for item in self.items)
        }


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request gets that does not say."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class Renderer:
    """Reads the model folder's JSON files and template. Thread-safe: rendering runs in `executor`, so that streams beside it don't stutter."""

    def __init__(self, model: ModelConfig, limits: MediaConfig, executor: Executor) -> None:
        self._limits = limits
        self._executor = executor
        self._weights_digest = model.weights_digest
        check_unchanged(model)
        self._adapter = get_layout_adapter(model.path)
        self.tokenizer = PromptTokenizer(model.path, tuple(self._adapter.placeholders.values()))
        self._template = ChatTemplate(model.path, self.tokenizer.config)
        self.eos_token_ids = read_eos_token_ids(model.path)
        self.sampling_defaults = _read_sampling_defaults(model.path)
        self._settings = self._adapter.processor_settings()

    @property
    def takes_media(self) -> bool:
        return bool(self._adapter.placeholders)

    async def render(
        self, messages: Sequence[ChatMessage], session: aiohttp.ClientSession, *, dtype: str, tenant_salt: str
    ) -> RenderedPrompt:
        """`session` fetches http URLs; the workers' `dtype` and the `tenant_salt` are part of every item's key.

        Raises `RequestError` and its kin for whatever is wrong with the messages.
        """
        parts = [part for message in messages for part in message.media]
        if len(parts) > self._limits.max_items:
            raise RequestError(
                f"the request has {len(parts)} media items; at most {self._limits.max_items} are allowed.", param="messages"
            )
        for part in parts:
            self._adapter.check_modality(part.modality)
        files = await _gather([self._load(part, session, (i, len(parts))) for i, part in enumerate(parts, 1)])
        items = [(part.modality, data) for part, data in zip(parts, files, strict=True)]
        make_key = partial(
            media_key, settings=self._settings, weights_digest=self._weights_digest, dtype=dtype, tenant_salt=tenant_salt
        )
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._render, messages, items, make_key)

    async def _load(self, part: MediaPart, session: aiohttp.ClientSession, place: tuple[int, int]) -> bytes:
        """The file's bytes; base64 is decoded in a thread."""
        if isinstance(part.source, bytes):
            return part.source
        with _errors_say_which(part.modality, place):
            if part.source[:5].lower() == "data:":
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._executor, decode_data_url, part.source, self._limits)
            return await fetch(part.source, self._limits, session)

    def _render(
        self, messages: Sequence[ChatMessage], files: Sequence[tuple[str, bytes]], make_key: Callable[..., str]
    ) -> RenderedPrompt:
        """`files`: modality and content of each item."""
        layouts: list[ItemLayout] = []
        keys: list[str] = []
        for i, (modality, data) in enumerate(files, 1):
            with _errors_say_which(modality, (i, len(files))):
                header = read_header(data, self._limits)
                layouts.append(self._adapter.layout(header, len(files)))
                keys.append(make_key(modality=modality, data=data, layout=self._adapter.key_fields(header, len(files))))
        rendered = self._template.render([self._to_template(message) for message in messages])
        token_ids = self.tokenizer.encode(self._expand(rendered, layouts))
        runs = find_items(token_ids, layouts) if layouts else []
        items = tuple(
            MediaItem(key, layout.modality, run, layout.num_rows, layout.grid)
            for key, layout, run in zip(keys, layouts, runs, strict=True)
        )
        return RenderedPrompt(token_ids, items, dict(zip(keys, (data for _, data in files), strict=True)))

    def _to_template(self, message: ChatMessage) -> dict[str, Any]:
        """A text-only model's template takes strings; of the others, some take nothing but lists of parts."""
        if isinstance(message.content, str):
            text = self.tokenizer.guard(message.content)
            as_list = self.takes_media and not self._template.takes_strings
            return {"role": message.role, "content": [{"type": "text", "text": text}] if as_list else text}
        if not self.takes_media:
            texts = [part.text for part in message.content if isinstance(part, TextPart)]
            return {"role": message.role, "content": self.tokenizer.guard("\n".join(texts))}
        parts = [
            {"type": "text", "text": self.tokenizer.guard(part.text)} if isinstance(part, TextPart) else {"type": part.modality}
            for part in message.content
        ]
        return {"role": message.role, "content": parts}

    def _expand(self, rendered: str, layouts: Sequence[ItemLayout]) -> str:
        """Each placeholder becomes its item's text: the n-th of a modality belongs to the n-th item of it."""
        placeholders = self._adapter.placeholders
        waiting = {modality: [layout for layout in layouts if layout.modality == modality] for modality in placeholders}
        modalities = {token: modality for modality, token in placeholders.items()}
        matches = self.tokenizer.find(rendered, modalities)
        _check_placeholders([modalities[match[0]] for match in matches], layouts)
        pieces: list[str] = []
        position = 0
        for match in matches:
            pieces += [rendered[position : match.start()], waiting[modalities[match[0]]].pop(0).text]
            position = match.end()
        return "".join([*pieces, rendered[position:]])


@contextmanager
def _errors_say_which(modality: str, place: tuple[int, int]) -> Generator[None]:
    """`place`: the item's number and how many there are. An error keeps its type, and of several items says which it is about."""
    number, total = place
    try:
        yield
    except RequestError as error:
        if total > 1:
            error.args = (f"{item_name(modality, number, total)}: {error}",)
        raise


def _check_placeholders(found: Sequence[str], layouts: Sequence[ItemLayout]) -> None:
    wanted = sorted(layout.modality for layout in layouts)
    if sorted(found) != wanted:
        raise RequestError(
            f"the chat template makes {len(found)} placeholders for {len(wanted)} media parts; "
            "it may take media in some messages only (usually the user's).",
            param="messages",
        )


def _read_sampling_defaults(model_dir: Path) -> SamplingDefaults:
    """generation_config.json's. `do_sample: false` there means greedy; a file that does not say leaves OpenAI's defaults."""
    path = model_dir / "generation_config.json"
    config = read_json(path) if path.is_file() else {}
    repetition_penalty = float(config.get("repetition_penalty") or 1.0)
    if config.get("do_sample") is False:
        return SamplingDefaults(temperature=0.0, repetition_penalty=repetition_penalty)
    return SamplingDefaults(
        temperature=float(config.get("temperature") or 1.0),
        top_p=float(config.get("top_p") or 1.0),
        top_k=int(config.get("top_k") or 0),
        min_p=float(config.get("min_p") or 0.0),
        repetition_penalty=repetition_penalty,
    )


async def _gather(loads: Sequence[Any]) -> list[bytes]:
    """All or the first error; what still runs is then cancelled."""
    tasks = [asyncio.ensure_future(load) for load in loads]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
