"""`LayoutAdapter`: how many embedding rows an item will have, and what stands for it in the prompt, from its header alone.

One class per family overrides the arithmetic; this default is a model that takes text only. Torch-free and
transformers-free: router and scheduler import it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import groupby
from typing import Any

from triptych.errors import ConfigError, RequestError
from triptych.media.header import MediaHeader

Runs = tuple[tuple[int, int], ...]  # (first token, number of tokens), ascending


@dataclass(frozen=True, slots=True)
class ItemLayout:
    """`text` replaces the placeholder in the rendered prompt. Of its tokens, `num_rows` are `row_token_id`: the item's rows go there."""

    modality: str
    text: str
    num_rows: int
    row_token_id: int
    grid: tuple[int, ...] = ()  # what positions and the check of the pixels need, e.g. (t, h, w) in patches


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The JSON files of a model folder that layouts are computed from: config, image preprocessor, processor."""

    config: Mapping[str, Any]
    preprocessor: Mapping[str, Any] = field(default_factory=dict[str, Any])
    processor: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def image_token_id(self) -> int:
        """The id of the tokens whose embeddings are a picture's rows; older configurations name it `image_token_index`."""
        token_id = self.config.get("image_token_id", self.config.get("image_token_index"))
        if not isinstance(token_id, int):
            raise ConfigError("config.json has no image_token_id; a model that takes pictures needs it.")
        return token_id


class LayoutAdapter:
    """`placeholders`: modality -> string that the chat template renders for one item; empty for a text-only model."""

    def __init__(self, files: ModelFiles) -> None:
        self.files = files
        self.placeholders: dict[str, str] = {}
        self.row_token_ids: dict[str, int] = {}

    def layout(self, header: MediaHeader, items_in_request: int) -> ItemLayout:
        """Raises `RequestError` for a modality that the model does not take, `MediaError` for a shape that it refuses."""
        self.check_modality(header.modality)
        raise NotImplementedError(f"{type(self).__name__} names placeholders but no layout")

    def check_modality(self, modality: str) -> None:
        if modality not in self.placeholders:
            takes = " and ".join(self.placeholders) or "text only"
            raise RequestError(f"this model takes no {modality} input; it takes {takes}.")

    def processor_settings(self) -> bytes:
        """The part of an item's key that says how its pixels are prepared: by which settings, decoder and processor."""
        prepared_by = [f"{package} {version(package)}" for package in ("pillow", "transformers")]
        return json.dumps([self.files.preprocessor, self.files.processor, prepared_by], sort_keys=True).encode()

    def key_fields(self, header: MediaHeader, items_in_request: int) -> bytes:
        """The part of an item's key that says what else its rows depend on: nothing, in most families."""
        return b""


def find_items(token_ids: Sequence[int], layouts: Sequence[ItemLayout]) -> list[Runs]:
    """Where the rows of each item lie in the tokenised prompt, in the order of `layouts`.

    Raises `RequestError` when the prompt does not hold exactly the placeholders that the items need: too few or
    too many come from a template or a text with placeholder tokens of its own.
    """
    positions: dict[int, list[int]] = {layout.row_token_id: [] for layout in layouts}
    for position, token_id in enumerate(token_ids):
        if token_id in positions:
            positions[token_id].append(position)
    for row_token_id, found in positions.items():
        wanted = sum(layout.num_rows for layout in layouts if layout.row_token_id == row_token_id)
        if wanted != len(found):
            raise RequestError(
                f"the prompt holds {len(found)} placeholder tokens (id {row_token_id}), but its media items have {wanted} rows; "
                "each media part must appear exactly once, and text must not contain placeholder tokens."
            )
    taken = dict.fromkeys(positions, 0)
    items: list[Runs] = []
    for layout in layouts:
        start = taken[layout.row_token_id]
        taken[layout.row_token_id] = start + layout.num_rows
        items.append(_to_runs(positions[layout.row_token_id][start : start + layout.num_rows]))
    return items


def _to_runs(positions: Sequence[int]) -> Runs:
    """Join consecutive positions: those with the same distance to their index."""
    groups = (list(group) for _, group in groupby(enumerate(positions), key=lambda pair: pair[1] - pair[0]))
    return tuple((group[0][1], len(group)) for group in groups)
