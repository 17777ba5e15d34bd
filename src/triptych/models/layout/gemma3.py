"""Gemma 3 pictures: always one square, always the same number of rows."""

from triptych.errors import ConfigError
from triptych.media.header import MediaHeader
from triptych.models.layout.adapter import ItemLayout, LayoutAdapter, ModelFiles

IMAGE_TOKEN = "<image_soft_token>"


class Gemma3Layout(LayoutAdapter):
    """The template renders `<start_of_image>`, the rows have a token of their own. Grid: (1,) tile."""

    def __init__(self, files: ModelFiles) -> None:
        super().__init__(files)
        if files.preprocessor.get("do_pan_and_scan"):
            raise ConfigError("preprocessor_config.json has do_pan_and_scan on, which is not supported; set it to false.")
        self.placeholders = {"image": "<start_of_image>"}
        self.row_token_ids = {"image": files.image_token_id}
        self.num_rows = int(files.config.get("mm_tokens_per_image") or 256)

    def layout(self, header: MediaHeader, items_in_request: int) -> ItemLayout:
        self.check_modality(header.modality)
        text = f"\n\n<start_of_image>{IMAGE_TOKEN * self.num_rows}<end_of_image>\n\n"
        return ItemLayout("image", text, self.num_rows, self.row_token_ids["image"], (1,))
