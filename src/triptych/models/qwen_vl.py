"""Qwen2-VL and Qwen2.5-VL: positions of three axes (time, height, width). Qwen3-VL adds deepstack levels."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from triptych.media.item import MediaItem
from triptych.models.adapter import Inputs, Model, ModelAdapter

_TOKEN_TYPES = {"image": 1, "video": 2}


class QwenVLAdapter(ModelAdapter):
    position_axes: ClassVar[int] = 3

    def grid_of(self, inputs: Inputs) -> tuple[int, ...]:
        return tuple(inputs["image_grid_thw"][0].tolist())

    def positions(self, model: Model, token_ids: Sequence[int], items: Sequence[MediaItem]) -> tuple[Tensor, float]:
        """The library's `get_rope_index`, which needs ids and grids only.

        It takes two pictures without a token between them for one, so a prompt is cut there; as positions go on after a picture's
        last one, the pieces can be joined.
        """
        cuts = [0, *(first.end for first, second in pairwise(items) if first.end == second.start), len(token_ids)]
        pieces: list[Tensor] = []
        offset = 0
        for start, end in pairwise(cuts):
            inside = [item for item in items if start <= item.start < end]
            piece = self._rope_index(model, token_ids[start:end], inside, start) + offset  # [3, end - start]
            pieces.append(piece)
            offset = int(piece.max()) + 1
        return torch.cat(pieces, dim=1), offset - len(token_ids)

    def _rope_index(self, model: Model, token_ids: Sequence[int], items: Sequence[MediaItem], start: int) -> Tensor:
        types = torch.zeros(1, len(token_ids), dtype=torch.int32)
        for item in items:
            for first, length in item.runs:
                types[0, first - start : first - start + length] = _TOKEN_TYPES[item.modality]
        grids = [item.grid for item in items if item.modality == "image"]
        positions, _ = model.base_model.get_rope_index(
            input_ids=torch.tensor([list(token_ids)]),
            mm_token_type_ids=types,
            image_grid_thw=torch.tensor(grids) if grids else None,
        )
        return positions[:, 0]


class Qwen3VLAdapter(QwenVLAdapter):
    def lm_kwargs(self, row_mask: Tensor, levels: Sequence[Tensor]) -> dict[str, Any]:
        if not levels:
            return {}
        return {"visual_pos_masks": row_mask.unsqueeze(0), "deepstack_visual_embeds": list(levels)}
