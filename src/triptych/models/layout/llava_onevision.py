"""LLaVA-OneVision pictures: alone in its request one is tiled ("anyres"), among others it is a single tile."""

import math

from triptych.errors import ConfigError
from triptych.media.header import MediaHeader
from triptych.models.layout.adapter import ItemLayout, LayoutAdapter, ModelFiles

IMAGE_TOKEN = "<image>"
_SLACK = 1.1  # how far the tiles' rows may exceed the limit before they are scaled down


class LlavaOnevisionLayout(LayoutAdapter):
    """Grid: (number of tiles, the whole picture among them); (1,) means that the picture is one of several."""

    def __init__(self, files: ModelFiles) -> None:
        super().__init__(files)
        self.placeholders = {"image": IMAGE_TOKEN}
        self.row_token_ids = {"image": files.image_token_id}
        vision = files.config["vision_config"]
        self.tile_side = int(vision["image_size"])  # pixels
        self.side = self.tile_side // int(vision["patch_size"])  # rows of embeddings along a tile's side
        self.canvases = [(int(height), int(width)) for height, width in files.config.get("image_grid_pinpoints") or ()]
        ratio = str(files.config.get("vision_aspect_ratio", "anyres_max_9"))
        if not self.canvases or not ratio.startswith("anyres_max_"):
            raise ConfigError(
                f"config.json's image_grid_pinpoints are missing or its vision_aspect_ratio '{ratio}' is not anyres_max_N."
            )
        self.max_tiles = int(ratio.removeprefix("anyres_max_"))

    def layout(self, header: MediaHeader, items_in_request: int) -> ItemLayout:
        self.check_modality(header.modality)
        if items_in_request > 1:
            return self._item(self.side**2 + 1, 1)  # one tile and the newline
        height, width = self._best_canvas(header.height, header.width)
        tiles_down, tiles_across = height // self.tile_side, width // self.tile_side
        down, across = self._unpad(header.height, header.width, self.side * tiles_down, self.side * tiles_across)
        # the whole picture, the tiles, and a newline after each of their lines
        return self._item(self.side**2 + down * across + down, tiles_down * tiles_across + 1)

    def key_fields(self, header: MediaHeader, items_in_request: int) -> bytes:
        return b"one of several" if items_in_request > 1 else b"alone"

    def _item(self, num_rows: int, num_tiles: int) -> ItemLayout:
        return ItemLayout("image", IMAGE_TOKEN * num_rows, num_rows, self.row_token_ids["image"], (num_tiles,))

    def _best_canvas(self, height: int, width: int) -> tuple[int, int]:
        """Most of the picture's own pixels, then least waste; the first of equals (`select_best_resolution`)."""

        def rank(canvas: tuple[int, int]) -> tuple[int, int]:
            scale = min(canvas[1] / width, canvas[0] / height)
            used = min(int(width * scale) * int(height * scale), width * height)
            return used, used - canvas[0] * canvas[1]

        return max(self.canvases, key=rank)

    def _unpad(self, height: int, width: int, down: int, across: int) -> tuple[int, int]:
        """Lines and columns of embeddings without those of the padding, scaled down if they are too many (`_get_unpadded_features`)."""
        if width / height > across / down:
            down -= (down - int(round(height * (across / width), 7))) // 2 * 2
        else:
            across -= (across - int(round(width * (down / height), 7))) // 2 * 2
        ratio = math.sqrt(down * across / (self.max_tiles * self.side**2))
        return (int(down // ratio), int(across // ratio)) if ratio > _SLACK else (down, across)
