"""Who owns which KV blocks."""

from triptych.engine.kv_cache_manager import KVCacheManager


def test_a_request_grows_by_whole_blocks_and_only_when_it_needs_one():
    kv = KVCacheManager(4, 4)
    assert kv.allocate("r", 4) == (0,)
    assert kv.allocate("r", 4) == ()
    assert kv.allocate("r", 5) == (1,)
    assert kv.block_ids("r") == (0, 1)
    kv.check_invariants()


def test_a_request_that_does_not_fit_keeps_what_it_has():
    kv = KVCacheManager(3, 4)
    kv.allocate("a", 4)
    kv.allocate("b", 4)
    assert kv.allocate("a", 16) is None
    assert kv.block_ids("a") == (0,)
    assert kv.num_free_blocks == 1
    assert kv.allocate("unknown", 16) is None
    assert kv.block_ids("unknown") == ()


def test_blocks_given_up_are_used_until_they_are_reclaimed():
    kv = KVCacheManager(2, 4)
    kv.allocate("r", 8)
    blocks = kv.give_up("r")
    kv.free("r")
    assert kv.num_free_blocks == 0
    kv.check_invariants()
    kv.reclaim(blocks)
    assert kv.num_free_blocks == 2
    kv.check_invariants()


def test_to_free_a_request_without_blocks_does_nothing():
    kv = KVCacheManager(2, 4)
    kv.free("nobody")
    assert kv.give_up("nobody") == ()
    assert kv.num_free_blocks == 2
