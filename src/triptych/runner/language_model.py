"""`LanguageModel`: tokens and item rows in, logits out, over the paged KV cache."""

import numpy as np
import torch
from torch import Tensor

from triptych.config import EngineConfig
from triptych.errors import InternalError
from triptych.models.loader import LoadedModel
from triptych.output import NewRequestData
from triptych.runner.block_table import BlockTable
from triptych.runner.input_batch import InputBatch, InputBatchBuilder, TokenWindow
from triptych.runner.kv_cache import KVCache
from triptych.runner.request_state import RequestState
from triptych.sampling_params import SamplingParams


class LanguageModel:
    """Exists where the language model is; elsewhere `NoLanguageModel` stands in its place."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig, kv_cache: KVCache, block_table: BlockTable) -> None:
        self._model = loaded.model
        self._adapter = loaded.adapter
        self._kv_cache = kv_cache
        self._block_table = block_table
        self._vocab_size = config.model.vocab_size
        self._hidden_size = config.model.hidden_size
        self._num_levels = config.model.num_feature_levels
        self._builder = InputBatchBuilder(
            block_table, kv_cache, loaded.adapter.position_axes, loaded.adapter.position_dtype, loaded.adapter.atomic_items
        )

    def make_request(self, data: NewRequestData) -> RequestState:
        """Work out positions and take a row of the block table. Raises whatever the family's code raises for a prompt it cannot place."""
        prompt = data.token_ids[: data.num_prompt_tokens]
        if not prompt or min(data.token_ids) < 0 or max(data.token_ids) >= self._vocab_size:
            raise ValueError(f"token ids must be at least 0 and less than {self._vocab_size}, and there must be some")
        positions, delta = self._adapter.positions(self._model, prompt, data.items)
        request = RequestState(data, positions.cpu().numpy(), delta, self._block_table.allocate(data.block_ids))
        # Blocks that were computed before (a prefix hit, a KV load) keep what they hold.
        self._kv_cache.clear(data.block_ids[-(-data.num_computed_tokens // self._block_table.block_size) :])
        return request

    def extend_request(self, request: RequestState, block_ids: tuple[int, ...]) -> None:
        self._block_table.append(request.block_row, block_ids)
        self._kv_cache.clear(block_ids)

    def forget_request(self, request: RequestState) -> None:
        self._block_table.free(request.block_row)

    def make_batch(self, windows: list[TokenWindow]) -> InputBatch:
        return self._builder.build(windows)

    def forward(self, batch: InputBatch, rows: Tensor) -> Tensor:
        """The last hidden states, [T, hidden]. `rows`, [m, row_width], take the places `batch.row_index`."""
        embeddings = self._adapter.embed(self._model, batch.token_ids)
        extra: dict[str, object] = {}
        if len(rows):
            # Level 0 stands in for the token's embedding; further levels are added inside the model.
            levels = rows.split(self._hidden_size, dim=1)
            embeddings = embeddings.index_copy(0, batch.row_index, levels[0].to(embeddings.dtype))
            if self._num_levels > 1:
                row_mask = torch.zeros(len(batch.token_ids), dtype=torch.bool, device=rows.device)
                extra = self._adapter.lm_kwargs(row_mask.index_fill_(0, batch.row_index, True), levels[1:])
        return self._adapter.forward(
            self._model, embeddings.unsqueeze(0), batch.positions.unsqueeze(1), step=batch.attention, **extra
        )

    def sampled_logits(self, hidden: Tensor, batch: InputBatch) -> Tensor:
        """[R, vocabulary], for the windows that are sampled, in batch order."""
        if len(batch.sample_index) < len(hidden):
            hidden = hidden.index_select(0, batch.sample_index)
        return self.logits(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] to [n, vocabulary]."""
        return self._adapter.logits(self._model, hidden)

    def no_rows(self) -> Tensor:
        return torch.empty(0, self._num_levels * self._hidden_size, device=self._kv_cache.device)

    @torch.inference_mode()
    def dummy_run(self, num_requests: int, num_tokens: int) -> Tensor:
        """Run requests of `num_tokens` tokens each, less where the cache is smaller; returns the hidden states, [T, hidden].

        For start-up only: it writes into blocks as if no request had any.
        """
        block_size = self._block_table.block_size
        num_requests = min(num_requests, self._kv_cache.num_blocks)
        blocks_each = min(-(-num_tokens // block_size), self._kv_cache.num_blocks // num_requests)
        num_tokens = min(num_tokens, blocks_each * block_size)
        requests = [
            RequestState(
                NewRequestData(
                    request_id="",
                    token_ids=(0,) * num_tokens,
                    items=(),
                    sampling=SamplingParams(max_tokens=1),
                    num_prompt_tokens=num_tokens,
                    num_computed_tokens=0,
                    block_ids=(),
                ),
                np.zeros((self._adapter.position_axes, num_tokens), np.int64),
                0,
                self._block_table.allocate(range(index * blocks_each, (index + 1) * blocks_each)),
            )
            for index in range(num_requests)
        ]
        batch = self.make_batch([TokenWindow(request, 0, num_tokens) for request in requests])
        hidden = self.forward(batch, self.no_rows())
        for request in requests:
            self.forget_request(request)
        return hidden


class NoLanguageModel(LanguageModel):
    """A worker without the language model: no request ever runs here."""

    def __init__(self) -> None:
        pass

    def make_request(self, data: NewRequestData) -> RequestState:
        raise InternalError("this worker has no language model, so it cannot generate")

    def dummy_run(self, num_requests: int, num_tokens: int) -> Tensor:
        return torch.empty(0)
