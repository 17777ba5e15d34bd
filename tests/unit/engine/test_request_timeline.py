"""Where a request's time went: each second is counted once, and for what it was spent."""

import pytest

from triptych.engine.block_hashes import NoBlockHashes
from triptych.engine.events import StageTimings
from triptych.engine.request import Request, RequestStatus, Timeline
from triptych.media.item import MediaItem
from triptych.sampling_params import SamplingParams


def assert_timings(timings: StageTimings, **wanted: float) -> None:
    given = {name: getattr(timings, name) for name in StageTimings.__struct_fields__}
    assert given == pytest.approx(dict.fromkeys(given, 0.0) | wanted)


def test_a_text_request_waits_prefills_and_decodes():
    timeline = Timeline(arrived_at=10.0)
    timeline.start(12.0)
    timeline.start(13.0)
    timeline.sample(15.0)
    timeline.sample(19.0)
    assert_timings(timeline.timings(), prefill_queue_s=2.0, prefill_s=3.0, decode_s=4.0)


def test_waits_for_items_before_and_after_the_first_window_are_ec_waits_and_nothing_else():
    timeline = Timeline(arrived_at=10.0)
    timeline.block(11.0)
    timeline.block(12.0)  # still the same wait
    timeline.start(14.0)
    timeline.block(15.0)
    timeline.start(20.0)
    timeline.sample(21.0)
    assert_timings(timeline.timings(), ec_wait_s=8.0, prefill_queue_s=1.0, prefill_s=2.0, prefill_before_wait_s=1.0)


def test_a_request_that_came_with_kv_has_no_prefill():
    timeline = Timeline(arrived_at=10.0)
    timeline.kv_resident_at = 13.0
    timeline.start(14.0)
    timeline.sample(16.0)
    timeline.sample(20.0)
    assert_timings(timeline.timings(), kv_transfer_s=3.0, decode_queue_s=1.0, decode_s=6.0)


def test_a_request_that_never_started_spent_no_time():
    assert_timings(Timeline(arrived_at=10.0).timings())


def make_request(items: tuple[MediaItem, ...] = ()) -> Request:
    return Request(
        request_id="r",
        token_ids=list(range(30)),
        num_prompt_tokens=28,
        sampling=SamplingParams(max_tokens=9),
        items=items,
        rank=(0, 3),
        timeline=Timeline(0.0),
        hands_over=False,
        block_hashes=NoBlockHashes(16),
        incoming=None,
    )


def test_a_finished_request_never_changes_again():
    request = make_request()
    request.change_status(RequestStatus.RUNNING)
    request.change_status(RequestStatus.FINISHED)
    for status in RequestStatus:
        with pytest.raises(AssertionError):
            request.change_status(status)


def test_an_item_is_needed_until_its_last_row_and_gaps_hold_none():
    item = MediaItem("k", "image", ((2, 3), (10, 2)), 5)
    request = make_request((item,))
    next_rows = {0: 2, 2: 2, 4: 4, 5: 10, 9: 10, 11: 11}
    for computed, row in next_rows.items():
        request.num_computed_tokens = computed
        assert request.next_row_of(item) == row
    request.num_computed_tokens = 12
    assert request.pending_items() == []


def test_a_picture_that_comes_twice_is_needed_where_it_comes_next():
    first, other, second = (MediaItem(key, "image", ((start, 4),), 4) for key, start in (("k", 2), ("o", 8), ("k", 14)))
    request = make_request((first, other, second))
    assert request.needed_items() == {"k": first, "o": other}
    request.num_computed_tokens = 6
    assert request.needed_items() == {"k": second, "o": other}
    assert request.num_generated_tokens == 2
