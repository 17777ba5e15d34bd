"""Idefics3 and SmolVLM pictures: rows and columns of tiles with separators between, then the whole picture as one more tile."""

import math

from triptych.media.header import MediaHeader
from triptych.models.layout.adapter import ItemLayout, LayoutAdapter, ModelFiles

IMAGE_TOKEN = "<image>"
AROUND = "<fake_token_around_image>"
MAX_SIDE = 4096  # pixels, whatever the settings say


class Idefics3Layout(LayoutAdapter):
    """Grid: (number of tiles, the whole picture among them)."""

    def __init__(self, files: ModelFiles) -> None:
        super().__init__(files)
        self.placeholders = {"image": IMAGE_TOKEN}
        self.row_token_ids = {"image": files.image_token_id}
        settings = files.preprocessor
        self.longest_edge = int((settings.get("size") or {"longest_edge": 4 * 364})["longest_edge"])
        self.tile_side = int((settings.get("max_image_size") or {"longest_edge": 364})["longest_edge"])
        self.is_split = bool(settings.get("do_image_splitting", True))
        self.rows_per_tile = int(files.processor.get("image_seq_len") or self._rows_of_the_tower())

    def layout(self, header: MediaHeader, items_in_request: int) -> ItemLayout:
        self.check_modality(header.modality)
        rows, columns = self._split(header.height, header.width)
        tile = IMAGE_TOKEN * self.rows_per_tile
        text = ""
        for row in range(1, rows + 1):
            text += "".join(f"{AROUND}<row_{row}_col_{column}>{tile}" for column in range(1, columns + 1)) + "\n"
        text += "\n" if rows else ""
        num_tiles = rows * columns + 1
        text += f"{AROUND}<global-img>{tile}{AROUND}"
        return ItemLayout("image", text, num_tiles * self.rows_per_tile, self.row_token_ids["image"], (num_tiles,))

    def _split(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles; 0 and 0 when the picture fits into one."""
        if not self.is_split:
            return 0, 0
        height, width = _shrink(*_stretch(height, width, self.longest_edge))
        rows, columns = math.ceil(height / self.tile_side), math.ceil(width / self.tile_side)
        return (rows, columns) if rows * columns > 1 else (0, 0)

    def _rows_of_the_tower(self) -> int:
        vision, scale = self.files.config["vision_config"], self.files.config.get("scale_factor", 2)
        return (vision["image_size"] // vision["patch_size"]) ** 2 // scale**2


def _stretch(height: int, width: int, longest: int) -> tuple[int, int]:
    """The longer side becomes `longest`, the other follows and is made even (`_resize_output_size_rescale_to_max_len`)."""
    ratio = width / height
    if width >= height:
        short = int(longest / ratio)
        return max(short + short % 2, 1), longest
    short = int(longest * ratio)
    return longest, max(short + short % 2, 1)


def _shrink(height: int, width: int) -> tuple[int, int]:
    """No side over MAX_SIDE (`_resize_output_size_scale_below_upper_bound`)."""
    ratio = width / height
    if max(height, width) <= MAX_SIDE:
        return height, width
    if width >= height:
        return max(int(MAX_SIDE / ratio), 1), MAX_SIDE
    return MAX_SIDE, max(int(MAX_SIDE * ratio), 1)
