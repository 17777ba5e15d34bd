"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL pictures: resized to whole merged patches within a range of pixels."""

import math
from collections.abc import Mapping
from typing import Any

from triptych.errors import MediaError
from triptych.media.header import MediaHeader
from triptych.models.layout.adapter import ItemLayout, LayoutAdapter, ModelFiles

MAX_ASPECT_RATIO = 200
IMAGE_TOKEN = "<|image_pad|>"


class QwenVLLayout(LayoutAdapter):
    """Grid: (1, height, width) in patches; a row is `merge_size` squared of them."""

    def __init__(self, files: ModelFiles) -> None:
        super().__init__(files)
        self.placeholders = {"image": IMAGE_TOKEN}
        self.row_token_ids = {"image": files.image_token_id}
        settings = files.preprocessor
        self.patch_size = int(settings.get("patch_size", 14))
        self.merge_size = int(settings.get("merge_size", 2))
        self.min_pixels, self.max_pixels = _pixel_range(settings)

    def layout(self, header: MediaHeader, items_in_request: int) -> ItemLayout:
        self.check_modality(header.modality)
        height, width = self._resize(header.height, header.width)
        num_rows = height * width // (self.patch_size * self.merge_size) ** 2
        return ItemLayout(
            modality="image",
            text=IMAGE_TOKEN * num_rows,
            num_rows=num_rows,
            row_token_id=self.row_token_ids["image"],
            grid=(1, height // self.patch_size, width // self.patch_size),
        )

    def _resize(self, height: int, width: int) -> tuple[int, int]:
        """`smart_resize` of transformers' Qwen2VLImageProcessor, number for number (Python's rounding half to even, too)."""
        if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            raise MediaError(
                f"the picture is {width} x {height}; this model takes no picture whose sides differ more than {MAX_ASPECT_RATIO} times."
            )
        unit = self.patch_size * self.merge_size
        new_height, new_width = round(height / unit) * unit, round(width / unit) * unit
        if new_height * new_width > self.max_pixels:
            shrink = math.sqrt((height * width) / self.max_pixels)
            return max(unit, math.floor(height / shrink / unit) * unit), max(unit, math.floor(width / shrink / unit) * unit)
        if new_height * new_width < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            return math.ceil(height * grow / unit) * unit, math.ceil(width * grow / unit) * unit
        return new_height, new_width


def _pixel_range(settings: Mapping[str, Any]) -> tuple[int, int]:
    """`min_pixels` and `max_pixels` outrank `size`, as in the image processor; the last ones here are its defaults."""
    size = settings.get("size") or {}
    low = settings.get("min_pixels") or size.get("shortest_edge") or 56 * 56
    high = settings.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
    return int(low), int(high)
