"""`MediaItem`: one picture, video or audio of a prompt, by its key and where its embeddings go."""

from typing import Annotated

import msgspec
from msgspec import Meta

from triptych.media.key import ItemKey

Modality = Annotated[str, Meta(max_length=16)]
# What the family's positions need, e.g. (t, h, w) in patches.
Grid = Annotated[tuple[Annotated[int, Meta(ge=1)], ...], Meta(max_length=8)]


class MediaItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One picture, video or audio of a request. Its `num_rows` embeddings fill the placeholders of `runs`, in order."""

    key: ItemKey
    modality: Modality
    # (first token, number of tokens), ascending; several where separators lie between
    runs: Annotated[tuple[tuple[int, int], ...], Meta(max_length=2**16)]
    num_rows: int  # == sum of the runs' lengths
    grid: Grid = ()

    @property
    def start(self) -> int:
        return self.runs[0][0]

    @property
    def end(self) -> int:
        """One past the last placeholder."""
        return self.runs[-1][0] + self.runs[-1][1]

    def rows_before(self, position: int) -> int:
        """How many of the item's rows belong to tokens before `position`."""
        return sum(min(max(position - start, 0), length) for start, length in self.runs)
