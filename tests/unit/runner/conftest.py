"""A tiny random model, the same model whole in `transformers` as the oracle, and a scheduler of which every decision is the test's."""

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration

from triptych.config import CacheConfig, EngineConfig, ModelConfig, Role, SchedulerConfig
from triptych.demo import CHECKPOINT
from triptych.media.item import MediaItem
from triptych.models.loader import LoadedModel, Parts, load_model
from triptych.output import CachedRequestData, EncodeInput, ModelRunnerOutput, NewRequestData, SchedulerOutput
from triptych.runner.model_runner import ModelRunner, make_runner
from triptych.sampling_params import SamplingParams

IMAGE_TOKEN, VISION_START, VISION_END = 5, 3, 4
PATCH_NUMBERS = 3 * 2 * 14 * 14


@dataclass(frozen=True)
class TinyModel:
    """Random weights; embedding and head are not tied, since tied random models only repeat one token."""

    path: Path
    config: ModelConfig
    whole: Any  # transformers' own class, with its own attention
    parts: dict[Parts, LoadedModel]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    path = tmp_path_factory.mktemp("tiny")
    config: Any = AutoConfig.from_pretrained(CHECKPOINT)
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = False
    text = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "initializer_range": 0.3,
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
        "initializer_range": 0.3,
    }
    for part, values in ((config.text_config, text), (config.vision_config, vision)):
        for name, value in values.items():
            setattr(part, name, value)
    config.vision_config.fullatt_block_indexes = [1]
    config.text_config.layer_types = ["full_attention"] * 3
    config.text_config.rope_parameters = {**config.text_config.rope_parameters, "mrope_section": [2, 3, 3]}
    torch.manual_seed(1)
    whole = Qwen2_5_VLForConditionalGeneration(config).eval().requires_grad_(False)
    whole.save_pretrained(path)
    shutil.copy(CHECKPOINT / "preprocessor_config.json", path)
    model_config = ModelConfig(
        path=path,
        name="tiny",
        family="qwen2_5_vl",
        weights_digest="0" * 64,
        dtype="float32",
        max_model_len=512,
        vocab_size=1024,
        hidden_size=64,
        num_layers=3,
        num_kv_heads=2,
        head_dim=16,
    )
    parts = {part: load_model(model_config, part) for part in Parts}
    return TinyModel(path, model_config, whole, parts)


@pytest.fixture
def engine_config(tiny: TinyModel) -> Callable[..., EngineConfig]:
    def make(role: str = "EPD", block_size: int = 4, num_blocks: int = 256, is_alone: bool | None = None) -> EngineConfig:
        return EngineConfig(
            model=tiny.config,
            role=Role.parse(role),
            is_alone=role == "EPD" if is_alone is None else is_alone,
            cache=CacheConfig(block_size=block_size, num_kv_blocks=num_blocks, encoder_cache_rows=256, rows_per_page=4),
            scheduler=SchedulerConfig(max_num_seqs=4),
        )

    return make


@pytest.fixture
def runner(tiny: TinyModel, engine_config: Callable[..., EngineConfig]) -> ModelRunner:
    return make_runner(engine_config(), tiny.parts[Parts.FULL])


@dataclass
class Picture:
    """Random pixels for a grid of patches; 4 patches make one row."""

    grid: tuple[int, int, int]
    seed: int
    inputs: dict[str, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        num_patches = self.grid[0] * self.grid[1] * self.grid[2]
        pixels = torch.randn(num_patches, PATCH_NUMBERS, generator=generator)
        self.inputs = {"pixel_values": pixels, "image_grid_thw": torch.tensor([self.grid])}

    @property
    def key(self) -> str:
        return f"{self.seed:064x}"

    @property
    def num_rows(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2] // 4


@dataclass
class Prompt:
    """Text pieces (token ids) and pictures, in order."""

    parts: list[list[int] | Picture]

    @property
    def pictures(self) -> list[Picture]:
        return [part for part in self.parts if isinstance(part, Picture)]

    def render(self) -> tuple[tuple[int, ...], tuple[MediaItem, ...]]:
        ids: list[int] = []
        items: list[MediaItem] = []
        for part in self.parts:
            if not isinstance(part, Picture):
                ids += part
                continue
            ids.append(VISION_START)
            items.append(MediaItem(part.key, "image", ((len(ids), part.num_rows),), part.num_rows, part.grid))
            ids += [IMAGE_TOKEN] * part.num_rows + [VISION_END]
        return tuple(ids), tuple(items)


def text_of(seed: int, num_tokens: int) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(10, 1000) for i in range(num_tokens)]


def oracle_logprobs(tiny: TinyModel, prompt: Prompt, token_ids: list[int]) -> torch.Tensor:
    """Log-probabilities of the token after each of `token_ids`, [T, vocabulary], by the whole model in one forward."""
    ids = torch.tensor([token_ids])
    inputs: dict[str, Any] = {}
    if prompt.pictures:
        inputs = {
            "pixel_values": torch.cat([picture.inputs["pixel_values"] for picture in prompt.pictures]),
            "image_grid_thw": torch.tensor([picture.grid for picture in prompt.pictures]),
            "mm_token_type_ids": (ids == IMAGE_TOKEN).int(),
        }
    with torch.inference_mode():
        return torch.log_softmax(tiny.whole(input_ids=ids, **inputs).logits[0], dim=-1)


class HandScheduler:
    """Keeps the books for a test, which says which request computes how many tokens; blocks are handed out in random order."""

    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self.runner = runner
        self.free_blocks = list(range(runner.config.num_kv_blocks))
        random.Random(seed).shuffle(self.free_blocks)
        self.free_pages = list(range(runner.config.num_encoder_pages))
        random.Random(seed).shuffle(self.free_pages)
        self.item_pages: dict[str, tuple[int, ...]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.blocks: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self._new: dict[str, NewRequestData] = {}

    def add(self, request_id: str, prompt: Prompt, num_prompt_tokens: int | None = None, **sampling: Any) -> None:
        ids, items = prompt.render()
        settings: dict[str, Any] = {"max_tokens": 64, "temperature": 0.0, "logprobs": 20, **sampling}
        params = SamplingParams(**settings)
        self._new[request_id] = NewRequestData(request_id, ids, items, params, num_prompt_tokens or len(ids), 0, ())
        self.tokens[request_id], self.blocks[request_id], self.computed[request_id] = list(ids), [], 0

    def encode_input(self, picture: Picture) -> EncodeInput:
        return EncodeInput(picture.key, "image", picture.num_rows, picture.grid, self.pages_for(picture), picture.inputs)

    def pages_for(self, picture: Picture) -> tuple[int, ...]:
        num_pages = -(-picture.num_rows // self.runner.config.cache.rows_per_page)
        self.item_pages[picture.key] = tuple(self.free_pages.pop() for _ in range(num_pages))
        return self.item_pages[picture.key]

    def output(self, scheduled: dict[str, int], encode: tuple[Picture, ...] = (), **fields: Any) -> SchedulerOutput:
        new: list[NewRequestData] = []
        cached: list[CachedRequestData] = []
        for request_id, num_tokens in scheduled.items():
            blocks = self.grow(request_id, self.computed[request_id] + num_tokens)
            if request_id in self._new:
                data = self._new.pop(request_id)
                given = (data.request_id, data.token_ids, data.items, data.sampling, data.num_prompt_tokens)
                new.append(NewRequestData(*given, self.computed[request_id], tuple(self.blocks[request_id])))
            else:
                cached.append(CachedRequestData(request_id, self.computed[request_id], blocks))
        encodes = tuple(self.encode_input(picture) for picture in encode)
        others: dict[str, Any] = {"encodes": encodes, "item_pages": self.item_pages, **fields}
        return SchedulerOutput(
            new_requests=tuple(new),
            cached_requests=tuple(cached),
            num_scheduled_tokens=scheduled,
            **others,
        )

    def step(self, scheduled: dict[str, int], encode: tuple[Picture, ...] = (), **fields: Any) -> ModelRunnerOutput:
        output = self.runner.execute_model(self.output(scheduled, encode, **fields))
        for request_id, num_tokens in scheduled.items():
            if request_id not in output.failed_requests and request_id not in output.stalled_requests:
                self.computed[request_id] += num_tokens
        for request_id, token in output.sampled.items():
            self.tokens[request_id].append(token.token_id)
        self.runner.check_invariants()
        return output

    def remaining(self, request_id: str) -> int:
        return len(self.tokens[request_id]) - self.computed[request_id]

    def grow(self, request_id: str, num_tokens: int) -> tuple[int, ...]:
        num_blocks = -(-num_tokens // self.runner.config.cache.block_size) - len(self.blocks[request_id])
        blocks = tuple(self.free_blocks.pop() for _ in range(max(num_blocks, 0)))
        self.blocks[request_id] += blocks
        return blocks


@pytest.fixture
def hand(runner: ModelRunner) -> HandScheduler:
    return HandScheduler(runner)
