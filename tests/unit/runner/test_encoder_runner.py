"""A bad item fails only itself, an item is encoded once, and what the tower gives is checked before it is kept."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from triptych.config import EngineConfig
from triptych.errors import InternalError, MediaError
from triptych.output import EncodeInput
from triptych.runner.encoder_cache import EncoderCache, RowWindow
from triptych.runner.encoder_runner import EncoderRunner, NoEncoderRunner
from triptych.transfer.arena import Arena

WIDTH = 64


class FakeTower:
    """Rows are the item's number. A number in `bad` goes wrong as the name there says; counts what it was asked."""

    def __init__(self) -> None:
        self.bad: dict[int, str] = {}
        self.batches: list[tuple[str, list[int]]] = []

    def collate(self, items: Sequence[int]) -> list[int]:
        self._raise("collate", items, ValueError("sizes differ."))
        return list(items)

    def encode(self, model: object, modality: str, inputs: list[int], rows: list[int]) -> list[torch.Tensor]:
        self.batches.append((modality, inputs))
        self._raise("refused", inputs, MediaError("unlucky."))
        self._raise("memory", inputs, RuntimeError("CUDA out of memory. Tried to allocate 2 GiB."))
        self._raise("sum", inputs, InternalError("the tower gave 21 rows where 20 were promised (5 items)."))
        own = [self._rows(number, count) for number, count in zip(inputs, rows, strict=True)]
        return own[1:] if any(self.bad.get(number) == "lost" for number in inputs) else own

    def _rows(self, number: int, count: int) -> torch.Tensor:
        kind = self.bad.get(number, "")
        rows = torch.full((count + {"more": 1, "fewer": -1}.get(kind, 0), WIDTH - (kind == "narrow")), float(number))
        if kind in ("nan", "inf"):
            rows[-1, -1] = float(kind)
        return rows

    def _raise(self, kind: str, numbers: Sequence[int], error: Exception) -> None:
        if any(self.bad.get(number) == kind for number in numbers):
            raise error


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


@pytest.mark.parametrize("bad", range(1, 6))
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("collate", "ValueError: sizes differ"),
        ("refused", "unlucky"),
        ("memory", "RuntimeError: CUDA out of memory"),
        ("sum", "gave 21 rows where 20"),
        ("lost", "rows of 0 items for 1"),
        ("nan", "NaN or infinity"),
        ("inf", "NaN or infinity"),
        ("more", "gave 5 rows where 4"),
        ("fewer", "gave 3 rows where 4"),
        ("narrow", r"are (4, 63); they should be 64 wide"),
    ],
)
def test_a_bad_item_among_five_fails_alone(
    runner: EncoderRunner, tower: FakeTower, cache: EncoderCache, kind: str, why: str, bad: int
) -> None:
    tower.bad[bad] = kind
    failed = runner.run([encode(number) for number in range(1, 6)])
    assert list(failed) == [f"k{bad}"]
    assert why in failed[f"k{bad}"]
    for number in range(1, 6):
        assert (f"k{number}" in cache) == (number != bad)
        if number != bad:
            assert cache.gather([RowWindow((number,), 0, 4)]).unique().tolist() == [number]
    cache.check_invariants()


def test_a_batch_that_fails_only_as_a_batch_is_encoded_item_by_item(
    runner: EncoderRunner, tower: FakeTower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the memory suffices for one and not for all."""
    whole = tower.encode

    def encode_few(model: object, modality: str, inputs: list[int], rows: list[int]) -> list[torch.Tensor]:
        if len(inputs) > 1:
            raise RuntimeError("CUDA out of memory.")
        return whole(model, modality, inputs, rows)

    monkeypatch.setattr(tower, "encode", encode_few)
    assert runner.run([encode(number) for number in range(1, 6)]) == {}
    assert [numbers for _, numbers in tower.batches] == [[5], [4], [3], [2], [1]]


def test_an_item_that_is_resident_or_named_twice_is_encoded_once(runner: EncoderRunner, tower: FakeTower) -> None:
    runner.run([encode(1), encode(1)])
    runner.run([encode(1), encode(2)])
    assert tower.batches == [("image", [1]), ("image", [2])]


def test_a_failed_item_can_be_encoded_again_into_the_same_page(
    runner: EncoderRunner, tower: FakeTower, cache: EncoderCache
) -> None:
    tower.bad[2] = "nan"
    runner.run([encode(2, page=5)])
    assert runner.run([encode(1, page=5)]) == {}
    assert "k1" in cache


def test_without_a_tower_every_encode_fails_with_a_sentence() -> None:
    failed = NoEncoderRunner().run([encode(1), encode(2)])
    assert set(failed) == {"k1", "k2"}
    assert "no tower" in failed["k1"]
