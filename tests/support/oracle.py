"""Requests on the demo model, fifty mixed ones and fifty that begin alike, and their greedy continuations by `transformers`' own `generate`.

Nothing of Triptych is used here but the checkpoint and the pictures: template, tokens, pixels and positions are the library's.
"""

import io
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from random import Random
from typing import Any

import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from triptych.demo import CHECKPOINT
from triptych.demo.pictures import draw, random_picture

NUM_REQUESTS = 50
NUM_CONVERSATIONS = 10  # of five requests each
SIZES = ((112, 112), (168, 112), (112, 196), (224, 224), (140, 420))
QUESTIONS = ("what colour is the circle?", "what shape is red?", "how many shapes are there?", "describe the picture.")
WORDS = ("a red circle", "the blue square", "and", "of every picture", "that we have seen", "is one more than two", "shapes")


@dataclass(frozen=True)
class MixedRequest:
    """`pictures` are PNG files; `has_stop`: generation may end at the end-of-turn token."""

    messages: list[dict[str, Any]]
    pictures: tuple[bytes, ...]
    max_tokens: int
    has_stop: bool


@dataclass(frozen=True)
class Wanted:
    request: MixedRequest
    prompt: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]  # one per picture
    grids: tuple[tuple[int, int, int], ...]
    tokens: list[int]
    logprobs: list[float] = field(default_factory=list[float])


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


@cache
def mixed_requests() -> list[MixedRequest]:
    rng = Random(2024)
    requests: list[MixedRequest] = []
    for index in range(NUM_REQUESTS):
        num_pictures = (0, 1, 3, 1, 0)[index % 5]
        pictures = tuple(_png(draw(random_picture(rng, SIZES[rng.randrange(len(SIZES))]))) for _ in range(num_pictures))
        num_words = (0, 8, 25, 80, 420)[rng.choices(range(5), (4, 3, 2, 1, 0.6))[0]]
        text = " ".join(rng.choice(WORDS) for _ in range(num_words))
        parts: list[dict[str, Any]] = [{"type": "image"} for _ in pictures]
        parts.append({"type": "text", "text": f"{text} {rng.choice(QUESTIONS)}".strip()})
        messages = [{"role": "user", "content": parts}]
        requests.append(MixedRequest(messages, pictures, max_tokens=rng.randrange(2, 11), has_stop=index % 2 == 0))
    return requests


def _message(role: str, text: str, *, has_picture: bool = False) -> dict[str, Any]:
    pictures = [{"type": "image"}] if has_picture else []
    return {"role": role, "content": [*pictures, {"type": "text", "text": text}]}


@dataclass(frozen=True)
class Conversation:
    """What is asked of one system text: a question about a picture, another about the same, the first about another picture, one without a
    picture, and, once the first is answered, one more."""

    opening: tuple[MixedRequest, ...]
    next_question: str

    def second_turn(self, answer: str) -> MixedRequest:
        first = self.opening[0]
        messages = [*first.messages, _message("assistant", answer), _message("user", self.next_question)]
        return MixedRequest(messages, first.pictures, max_tokens=6, has_stop=True)


@cache
def conversations() -> list[Conversation]:
    rng = Random(2025)
    systems = [" ".join(rng.choice(WORDS) for _ in range(num_words)) for num_words in (2, 8, 30)]
    return [_conversation(rng, systems[index % len(systems)]) for index in range(NUM_CONVERSATIONS)]


def _conversation(rng: Random, system: str) -> Conversation:
    size = SIZES[rng.randrange(len(SIZES))]
    one, other = (_png(draw(random_picture(rng, size))) for _ in range(2))
    text, (first, second, third) = rng.choice(WORDS), rng.sample(QUESTIONS, 3)

    def request(question: str, *pictures: bytes, has_stop: bool = False) -> MixedRequest:
        messages = [_message("system", system), _message("user", f"{text} {question}", has_picture=bool(pictures))]
        return MixedRequest(messages, pictures, max_tokens=rng.randrange(4, 25), has_stop=has_stop)

    opening = request(first, one, has_stop=True), request(second, one), request(first, other), request(third)
    return Conversation(opening, third)


class Oracle:
    def __init__(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
        self.processor = AutoImageProcessor.from_pretrained(CHECKPOINT, backend="pil")
        self.model = Qwen2_5_VLForConditionalGeneration.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
        self.pad: int = self.model.config.image_token_id
        self.stop_ids: tuple[int, ...] = _as_tuple(self.model.generation_config.eos_token_id)

    def answer_all(self) -> list[Wanted]:
        return [self.answer(request) for request in mixed_requests()]

    def answer_conversation(self, conversation: Conversation) -> list[Wanted]:
        """The last is the second turn, which contains the first one's answer."""
        opening = [self.answer(request) for request in conversation.opening]
        said: str = self.tokenizer.decode(opening[0].tokens, skip_special_tokens=True)
        return [*opening, self.answer(conversation.second_turn(said))]

    @torch.inference_mode()
    def prompt_logits(self, wanted: Wanted) -> torch.Tensor:
        """[prompt tokens, vocabulary], of the whole prompt in one forward."""
        ids, pixels = torch.tensor([wanted.prompt]), self._pixels(wanted.request)
        extra = dict(pixels, mm_token_type_ids=(ids == self.pad).long()) if pixels else {}
        return self.model(input_ids=ids, **extra).logits[0].float()

    def _pixels(self, request: MixedRequest) -> dict[str, Any]:
        images = [Image.open(io.BytesIO(data)) for data in request.pictures]
        return self.processor(images=images, return_tensors="pt") if images else {}

    @torch.inference_mode()
    def answer(self, request: MixedRequest) -> Wanted:
        pixels = self._pixels(request)
        grids = tuple(tuple(grid) for grid in pixels["image_grid_thw"].tolist()) if pixels else ()
        prompt = self._prompt(request, grids)
        ids = torch.tensor([prompt])
        extra = dict(pixels, mm_token_type_ids=(ids == self.pad).long()) if pixels else {}
        generate: Any = self.model.generate  # type: ignore[attr-defined]  # the library's own annotations refuse its models
        output = generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=request.max_tokens,
            do_sample=False,
            eos_token_id=list(self.stop_ids) if request.has_stop else None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
            **extra,
        )
        tokens = output.sequences[0, len(prompt) :].tolist()
        logprobs = [
            torch.log_softmax(logits[0].float(), -1)[token].item() for logits, token in zip(output.logits, tokens, strict=True)
        ]
        if request.has_stop and tokens[-1] in self.stop_ids:
            tokens, logprobs = tokens[:-1], logprobs[:-1]
        return Wanted(request, tuple(prompt), self._runs(prompt, grids), grids, tokens, logprobs)

    def _prompt(self, request: MixedRequest, grids: tuple[tuple[int, ...], ...]) -> list[int]:
        text: str = self.tokenizer.apply_chat_template(request.messages, tokenize=False, add_generation_prompt=True)
        head, *tails = text.split("<|image_pad|>")
        for grid, tail in zip(grids, tails, strict=True):
            head += "<|image_pad|>" * (grid[0] * grid[1] * grid[2] // 4) + tail
        return self.tokenizer(head, add_special_tokens=False)["input_ids"]

    def _runs(self, prompt: list[int], grids: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, int], ...]:
        places = [place for place, token in enumerate(prompt) if token == self.pad]
        runs: list[tuple[int, int]] = []
        for _, group in groupby(enumerate(places), key=lambda each: each[1] - each[0]):
            run = [place for _, place in group]
            runs.append((run[0], len(run)))
        assert [length for _, length in runs] == [grid[0] * grid[1] * grid[2] // 4 for grid in grids]
        return tuple(runs)


def _as_tuple(ids: int | list[int]) -> tuple[int, ...]:
    return (ids,) if isinstance(ids, int) else tuple(ids)
