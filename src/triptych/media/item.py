"""`MediaItem`: one picture, video or audio of a prompt, by its key and where its embeddings go."""

import msgspec

from triptych.media.key import ItemKey


class MediaItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One picture, video or audio of a request. Its `num_rows` embeddings fill the placeholders of `runs`, in order."""

    key: ItemKey
    modality: str
    runs: tuple[tuple[int, int], ...]  # (first token, number of tokens), ascending; several where separators lie between
    num_rows: int  # == sum of the runs' lengths
    grid: tuple[int, ...] = ()  # what the family's positions need, e.g. (t, h, w) in patches

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
