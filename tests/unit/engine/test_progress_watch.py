"""Passes that lead nowhere are noticed, by the rule that they break; those that lead somewhere never are."""

from engine_rig import assert_nothing_is_held, make_engine, wanted

from triptych.engine.events import Failed
from triptych.engine.progress_watch import MAX_EMPTY_PASSES, ProgressWatch
from triptych.engine.scheduler import Scheduler
from triptych.output import SchedulerOutput


def observe(
    watch: ProgressWatch, num_advanced: int = 0, num_computed: int = 0, *, has_requests: bool = True, has_moved: bool = True,
    may_sleep: bool = True,
) -> str:  # fmt: skip
    return watch.observe(num_advanced, num_computed, has_requests=has_requests, has_moved=has_moved, may_sleep=may_sleep)


def test_an_engine_that_would_sleep_for_ever_with_requests_is_stuck():
    watch = ProgressWatch(100)
    assert observe(watch, has_moved=False, may_sleep=True) == ""
    assert observe(watch, has_moved=False, may_sleep=False, has_requests=False) == ""
    assert "nothing is under way" in observe(watch, has_moved=False, may_sleep=False)


def test_tokens_computed_again_are_no_progress_beyond_twice_what_the_cache_holds():
    watch = ProgressWatch(100)
    assert [observe(watch, num_computed=50) for _ in range(4)] == [""] * 4
    assert "250 tokens were computed again" in observe(watch, num_computed=50)
    assert [observe(watch, num_computed=50) for _ in range(4)] == [""] * 4, "the next error is for the next time"


def test_a_token_more_than_ever_begins_the_count_anew():
    watch = ProgressWatch(100)
    assert [observe(watch, num_advanced=step // 4, num_computed=50) for step in range(100)] == [""] * 100


def test_passes_that_move_things_for_nobody_have_a_bound():
    watch = ProgressWatch(100)
    assert {observe(watch) for _ in range(MAX_EMPTY_PASSES)} == {""}
    assert f"{MAX_EMPTY_PASSES + 1} passes" in observe(watch)


class Forgetful(Scheduler):
    """Has a bug: it overlooks one request."""

    def schedule(self) -> SchedulerOutput:
        hidden = [each for each in self._waiting if each.request_id == "overlooked"]
        self._waiting = [each for each in self._waiting if each.request_id != "overlooked"]
        output = super().schedule()
        self._waiting = hidden + self._waiting
        return output


def test_a_request_that_a_bug_overlooks_ends_with_an_error_and_the_others_go_on():
    engine = make_engine(is_alone=True)
    engine.core.scheduler.__class__ = Forgetful
    engine.add("overlooked", list(range(1, 9)))
    engine.add("other", list(range(2, 9)))
    engine.run()
    end = engine.ends["overlooked"]
    assert isinstance(end, Failed)
    assert (end.type, end.status) == ("no_progress", 500)
    assert engine.tokens["other"] == wanted(list(range(2, 9)))
    engine.add("later", list(range(3, 9)))
    engine.run()
    assert engine.tokens["later"] == wanted(list(range(3, 9)))
    assert_nothing_is_held(engine)
