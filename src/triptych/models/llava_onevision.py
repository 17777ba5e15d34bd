"""LLaVA-OneVision: pictures that are alone in their request are tiled, others are not, and a batch may hold both."""

from collections.abc import Mapping, Sequence

import torch
from PIL import Image
from torch import Tensor

from triptych.models.adapter import Inputs, Model, ModelAdapter

_ORDER = "order"  # of a batch's items, as the tower wants them


class LlavaOnevisionAdapter(ModelAdapter):
    """A picture with the grid (1,) is one of several."""

    def process(self, image: Image.Image, grid: tuple[int, ...]) -> Mapping[str, Tensor]:
        """The processor tells the two kinds apart by the number of pictures it is given, so one of several gets company."""
        is_alone = grid != (1,)
        images = [[image]] if is_alone else [[image, Image.new("RGB", (1, 1))]]
        prepared = self._image_processor(images=images, return_tensors="pt")
        return {
            "pixel_values": prepared["pixel_values"][0],  # [tiles, 3, side, side]
            "image_sizes": prepared["image_sizes"][:1],  # [1, 2]
            "batch_num_images": torch.tensor([1 if is_alone else 2]),  # [1]; see `collate`
        }

    def collate(self, items: Sequence[Inputs]) -> Inputs:
        """Those that are alone first, as `get_image_features` takes a list of requests and the numbers of their pictures: here one
        request for each that is alone, and one for all others, of two pictures at least."""
        order = sorted(range(len(items)), key=lambda index: int(items[index]["batch_num_images"]))
        batch = {name: torch.cat([items[index][name] for index in order]) for name in ("pixel_values", "image_sizes")}
        num_alone = sum(int(item["batch_num_images"]) == 1 for item in items)
        num_others = len(items) - num_alone
        numbers = [1] * num_alone + ([max(num_others, 2)] if num_others else [])
        return {**batch, "batch_num_images": torch.tensor(numbers), _ORDER: torch.tensor(order)}

    def encode(self, model: Model, modality: str, inputs: Inputs, rows: Sequence[int]) -> list[Tensor]:
        order = inputs[_ORDER].tolist()
        tower_inputs = {name: tensor for name, tensor in inputs.items() if name != _ORDER}
        found = super().encode(model, modality, tower_inputs, [rows[index] for index in order])
        return [found[order.index(index)] for index in range(len(rows))]
