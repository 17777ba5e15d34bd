from typing import Any

import numpy as np
import pytest

from triptych.media.item import MediaItem
from triptych.output import NewRequestData
from triptych.runner.request_state import NO_ITEM, RequestState
from triptych.sampling_params import SamplingParams

TWO_RUNS = MediaItem("a" * 64, "image", ((2, 2), (6, 1)), 3)
LATER = MediaItem("b" * 64, "image", ((7, 2),), 2)


def state(items: tuple[MediaItem, ...] = (), positions: Any = None, delta: float = 0, num_tokens: int = 10) -> RequestState:
    data = NewRequestData("r", tuple(range(100, 100 + num_tokens)), items, SamplingParams(max_tokens=500), 10, 0, ())
    return RequestState(data, np.zeros((1, 10), np.int64) if positions is None else positions, delta, 0)


def positions_of(request: RequestState, axes: int, start: int, end: int, dtype: Any = np.int64) -> list[list[float]]:
    out = np.empty((axes, end - start), dtype)
    request.fill_positions(out, start, end)
    return out.tolist()


def test_positions_after_the_prompt_go_on_by_the_delta_on_every_axis() -> None:
    request = state(positions=np.stack([np.arange(10), np.arange(10) * 2]), delta=-3, num_tokens=14)
    assert positions_of(request, 2, 8, 13) == [[8, 9, 7, 8, 9], [16, 18, 7, 8, 9]]
    assert positions_of(request, 2, 12, 13) == [[9], [9]]


def test_fractional_positions_stay_fractional() -> None:
    request = state(positions=np.full((1, 10), 0.5, np.float32), delta=0.25, num_tokens=12)
    assert positions_of(request, 1, 9, 12, np.float32) == [[0.5, 10.25, 11.25]]


def test_each_placeholder_knows_its_item_and_separators_have_none() -> None:
    request = state((LATER, TWO_RUNS))
    assert request.items == (TWO_RUNS, LATER)
    assert request.item_indices(0, 10).tolist() == [NO_ITEM, NO_ITEM, 0, 0, NO_ITEM, NO_ITEM, 0, 1, 1, NO_ITEM]


def test_a_window_reads_the_items_whose_placeholders_it_holds() -> None:
    request = state((TWO_RUNS, LATER))
    assert request.items_within(0, 2) == []
    assert request.items_within(4, 6) == []  # between the runs
    assert request.items_within(6, 8) == [TWO_RUNS, LATER]


def test_hundreds_of_tokens_can_be_appended() -> None:
    request = state()
    for token_id in range(300):
        request.append_token(token_id)
    assert request.num_generated_tokens == 300
    assert request.token_ids(8, 13).tolist() == [108, 109, 0, 1, 2]
    assert request.token_ids(309, 310).tolist() == [299]


@pytest.mark.parametrize(("runs", "num_rows"), [(((2, 2),), 3), (((9, 2),), 2), (((-1, 2),), 2), (((6, 1), (6, 1)), 2)], ids=str)
def test_an_item_that_does_not_fit_the_prompt_is_refused(runs: tuple[tuple[int, int], ...], num_rows: int) -> None:
    with pytest.raises(ValueError, match="item"):
        state((MediaItem("c" * 64, "image", runs, num_rows),))
