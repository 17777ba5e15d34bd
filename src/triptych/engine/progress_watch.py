"""`ProgressWatch`: notices passes that lead nowhere, which the scheduler's rules exclude and a bug in them would cause.

Progress is a token computed further than its request had ever been, or a request that ended. Without it, one of three things is wrong:

* nothing moves, and nothing that could change it has a deadline or a copy under way: the engine would sleep for ever;
* tokens are computed again and again, more than the cache holds twice over: requests preempt each other in turns;
* things move (loads, encodes), pass after pass, and no request gets anything of it.
"""

from collections.abc import Sequence

from triptych.engine.request import Request

MAX_EMPTY_PASSES = 10_000
MAX_REQUESTS_SHOWN = 8


class ProgressWatch:
    def __init__(self, capacity: int) -> None:
        """`capacity`: tokens that the KV cache holds."""
        self._max_computed_again = 2 * capacity
        self._num_advanced = 0
        self._num_computed_again = 0
        self._num_empty_passes = 0

    def observe(self, num_advanced: int, num_computed: int, *, has_requests: bool, has_moved: bool, may_sleep: bool) -> str:
        """What is wrong after a pass that computed `num_computed` tokens; empty if nothing is. `num_advanced` grows with progress, over all passes;
        `may_sleep`: a deadline or a copy under way will make the next pass."""
        if num_advanced != self._num_advanced or not has_requests:
            self._num_advanced, self._num_computed_again, self._num_empty_passes = num_advanced, 0, 0
            return ""
        self._num_computed_again += num_computed
        self._num_empty_passes += not num_computed and has_moved
        problem = ""
        if not has_moved and not may_sleep:
            problem = "nothing is under way that would let a request go on"
        elif self._num_computed_again > self._max_computed_again:
            problem = f"{self._num_computed_again} tokens were computed again, and no request came further"
        elif self._num_empty_passes > MAX_EMPTY_PASSES:
            problem = f"{self._num_empty_passes} passes moved something, and no request came further"
        if problem:
            self._num_computed_again = self._num_empty_passes = 0
        return problem


def describe(requests: Sequence[Request]) -> str:
    """Who is where, first in line first, for the log."""
    shown = [
        f"{each.request_id} ({each.status.name.lower()}, {each.num_computed_tokens} of {len(each.token_ids)} tokens, "
        f"{len(each.needed_items())} items to come)"
        for each in requests[:MAX_REQUESTS_SHOWN]
    ]
    return ", ".join(shown) + (f" and {len(requests) - MAX_REQUESTS_SHOWN} more" if len(requests) > MAX_REQUESTS_SHOWN else "")
