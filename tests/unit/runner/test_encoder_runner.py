"""A bad item fails only itself, an item is encoded once, and what the tower gives is checked before it is kept."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from triptych.config import EngineConfig
from triptych.errors import MediaError
from triptych.output import EncodeInput
from triptych.runner.encoder_cache import EncoderCache, RowWindow
from triptych.runner.encoder_runner import EncoderRunner, NoEncoderRunner
from triptych.transfer.arena import Arena

WIDTH = 64


class FakeTower:
    """Rows are the item's number; 13 raises, 14 is NaN, 15 gives a row too many, 16 one too few, 17 wider ones. Counts what it was asked."""

    def __init__(self) -> None:
        self.batches: list[tuple[str, list[int]]] = []

    def collate(self, items: Sequence[int]) -> list[int]:
        return list(items)

    def encode(self, model: object, modality: str, inputs: list[int], rows: list[int]) -> list[torch.Tensor]:
        self.batches.append((modality, inputs))
        if 13 in inputs:
            raise MediaError("unlucky.")
        numbers = [float("nan") if number == 14 else float(number) for number in inputs]
        shapes = [
            (count + {15: 1, 16: -1}.get(number, 0), WIDTH + (number == 17)) for number, count in zip(inputs, rows, strict=True)
        ]
        return [torch.full(shape, number) for number, shape in zip(numbers, shapes, strict=True)]


@pytest.fixture
def tower() -> FakeTower:
    return FakeTower()


@pytest.fixture
def cache(engine_config: Callable[..., EngineConfig]) -> EncoderCache:
    config = engine_config()
    return EncoderCache(Arena.create("ec", 64, config.encoder_page_nbytes), config, torch.device("cpu"))


@pytest.fixture
def runner(tower: FakeTower, cache: EncoderCache) -> EncoderRunner:
    loaded: Any = SimpleNamespace(model=None, adapter=tower)
    return EncoderRunner(loaded, cache)


def encode(number: int, modality: str = "image", page: int | None = None) -> EncodeInput:
    return EncodeInput(f"k{number}", modality, 4, (), (number if page is None else page,), number)


def test_items_of_one_modality_run_in_one_batch(runner: EncoderRunner, tower: FakeTower, cache: EncoderCache) -> None:
    assert runner.run([encode(1), encode(2, "audio"), encode(3)]) == {}
    assert sorted((modality, sorted(numbers)) for modality, numbers in tower.batches) == [("audio", [2]), ("image", [1, 3])]
    assert cache.gather([RowWindow((3,), 0, 4), RowWindow((1,), 0, 1)])[:, 0].tolist() == [3, 3, 3, 3, 1]


@pytest.mark.parametrize(
    ("bad", "why"), [(13, "unlucky"), (14, "NaN or infinity"), (15, "(5, 64)"), (16, "(3, 64)"), (17, "(4, 65)")]
)
def test_a_bad_item_in_a_batch_fails_alone(runner: EncoderRunner, cache: EncoderCache, bad: int, why: str) -> None:
    failed = runner.run([encode(1), encode(bad), encode(2)])
    assert list(failed) == [f"k{bad}"]
    assert why in failed[f"k{bad}"]
    assert "k1" in cache and "k2" in cache and f"k{bad}" not in cache
    cache.check_invariants()


def test_an_item_that_is_resident_or_named_twice_is_encoded_once(runner: EncoderRunner, tower: FakeTower) -> None:
    runner.run([encode(1), encode(1)])
    runner.run([encode(1), encode(2)])
    assert tower.batches == [("image", [1]), ("image", [2])]


def test_a_failed_item_can_be_encoded_again_into_the_same_page(runner: EncoderRunner, cache: EncoderCache) -> None:
    runner.run([encode(14, page=5)])
    assert runner.run([encode(1, page=5)]) == {}
    assert "k1" in cache


def test_without_a_tower_every_encode_fails_with_a_sentence() -> None:
    failed = NoEncoderRunner().run([encode(1), encode(2)])
    assert set(failed) == {"k1", "k2"}
    assert "no tower" in failed["k1"]
