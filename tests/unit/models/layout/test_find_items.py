from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.errors import RequestError
from triptych.media.header import MediaHeader
from triptych.models.layout.adapter import ItemLayout, find_items
from triptych.models.layout.registry import get_layout_adapter

IMAGE, AUDIO = 90, 80


def item(num_rows: int, row_token_id: int = IMAGE) -> ItemLayout:
    return ItemLayout("image", text="", num_rows=num_rows, row_token_id=row_token_id)


def test_items_get_their_placeholders_in_order() -> None:
    assert find_items([1, 90, 90, 2, 90, 3], [item(2), item(1)]) == [((1, 2),), ((4, 1),)]


def test_neighbours_without_a_token_between_are_told_apart() -> None:
    assert find_items([90, 90, 90], [item(1), item(2)]) == [((0, 1),), ((1, 2),)]


def test_separators_inside_an_item_split_it_into_runs() -> None:
    assert find_items([90, 90, 7, 90, 90, 7, 90], [item(4), item(1)]) == [((0, 2), (3, 2)), ((6, 1),)]


def test_modalities_are_counted_apart() -> None:
    layouts = [item(1, AUDIO), item(2), item(1, AUDIO)]
    assert find_items([90, 80, 90, 80], layouts) == [((1, 1),), ((0, 1), (2, 1)), ((3, 1),)]


def test_a_prompt_without_items_may_hold_anything() -> None:
    assert find_items([90, 1, 90], []) == []


@pytest.mark.parametrize(("ids", "found"), [([1, 90, 2], 1), ([90, 90, 90, 5], 3), ([1, 2], 0)])
def test_another_number_of_placeholders_than_rows_is_a_request_error(ids: list[int], found: int) -> None:
    with pytest.raises(RequestError, match=f"holds {found} placeholder tokens .* have 2 rows"):
        find_items(ids, [item(2)])


@given(counts=st.lists(st.integers(1, 5), max_size=6), data=st.data())
def test_every_placeholder_belongs_to_one_item_in_order(counts: list[int], data: st.DataObject) -> None:
    total = sum(counts)
    ids = data.draw(st.permutations([IMAGE] * total + [1] * 10)) if counts else [1]
    runs = find_items(ids, [item(count) for count in counts])
    positions = [[p for start, length in each for p in range(start, start + length)] for each in runs]
    assert [len(each) for each in positions] == counts
    assert [p for each in positions for p in each] == [p for p, token in enumerate(ids) if token == IMAGE]
    for each in runs:
        assert all(a + n < b for (a, n), (b, _) in pairwise(each))  # joined as far as can be


def test_a_text_only_model_has_no_placeholders_and_refuses_pictures(llama_folder: Path) -> None:
    adapter = get_layout_adapter(llama_folder)
    assert adapter.placeholders == {}
    with pytest.raises(RequestError, match="takes no image input; it takes text only"):
        adapter.layout(MediaHeader("image", height=5, width=5), 1)
