"""`EncoderCache`: the embedding rows of media items, in pages.

An item's life here: written by the tower or read from a peer (`write`, `admit`), read by windows (`gather`), given up (`recycle`).
The rows lie in the arena's pages from the start, so that publishing them copies nothing:

    page p holds rows [p * rows_per_page, (p + 1) * rows_per_page) of one tensor [num_pages * rows_per_page, row_width]

An item has a list of pages, full but for the last; where each item lies is decided by the scheduler and remembered here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.config import EngineConfig
from triptych.errors import InternalError
from triptych.transfer.arena import Arena


@dataclass(frozen=True, slots=True)
class CachedItem:
    pages: tuple[int, ...]
    num_rows: int


@dataclass(frozen=True, slots=True)
class RowWindow:
    """Rows [first, last) of the item that lies in `pages`."""

    pages: tuple[int, ...]
    first: int
    last: int


class EncoderCache:
    def __init__(self, arena: Arena, config: EngineConfig, device: torch.device) -> None:
        self.arena = arena
        self.rows_per_page = config.cache.rows_per_page
        self.device = device
        self.dtype: torch.dtype = getattr(torch, config.model.dtype)
        # [num_pages * rows_per_page, row_width]
        self.rows = torch.from_numpy(arena.pages).view(self.dtype).view(-1, config.model.row_width)
        self._items: dict[str, CachedItem] = {}
        self._page_keys: dict[int, str] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._items

    def find(self, key: str) -> CachedItem | None:
        return self._items.get(key)

    def num_pages_of(self, num_rows: int) -> int:
        return -(-num_rows // self.rows_per_page)

    def write(self, key: str, pages: tuple[int, ...], rows: Tensor) -> None:
        """Put an item's `rows`, [n, row_width], into `pages`.

        Raises `InternalError` if they don't fit, are not finite as they are kept (a wider dtype may hold more), or the pages hold another item.
        """
        if rows.ndim != 2 or rows.shape[1] != self.rows.shape[1]:
            raise InternalError(f"the rows of item {key} are {tuple(rows.shape)}; they should be {self.rows.shape[1]} wide.")
        self.check_vacant(key, pages, len(rows))
        kept = rows.to("cpu", self.dtype)
        if not are_finite(kept):
            raise InternalError(f"the rows of item {key} hold NaN or infinity.")
        self.rows.index_copy_(0, self._row_index([RowWindow(pages, 0, len(rows))]), kept)
        self.admit(key, pages, len(rows))

    def admit(self, key: str, pages: tuple[int, ...], num_rows: int) -> None:
        """Count the item as resident: its rows are in `pages`."""
        self._items[key] = CachedItem(pages, num_rows)
        self._page_keys.update(dict.fromkeys(pages, key))

    def check_vacant(self, key: str, pages: tuple[int, ...], num_rows: int) -> None:
        """Raise `InternalError` unless `pages` can take `num_rows` rows and hold nothing, and the item is nowhere else."""
        if key in self._items:
            raise InternalError(f"item {key} is resident already, in pages {self._items[key].pages}.")
        if len(pages) != self.num_pages_of(num_rows) or not all(0 <= page < self.arena.num_pages for page in pages):
            raise InternalError(f"{num_rows} rows of item {key} do not fit pages {pages} of {self.rows_per_page} rows.")
        for page in pages:
            if page in self._page_keys:
                raise InternalError(f"page {page} for item {key} still holds item {self._page_keys[page]}.")

    def gather(self, windows: Sequence[RowWindow]) -> Tensor:
        """[sum of the windows' lengths, row_width], on the model's device."""
        return self.rows.index_select(0, self._row_index(windows)).to(self.device, non_blocking=True)

    def is_finite(self, pages: tuple[int, ...], num_rows: int) -> bool:
        rows = self.rows.index_select(0, self._row_index([RowWindow(pages, 0, num_rows)]))
        return are_finite(rows)

    def recycle(self, pages: Sequence[int]) -> None:
        """Give up what `pages` hold; a peer which still reads them will notice."""
        for page in pages:
            if page in self._page_keys:
                for other in self._items.pop(self._page_keys[page]).pages:
                    del self._page_keys[other]
        if pages:
            self.arena.recycle(pages)

    def reset(self) -> None:
        """Forget every item."""
        self.recycle(tuple(self._page_keys))

    def check_invariants(self) -> None:
        owned = {page: key for key, item in self._items.items() for page in item.pages}
        assert owned == self._page_keys, "every page of an item is known as that item's, and no other page is known"

    def close(self) -> None:
        self.arena.close()

    def _row_index(self, windows: Sequence[RowWindow]) -> Tensor:
        parts: list[NDArray[np.int64]] = []
        for window in windows:
            pages = np.array(window.pages, np.int64)
            rows = np.arange(window.first, window.last)
            parts.append(pages[rows // self.rows_per_page] * self.rows_per_page + rows % self.rows_per_page)
        return torch.from_numpy(parts[0] if len(parts) == 1 else np.concatenate(parts))


def are_finite(rows: Tensor) -> bool:
    """No NaN and no infinity among `rows`; in one pass, since extremes carry NaN along."""
    return rows.numel() == 0 or bool(torch.isfinite(torch.stack(torch.aminmax(rows))).all())
