"""Idefics3 and SmolVLM: the tiles of a batch are those of one sample, [1, tiles, 3, side, side]."""

from collections.abc import Sequence

import torch

from triptych.models.adapter import Inputs, ModelAdapter


class Idefics3Adapter(ModelAdapter):
    def collate(self, items: Sequence[Inputs]) -> Inputs:
        return {name: torch.cat([item[name] for item in items], dim=1) for name in items[0]}
