"""`Windows`: how far a request may be computed in a step: up to the budget's end, and to the first item whose rows no window may read yet."""

from collections.abc import Iterator

from triptych.engine.item_supply import ItemSupply
from triptych.engine.request import Request
from triptych.engine.step_plan import StepPlan
from triptych.media.item import MediaItem


class Windows:
    """`has_atomic_items`: an item's tokens attend to each other in both directions, so that no window may end inside one."""

    def __init__(self, items: ItemSupply, max_num_batched_tokens: int, has_atomic_items: bool) -> None:
        self._items = items
        self._max_num_batched_tokens = max_num_batched_tokens
        self._has_atomic_items = has_atomic_items

    def cut(self, request: Request, plan: StepPlan) -> tuple[int, MediaItem | None]:
        """How many tokens may be computed from `num_computed_tokens` on, and the item that is missing, if that ends before one."""
        start = request.num_computed_tokens
        num_tokens = min(len(request.token_ids) - start, plan.budget)
        for item in request.pending_items():
            if item.start >= start + num_tokens:
                break
            first_row = request.next_row_of(item)
            if first_row < start + num_tokens and not self._items.has(item, plan.items):
                num_tokens = first_row - start
                return (self._widen(request, num_tokens, plan) if num_tokens else 0), item
        return (self._widen(request, num_tokens, plan) if num_tokens else 0), None

    def items_within(self, request: Request, num_tokens: int) -> Iterator[MediaItem]:
        """Those of which the request's next `num_tokens` tokens read rows."""
        end = request.num_computed_tokens + num_tokens
        for item in request.pending_items():
            if item.start >= end:
                return
            if request.next_row_of(item) < end:
                yield item

    def _widen(self, request: Request, num_tokens: int, plan: StepPlan) -> int:
        """End before an item that may not be cut, or, if it is the next thing, take it whole (also over the budget)."""
        if not self._has_atomic_items:
            return num_tokens
        start = request.num_computed_tokens
        for item in request.pending_items():
            if item.start < start + num_tokens < item.end:
                if item.start > start:
                    return item.start - start
                is_first = plan.budget == self._max_num_batched_tokens
                fits = item.end - start <= plan.budget
                return item.end - start if is_first or fits else 0
        return num_tokens
