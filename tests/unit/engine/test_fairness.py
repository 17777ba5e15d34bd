"""How long a request may wait at most, in steps, under adversaries that never stop. Each bound is worked out by hand.

The large request: 120 tokens of prompt with three pictures of 8 rows, answered with 4 tokens. Steps have 16 tokens, and 4 requests run at once.
Its own work is ceil(120 / 16) = 8 steps of prompt, of which the last samples, and 3 of decode.
"""

import pytest
from engine_rig import Engine, assert_nothing_is_held, item_of, make_engine, wanted

from triptych.engine.arithmetic_runner import ArithmeticRunner
from triptych.engine.events import ECNeeded, Finished
from triptych.output import ModelRunnerOutput, SchedulerOutput

CHUNK, PLACES = 16, 4
LARGE = [(7 * place) % 900 for place in range(120)]
PICTURES = tuple(item_of(name, start, 8) for name, start in (("cat", 10), ("dog", 50), ("cow", 90)))
ANSWER = 4
AGING_S = 60.0  # the default of priority_aging_s


def crowded(num_kv_blocks: int = 64) -> Engine:
    """Blocks of 4 tokens."""
    return make_engine(is_alone=True, chunk=CHUNK, max_num_seqs=PLACES, num_kv_blocks=num_kv_blocks, prefix_caching=False)


class Stream:
    """Small requests of one kind that never end: whenever fewer than `depth` are in the engine, there are new ones."""

    def __init__(self, engine: Engine, depth: int, num_tokens: int, num_answered: int, priority: int = 0) -> None:
        self._engine = engine
        self._depth = depth
        self._num_tokens = num_tokens
        self._num_answered = num_answered
        self._priority = priority
        self._live: set[str] = set()
        self.num_sent = 0

    def fill(self) -> None:
        self._live -= self._engine.ends.keys()
        while len(self._live) < self._depth:
            name = f"small{self.num_sent}"
            self._live.add(name)
            tokens = [(13 * self.num_sent + place) % 900 for place in range(self._num_tokens)]
            self._engine.add(name, tokens, n=self._num_answered, priority=self._priority)
            self.num_sent += 1


def step(engine: Engine, seconds: float = 0.0) -> None:
    """Pictures that are asked for are encoded at once."""
    for key in engine.preparations:
        engine.core.scheduler.prepared(key, None, 0.0)
    engine.preparations.clear()
    engine.clock.now += seconds
    seen = len(engine.events)
    engine.step()
    for event in engine.events[seen:]:
        if isinstance(event, ECNeeded):
            item = next(each for each in PICTURES if each.key == event.key)
            engine.encode(f"e{len(engine.events)}-{item.start}", item)


def steps_until(engine: Engine, name: str, stream: Stream, limit: int, seconds: float = 0.0) -> int:
    for number in range(1, limit + 1):
        stream.fill()
        step(engine, seconds)
        if name in engine.ends:
            return number
    raise AssertionError(f"{name} has not ended after {limit} steps")


def add_large(engine: Engine, priority: int = 0) -> None:
    engine.add("large", LARGE, PICTURES, n=ANSWER, priority=priority)


def assert_it_was_right(engine: Engine) -> None:
    assert isinstance(engine.ends["large"], Finished)
    assert engine.tokens["large"] == wanted(LARGE, PICTURES, ANSWER)


def test_an_endless_stream_of_small_requests_of_the_same_priority_delays_a_large_one_by_those_before_it_only():
    """8 small ones are before it, in two rounds of 4. A small one takes 1 step of prompt and 3 of decode: places are free from step 9 on. As
    the first of the prompts the large one then gets all 16 tokens of each step: steps 9 to 16, and decodes in 17 to 19."""
    engine = crowded()
    stream = Stream(engine, depth=8, num_tokens=3, num_answered=4)
    stream.fill()
    add_large(engine)
    assert steps_until(engine, "large", stream, limit=100) == 8 + 8 + 3
    assert_it_was_right(engine)


def test_requests_that_decode_take_at_most_a_token_each_from_a_large_prompt():
    """Three that decode all the time are before it: 13 tokens a step are left, so ceil(120 / 13) = 10 steps of prompt, and 3 of decode. The
    pictures are asked for in step 1, prepared, and encoded together in step 2; until then the 10 tokens before the first are what can be
    computed."""
    engine = crowded()
    for number in range(3):
        engine.add(f"decodes{number}", [number + 1], n=60)
    step(engine)
    add_large(engine)
    stream = Stream(engine, depth=3, num_tokens=3, num_answered=4)
    assert steps_until(engine, "large", stream, limit=100) <= 1 + 10 + 3
    assert all(len(engine.tokens[f"decodes{number}"]) >= 1 + 13 for number in range(3))
    assert_it_was_right(engine)


@pytest.mark.parametrize("levels", [1, 2])
def test_a_stream_of_better_priority_passes_for_as_long_as_the_levels_are_worth_and_no_longer(levels: int):
    """A step is a second (and 1 ms). Who comes up to 60 s later per level passes: before steps 1 to 60 (120). Rounds of 4 small ones start in
    steps 1, 5, 9 ... 57 (117); those that come before step 61 (121) are behind, and the large one runs: 8 steps of prompt and 3 of decode, the
    last in step 71 (131)."""
    engine = crowded()
    stream = Stream(engine, depth=PLACES, num_tokens=3, num_answered=4, priority=-levels)
    stream.fill()
    add_large(engine)
    assert steps_until(engine, "large", stream, limit=300, seconds=1.0) == levels * AGING_S + 8 + 3
    assert_it_was_right(engine)


def test_requests_before_it_that_hold_blocks_delay_a_large_one_until_they_end_and_those_behind_it_never():
    """32 blocks; the large one needs 31. Three small ones before it decode for 20 steps, and take its blocks when theirs run out. From step 21
    on it is the first in line, whom nobody preempts, and takes from those behind it: at worst all from the start, 10 steps beside three that
    decode, and 3."""
    engine = crowded(num_kv_blocks=32)
    stream = Stream(engine, depth=3, num_tokens=3, num_answered=20)
    stream.fill()
    add_large(engine)
    assert steps_until(engine, "large", stream, limit=200) <= 20 + 10 + 3
    assert engine.core.scheduler.num_preempted > 0
    assert_it_was_right(engine)


def test_the_last_by_rank_is_preempted_first_then_the_next_to_last():
    """`c` comes last, with a better priority: the order is c, a, b. Each has 2 blocks of prompt, and needs the 3rd in step 2, the 4th in step
    6, the 5th in step 10. Of 8 blocks, c and a get a 3rd, b sits out. Step 6: b gives up 2, one for c, one for a. Step 10: a gives up its 4 for
    c."""
    engine = make_engine(is_alone=True, num_kv_blocks=8, prefix_caching=False)
    preempted: list[str] = []

    def watch(output: SchedulerOutput) -> ModelRunnerOutput:
        preempted.extend(name for name in output.finished_request_ids if name not in engine.ends)
        return ArithmeticRunner.execute_model(engine.runner, output)

    engine.runner.execute_model = watch
    prompts = {name: [ord(name) + place for place in range(8)] for name in "abc"}
    for name, priority in (("a", 0), ("b", 0), ("c", -1)):
        engine.add(name, prompts[name], n=12, priority=priority)
    preempted_after: list[list[str]] = []
    for _ in range(12):
        engine.step()
        preempted_after.append(list(preempted))
    assert preempted_after == [*(5 * [[]]), *(4 * [["b"]]), *(3 * [["b", "a"]])]
    assert set(engine.ends) == {"c"}
    engine.run()
    assert all(engine.tokens[name] == wanted(prompts[name], n=12) for name in "abc")
    assert_nothing_is_held(engine)
