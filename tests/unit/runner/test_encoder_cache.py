from collections.abc import Callable

import pytest
import torch

from triptych.config import EngineConfig
from triptych.errors import InternalError
from triptych.runner.encoder_cache import EncoderCache, RowWindow, are_finite
from triptych.transfer.arena import Arena

WIDTH = 64


@pytest.fixture
def cache(engine_config: Callable[..., EngineConfig]) -> EncoderCache:
    config = engine_config()
    arena = Arena.create("ec", config.num_encoder_pages, config.encoder_page_nbytes)
    return EncoderCache(arena, config, torch.device("cpu"))


def rows_of(first: int, count: int) -> torch.Tensor:
    return (torch.arange(first, first + count).unsqueeze(1) * 1.0).expand(-1, WIDTH).contiguous()


def test_rows_lie_in_the_arenas_pages_page_by_page(cache: EncoderCache) -> None:
    cache.write("a", (9, 2), rows_of(10, 6))
    stored = torch.from_numpy(cache.arena.pages).view(torch.float32)
    assert stored[9].view(4, WIDTH)[:, 0].tolist() == [10, 11, 12, 13]
    assert stored[2].view(4, WIDTH)[:2, 0].tolist() == [14, 15]


def test_windows_of_several_items_are_gathered_in_the_order_asked(cache: EncoderCache) -> None:
    cache.write("a", (9, 2), rows_of(10, 6))
    cache.write("b", (5,), rows_of(50, 3))
    gathered = cache.gather([RowWindow((5,), 1, 3), RowWindow((9, 2), 3, 6), RowWindow((9, 2), 0, 1)])
    assert gathered[:, 0].tolist() == [51, 52, 13, 14, 15, 10]


def test_a_recycled_page_takes_its_item_away_and_moves_its_generation(cache: EncoderCache) -> None:
    cache.write("a", (9, 2), rows_of(0, 6))
    before = cache.arena.generations_of((9, 2, 3))
    cache.recycle((2,))
    assert "a" not in cache
    assert cache.arena.generations_of((9, 2, 3)) == (before[0], before[1] + 1, before[2])
    cache.check_invariants()
    cache.recycle((9,))
    cache.write("b", (9,), rows_of(0, 1))
    cache.check_invariants()


def test_a_page_that_holds_an_item_is_not_written_over(cache: EncoderCache) -> None:
    cache.write("a", (9, 2), rows_of(0, 6))
    with pytest.raises(InternalError, match="page 2 for item b still holds item a"):
        cache.write("b", (2,), rows_of(7, 1))
    assert cache.gather([RowWindow((9, 2), 4, 6)])[:, 0].tolist() == [4, 5]


def test_an_item_is_written_once(cache: EncoderCache) -> None:
    cache.write("a", (9,), rows_of(0, 4))
    with pytest.raises(InternalError, match="resident already"):
        cache.write("a", (3,), rows_of(0, 4))


@pytest.mark.parametrize("pages", [(1,), (1, 2, 3), (1, 64), (1, -1)])
def test_pages_that_do_not_fit_the_rows_or_the_arena_are_refused(cache: EncoderCache, pages: tuple[int, ...]) -> None:
    with pytest.raises(InternalError, match="do not fit pages"):
        cache.write("a", pages, rows_of(0, 6))


def test_reset_forgets_every_item(cache: EncoderCache) -> None:
    cache.write("a", (9, 2), rows_of(0, 6))
    cache.reset()
    assert "a" not in cache
    cache.write("b", (2, 9), rows_of(0, 6))


@pytest.mark.parametrize(("bad", "expected"), [(0.0, True), (float("nan"), False), (float("inf"), False), (float("-inf"), False)])
def test_rows_are_finite_only_without_nan_and_infinity(bad: float, expected: bool) -> None:
    rows = rows_of(-3, 6)
    rows[4, 17] = bad
    assert are_finite(rows) is expected
    assert are_finite(rows[:0])


@pytest.mark.parametrize("shape", [(4, WIDTH - 1), (4, WIDTH + 1), (4, 2, WIDTH), (WIDTH,), (4, 3 * WIDTH)])
def test_rows_of_another_width_are_refused_and_nothing_is_written(cache: EncoderCache, shape: tuple[int, ...]) -> None:
    """Also those of a model with feature levels (deepstack), where the width is a multiple of the hidden size."""
    with pytest.raises(InternalError, match="they should be 64 wide"):
        cache.write("a", (1,), torch.ones(shape))
    assert "a" not in cache
    assert not cache.rows.any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e300])
def test_rows_that_are_not_finite_as_they_are_kept_are_refused(cache: EncoderCache, bad: float) -> None:
    """1e300 is a number in float64 and infinity in float32."""
    rows = rows_of(0, 4).double()
    rows[3, 63] = bad
    with pytest.raises(InternalError, match="NaN or infinity"):
        cache.write("a", (1,), rows)
    assert not cache.rows.any()
