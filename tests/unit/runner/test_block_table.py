import numpy as np
import pytest

from triptych.runner.block_table import BlockTable


def table(num_groups: int = 1) -> BlockTable:
    return BlockTable(num_groups, num_rows=2, blocks_per_row=3, block_size=4)


def test_a_slot_is_the_blocks_id_times_the_block_size_plus_the_offset() -> None:
    blocks = table()
    row = blocks.allocate((7, 2))
    blocks.append(row, (9,))
    slots = blocks.slot_mapping(np.full(12, row), np.arange(12))
    assert slots.tolist() == [[28, 29, 30, 31, 8, 9, 10, 11, 36, 37, 38, 39]]
    assert blocks.num_slots(row) == 12


def test_shorter_rows_are_padded_with_their_own_last_block() -> None:
    blocks = table()
    rows = np.array([blocks.allocate((7, 2, 9)), blocks.allocate((4, 5))])
    assert blocks.block_ids(rows, np.array([9, 4])).tolist() == [[[7, 2, 9], [4, 4, 4]]]


def test_a_freed_row_is_used_again_and_forgets_its_blocks() -> None:
    blocks = table()
    first = blocks.allocate((7, 2))
    blocks.free(first)
    assert blocks.allocate((3,)) == first
    assert blocks.num_slots(first) == 4


@pytest.mark.parametrize("num_groups", [0, 1])
def test_more_rows_and_longer_rows_than_planned_keep_what_was_there(num_groups: int) -> None:
    blocks = table(num_groups)
    rows = [blocks.allocate((index,)) for index in range(5)]
    blocks.append(rows[0], range(10, 20))
    assert len(set(rows)) == 5
    slots = blocks.slot_mapping(np.array(rows), np.zeros(5, np.int64))
    assert slots.tolist() == [[0, 4, 8, 12, 16]] * num_groups
    assert blocks.num_slots(rows[0]) == 44


def test_a_table_of_zero_groups_accepts_everything_and_holds_nothing() -> None:
    blocks = table(num_groups=0)
    row = blocks.allocate((7, 2))
    blocks.append(row, (9,))
    rows = np.array([row])
    assert blocks.block_ids(rows, np.array([9])).shape == (0, 1, 3)
    assert blocks.slot_mapping(rows, np.array([8])).shape == (0, 1)
    blocks.free(row)
    assert blocks.num_free_rows == 2
