"""Where the time went: examples worked by hand, in seconds in and milliseconds out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.engine.events import StageTimings
from triptych.router.timing import EncodeTimes, Stay, Stopwatch, Timing, break_down

ENCODE = StageTimings(preprocess_s=0.010, encode_queue_s=0.005, encode_s=0.030)  # 45 ms


def test_a_wait_longer_than_the_encode_leaves_the_rest_to_transfer() -> None:
    prefill = StageTimings(ec_wait_s=0.050, prefill_queue_s=0.002, prefill_s=0.020)
    decode = StageTimings(kv_transfer_s=0.003, decode_queue_s=0.001, decode_s=0.040)
    timing = break_down(0.125, [(prefill, EncodeTimes(ENCODE)), (decode, EncodeTimes())])
    assert timing == Timing(
        preprocess=10, encode_queue=5, encode=30, ec_transfer=5, prefill_queue=2, prefill=20, kv_transfer=3, decode=41, router=9
    )


def test_an_encode_that_began_beside_prefill_counts_only_from_where_prefill_waited() -> None:
    # 45 ms of encode, of which prefill waited for the last 32: the first 13 (10 preprocess, 3 queue) cost nothing
    prefill = StageTimings(ec_wait_s=0.032, prefill_s=0.030)
    timing = break_down(0.070, [(prefill, EncodeTimes(ENCODE))])
    assert (timing.preprocess, timing.encode_queue, timing.encode, timing.ec_transfer) == (0, 2, 30, 0)
    assert timing.router == 8


def test_an_item_that_was_there_already_costs_nothing() -> None:
    timing = break_down(0.030, [(StageTimings(prefill_s=0.030), EncodeTimes(ENCODE))])
    assert timing == Timing(prefill=30)


def test_a_tower_that_ran_in_the_step_that_prefilled_gets_its_share_of_it() -> None:
    # one engine thread: waited 15 ms for pixels, then a step of 50 ms, of which the tower took 30
    prefill = StageTimings(ec_wait_s=0.015, prefill_s=0.050)
    timing = break_down(0.065, [(prefill, EncodeTimes(ENCODE, is_local=True))])
    assert timing == Timing(preprocess=10, encode_queue=5, encode=30, prefill=20)


def test_stays_at_several_workers_add_up() -> None:
    stays = [(StageTimings(prefill_s=0.010, decode_s=0.020), EncodeTimes())] * 2
    assert break_down(0.1, stays) == Timing(prefill=20, decode=40, router=40)


def test_parts_beyond_the_total_are_cut_from_the_end() -> None:
    timing = break_down(0.050, [(StageTimings(prefill_s=0.040, decode_s=0.040), EncodeTimes())])
    assert timing == Timing(prefill=40, decode=10, router=0)


def test_counts_stand_beside_the_milliseconds() -> None:
    stopwatch = Stopwatch(lambda: 0.0)
    assert {"encode_retries": 0, "replays": 0}.items() <= stopwatch.timing().to_dict().items()
    stopwatch.num_encode_retries, stopwatch.num_replays = 2, 1
    assert stopwatch.timing() == Timing(encode_retries=2, replays=1)


def test_a_fork_has_the_same_arrival_and_stays_of_its_own() -> None:
    instants = iter((1.0, 3.0, 5.0, 6.0))  # arrival, the fork is made, the questions
    stopwatch = Stopwatch(lambda: next(instants))
    fork = stopwatch.fork()
    fork.num_replays = 1
    assert fork.timing() == Timing(router=4000.0, replays=1)
    assert stopwatch.timing() == Timing(router=5000.0)


seconds = st.floats(0, 100, allow_nan=False)


@given(seconds, st.lists(st.tuples(*[seconds] * 9, st.booleans()), max_size=3))
def test_the_parts_always_sum_to_the_total_and_none_is_negative(total_s: float, stays: list[tuple[float, ...]]) -> None:
    given_stays = [
        (
            StageTimings(
                ec_wait_s=stay[0], prefill_queue_s=stay[1], prefill_s=stay[2], kv_transfer_s=stay[3], decode_queue_s=stay[4], decode_s=stay[5]
            ),
            EncodeTimes(StageTimings(preprocess_s=stay[6], encode_queue_s=stay[7], encode_s=stay[8]), is_local=bool(stay[9])),
        )
        for stay in stays
    ]  # fmt: skip
    parts = break_down(total_s, given_stays).to_dict()
    assert sum(parts.values()) == pytest.approx(total_s * 1000, abs=0.01)
    assert min(parts.values()) >= 0


def test_without_a_report_the_routers_own_view_stands_in() -> None:
    # sent at 1, encode of 45 ms answered, first token at 1.2, ended by a stop string at 1.5
    stay = Stay(is_prefill=True, started_at=1.0, first_token_at=1.2, encodes=[EncodeTimes(ENCODE)])
    timings = stay.timings(now=1.5)
    assert timings.ec_wait_s == pytest.approx(0.045)
    assert timings.prefill_s == pytest.approx(0.155)
    assert timings.decode_s == pytest.approx(0.3)


def test_the_item_that_came_last_is_the_critical_one() -> None:
    instants = iter((0.0, 0.0, 1.0))  # arrival, begin, the question
    stopwatch = Stopwatch(lambda: next(instants))
    stay = stopwatch.begin(is_prefill=True)
    stopwatch.add_encode(EncodeTimes(StageTimings(encode_s=9.0)))
    stopwatch.add_encode(EncodeTimes(StageTimings(encode_s=1.0)))
    stay.reported = StageTimings(ec_wait_s=1.0)
    assert stopwatch.timing() == Timing(encode=1000.0)


def test_an_encode_that_prefill_waited_for_counts_whole_and_the_prompt_before_it_ran_beside() -> None:
    # 0-45 encode, 45-50 transfer; prefill computed 0-30, waited 30-50, computed 50-70
    prefill = StageTimings(ec_wait_s=0.020, prefill_before_wait_s=0.030, prefill_s=0.050)
    parts = break_down(0.070, [(prefill, EncodeTimes(ENCODE, transfer_s=0.005))]).to_dict()
    assert (parts["preprocess"], parts["encode_queue"], parts["encode"]) == (10.0, 5.0, 30.0)
    assert (parts["ec_transfer"], parts["prefill"], parts["router"]) == (5.0, 20.0, 0.0)


def test_an_encode_that_prefill_never_waited_for_counts_nothing() -> None:
    prefill = StageTimings(prefill_before_wait_s=0.0, prefill_s=0.070)
    parts = break_down(0.070, [(prefill, EncodeTimes(ENCODE, transfer_s=0.005))]).to_dict()
    assert parts["prefill"] == 70.0
    assert parts["encode"] == parts["ec_transfer"] == 0.0


def test_a_wait_is_filled_from_its_end_with_transfer_then_with_the_encode() -> None:
    # the encode of 45 ms began 15 ms before prefill ran out of work; then 8 ms on the way and 2 ms for the copy
    prefill = StageTimings(ec_wait_s=0.040, ec_load_s=0.002, prefill_s=0.020)
    parts = break_down(0.060, [(prefill, EncodeTimes(ENCODE, transfer_s=0.008))]).to_dict()
    assert parts["ec_transfer"] == pytest.approx(10.0)
    assert parts["preprocess"] + parts["encode_queue"] + parts["encode"] == pytest.approx(30.0)
    assert parts["encode"] == pytest.approx(ENCODE.encode_s * 1000)
    assert parts["router"] == pytest.approx(0.0)
