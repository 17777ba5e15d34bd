"""Free blocks: all or none, and none twice."""

import pytest

from triptych.engine.block_pool import BlockPool


def test_blocks_come_all_or_not_at_all():
    pool = BlockPool(3)
    assert pool.allocate(2) == (0, 1)
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    assert pool.allocate(0) == ()


def test_the_block_that_was_free_longest_is_used_next():
    pool = BlockPool(3)
    pool.allocate(2)
    pool.free((1,))
    assert pool.allocate(2) == (2, 1)


def test_a_block_cannot_be_freed_twice():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.free(blocks)
    with pytest.raises(KeyError):
        pool.free(blocks)
    pool.check_invariants()


def test_an_encoder_only_worker_has_no_block_to_give():
    pool = BlockPool(0)
    assert pool.num_free == 0
    assert pool.allocate(1) is None
