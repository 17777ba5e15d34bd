"""`ModelAdapter`: the few things that a worker must know about a family. These defaults serve most families without a file.

Preprocessing is thread-safe and runs beside the engine thread; everything else belongs to the engine thread.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor

from triptych.config import MediaConfig
from triptych.errors import InternalError, MediaError
from triptych.media.decode import decode_image
from triptych.media.header import read_header
from triptych.media.item import MediaItem
from triptych.models.layout.adapter import LayoutAdapter

Model = Any  # a transformers PreTrainedModel, whose own annotations say that most of what is called here cannot be called
Inputs = dict[str, Tensor]  # what the tower takes, for one item or for several collated ones
ImageProcessor = Callable[..., Mapping[str, Tensor]]


def no_image_processor(*args: Any, **kwargs: Any) -> Mapping[str, Tensor]:
    """Stands where a worker has no tower."""
    raise InternalError("this worker has no tower; pictures go to encode workers only.")


class ModelAdapter:
    """`position_axes`: rows of the position tensor. `atomic_items`: no chunk may end inside an item (its tokens see each other)."""

    position_axes: ClassVar[int] = 1
    position_dtype: ClassVar[torch.dtype] = torch.int64
    atomic_items: ClassVar[bool] = False
    processor_options: ClassVar[Mapping[str, Any]] = {}  # what the family's processor class tells its image processor

    def __init__(
        self, layout: LayoutAdapter, image_processor: ImageProcessor = no_image_processor, input_names: Sequence[str] = ()
    ) -> None:
        """`input_names`: the tensors that the model's `get_image_features` takes; what else the processor gives is dropped."""
        self._layout = layout
        self._image_processor = image_processor
        self._input_names = tuple(input_names)

    # --- the tower ---

    def preprocess(self, data: bytes, modality: str, grid: tuple[int, ...], num_rows: int, limits: MediaConfig) -> Inputs:
        """File to tower inputs, for one item.

        Raises `MediaError` when the pixels are not what the header promised, `TooLargeError` over a limit, and `InternalError` when the
        router promised other than this worker's own files say.
        """
        self._layout.check_modality(modality)
        header = read_header(data, limits)
        alone, one_of_several = (self._layout.layout(header, items_in_request) for items_in_request in (1, 2))
        if (grid, num_rows) not in ((alone.grid, alone.num_rows), (one_of_several.grid, one_of_several.num_rows)):
            own = f"grid {alone.grid} and {alone.num_rows} rows"
            raise InternalError(f"by this worker's files the {modality} has {own}; the router promised {grid} and {num_rows}.")
        image = decode_image(data)
        try:
            prepared = self.process(image, grid)
        except ValueError as error:  # how image processors refuse a shape
            raise MediaError(f"the model's image processor refused the picture: {error}") from None
        inputs = {name: prepared[name] for name in self._input_names if name in prepared}
        found = self.grid_of(inputs)
        if found != grid:
            raise MediaError(f"the picture's pixels give the grid {found} where its header promised {grid} ({num_rows} rows).")
        return inputs

    def process(self, image: Image.Image, grid: tuple[int, ...]) -> Mapping[str, Tensor]:
        """Run the image processor on one picture."""
        return self._image_processor(images=[image], return_tensors="pt", **self.processor_options)

    def grid_of(self, inputs: Inputs) -> tuple[int, ...]:
        """The grid as the layout counts it; by default the number of tiles in [tiles, 3, height, width] or [1, tiles, ...]."""
        return (inputs["pixel_values"].shape[-4],)

    def collate(self, items: Sequence[Inputs]) -> Inputs:
        """Several items as one batch of the tower."""
        return {name: torch.cat([item[name] for item in items]) for name in items[0]}

    def encode(self, model: Model, modality: str, inputs: Inputs, rows: Sequence[int]) -> list[Tensor]:
        """Each item's embeddings, [rows[i], levels * hidden]. Raises `InternalError` when the tower gives another number of rows."""
        weight = next(model.parameters())
        moved = {name: _move(tensor, weight) for name, tensor in inputs.items()}
        output = getattr(model.base_model, f"get_{modality}_features")(**moved)
        levels = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        # [sum of rows, levels * hidden]
        flat = torch.cat([_flatten(level) for level in levels], dim=-1)
        if flat.shape[0] != sum(rows):
            raise InternalError(f"the tower gave {flat.shape[0]} rows where {sum(rows)} were promised ({len(rows)} items).")
        return list(flat.split(list(rows)))

    # --- the language model ---

    def positions(self, model: Model, token_ids: Sequence[int], items: Sequence[MediaItem]) -> tuple[Tensor, float]:
        """[position_axes, T] for the whole prompt, and what is added to the index of each token after it."""
        return torch.arange(len(token_ids)).unsqueeze(0), 0

    def lm_kwargs(self, row_mask: Tensor, levels: Sequence[Tensor]) -> dict[str, Any]:
        """What the language model takes beside embeddings. `row_mask` [T] marks item rows, `levels` are their [rows, hidden]
        features after the first; empty when the window holds no such row."""
        return {}

    def embed(self, model: Model, token_ids: Tensor) -> Tensor:
        """[T] to [T, hidden]."""
        return model.get_decoder().get_input_embeddings()(token_ids)

    def forward(self, model: Model, inputs_embeds: Tensor, positions: Tensor, **kwargs: Any) -> Tensor:
        """[1, T, hidden] and [axes, 1, T] to [T, hidden]. `kwargs` reach the attention function of every layer."""
        position_ids = positions if self.position_axes > 1 else positions[0]
        output = model.get_decoder()(inputs_embeds=inputs_embeds, position_ids=position_ids, use_cache=False, **kwargs)
        return output.last_hidden_state[0]

    def logits(self, model: Model, hidden: Tensor) -> Tensor:
        """[R, hidden] to [R, vocabulary]."""
        logits = model.get_output_embeddings()(hidden)
        cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap


def _flatten(features: Tensor | Sequence[Tensor]) -> Tensor:
    """Families give one tensor, or one per item, of two or three dimensions: here always [rows, hidden]."""
    tensors = [features] if isinstance(features, Tensor) else features
    return torch.cat([tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors])


def _move(tensor: Tensor, weight: Tensor) -> Tensor:
    """To the model's device, and pixels to its dtype."""
    return tensor.to(weight.device, weight.dtype) if tensor.is_floating_point() else tensor.to(weight.device)
