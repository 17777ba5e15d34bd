"""`StepPlan`: what one call of `Scheduler.schedule` has decided so far."""

from dataclasses import dataclass, field

from triptych.engine.encoder_cache_manager import Rank
from triptych.engine.item_supply import PlannedItems
from triptych.output import ECLoad


@dataclass(slots=True)
class StepPlan:
    budget: int
    items: PlannedItems
    windows: dict[str, int] = field(default_factory=dict[str, int])  # request id -> tokens
    new_block_ids: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    computing: set[bytes] = field(default_factory=set[bytes])  # hashes of blocks that a window writes to
    under_way: dict[bytes, Rank] | None = None  # hashes of blocks at which running requests are; worked out when somebody asks
    item_pages: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])

    def loads_with_need(self) -> list[ECLoad]:
        """The loads, each with whether a window reads it."""
        return [ECLoad(load.ticket, load.pages, key in self.item_pages) for key, load in self.items.loads.items()]
