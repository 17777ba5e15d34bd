"""InternVL pictures: as many square tiles as suit the aspect ratio, and a thumbnail when there are several."""

import math

from triptych.media.header import MediaHeader
from triptych.models.layout.adapter import ItemLayout, LayoutAdapter, ModelFiles

IMAGE_TOKEN = "<IMG_CONTEXT>"


class InternVLLayout(LayoutAdapter):
    """Grid: (number of tiles, the thumbnail among them). The processor class asks for tiles whatever the settings say."""

    def __init__(self, files: ModelFiles) -> None:
        super().__init__(files)
        self.placeholders = {"image": IMAGE_TOKEN}
        self.row_token_ids = {"image": files.image_token_id}
        settings = files.preprocessor
        size = settings.get("size") or {"height": 384, "width": 384}
        self.tile_area = int(size["height"]) * int(size["width"])
        self.rows_per_tile = int(files.config.get("image_seq_length") or 256)
        self.canvases = _find_canvases(int(settings.get("min_patches") or 1), int(settings.get("max_patches") or 12))

    def layout(self, header: MediaHeader, items_in_request: int) -> ItemLayout:
        self.check_modality(header.modality)
        columns, rows = self._best_canvas(header.height, header.width)
        num_tiles = columns * rows
        num_tiles += num_tiles > 1  # the thumbnail
        num_rows = num_tiles * self.rows_per_tile
        text = f"<img>{IMAGE_TOKEN * num_rows}</img>"
        return ItemLayout("image", text, num_rows, self.row_token_ids["image"], (num_tiles,))

    def _best_canvas(self, height: int, width: int) -> tuple[int, int]:
        """The nearest aspect ratio; of two equally near the larger, if the picture fills half of it (`get_optimal_tiled_canvas`)."""
        nearest, best = math.inf, (1, 1)
        for columns, rows in self.canvases:
            distance = abs(width / height - columns / rows)
            fills = height * width > 0.5 * self.tile_area * columns * rows
            if distance < nearest or (distance == nearest and fills):
                nearest, best = distance, (columns, rows)
        return best


def _find_canvases(fewest: int, most: int) -> list[tuple[int, int]]:
    """All (columns, rows) of `fewest` to `most` tiles, those of fewer tiles first."""
    sides = range(1, most + 1)
    canvases = [(columns, rows) for columns in sides for rows in sides if fewest <= columns * rows <= most]
    return sorted(canvases, key=lambda canvas: canvas[0] * canvas[1])
