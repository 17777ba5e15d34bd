"""`EncoderRunner`: runs the tower on one step's media items and writes their rows into the encoder cache."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from triptych.errors import InternalError, TriptychError
from triptych.models.loader import LoadedModel
from triptych.output import EncodeInput
from triptych.runner.encoder_cache import EncoderCache

logger = logging.getLogger(__name__)


class EncoderRunner:
    """Exists where the tower is; elsewhere `NoEncoderRunner` stands in its place."""

    def __init__(self, loaded: LoadedModel, encoder_cache: EncoderCache) -> None:
        self._model = loaded.model
        self._adapter = loaded.adapter
        self._encoder_cache = encoder_cache

    @torch.inference_mode()
    def run(self, encodes: Sequence[EncodeInput]) -> dict[str, str]:
        """Encode each item once, all items of a modality in one batch; returns key -> sentence for those that failed.

        An item that is in the cache already, or twice in `encodes`, is not encoded again.
        """
        wanted = {encode.key: encode for encode in reversed(encodes) if encode.key not in self._encoder_cache}
        failed: dict[str, str] = {}
        for modality in dict.fromkeys(encode.modality for encode in wanted.values()):
            self._run_batch([encode for encode in wanted.values() if encode.modality == modality], failed)
        return failed

    def _run_batch(self, encodes: Sequence[EncodeInput], failed: dict[str, str]) -> None:
        """A batch that fails is tried again item by item, so that a bad item fails only itself."""
        try:
            rows = self._encode(encodes)
        except Exception as error:  # the edge to foreign code: whatever the tower raises is one item's failure, not the engine's
            if len(encodes) == 1:
                failed[encodes[0].key] = _sentence(encodes[0], error)
                return
            logger.warning("a batch of %d items failed (%s); trying them one by one", len(encodes), error)
            for encode in encodes:
                self._run_batch([encode], failed)
            return
        for encode, own in zip(encodes, rows, strict=True):
            try:
                self._write(encode, own)
            except InternalError as error:
                failed[encode.key] = _sentence(encode, error)

    def _encode(self, encodes: Sequence[EncodeInput]) -> list[Tensor]:
        inputs = self._adapter.collate([encode.inputs for encode in encodes])  # type: ignore[misc]
        rows = self._adapter.encode(self._model, encodes[0].modality, inputs, [encode.num_rows for encode in encodes])
        if len(rows) != len(encodes):
            raise InternalError(f"the tower gave the rows of {len(rows)} items for {len(encodes)}.")
        return rows

    def _write(self, encode: EncodeInput, rows: Tensor) -> None:
        if len(rows) != encode.num_rows:
            raise InternalError(f"the tower gave {len(rows)} rows where {encode.num_rows} were promised.")
        self._encoder_cache.write(encode.key, encode.pages, rows)


class NoEncoderRunner(EncoderRunner):
    """A worker without the tower: nothing is ever to be encoded here."""

    def __init__(self) -> None:
        pass

    def run(self, encodes: Sequence[EncodeInput]) -> dict[str, str]:
        return {encode.key: f"item {encode.key} cannot be encoded: this worker has no tower." for encode in encodes}


def _sentence(encode: EncodeInput, error: Exception) -> str:
    why = str(error) if isinstance(error, TriptychError) else f"{type(error).__name__}: {error}"
    return f"{encode.modality} {encode.key} could not be encoded: {why}"
