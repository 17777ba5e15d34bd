"""`ModelRunner`: one engine step on the device, exactly as a `SchedulerOutput` says.

    recycle → connectors' loads → forget, add and extend requests → encode → forward → sample → connectors' saves

A request which cannot be computed is reported alone (`failed_requests`, `stalled_requests`); the others of the step are computed.
"""

import logging
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from triptych.config import EngineConfig
from triptych.media.item import MediaItem
from triptych.models.loader import LoadedModel
from triptych.output import ModelRunnerOutput, SchedulerOutput, TokenLogprob
from triptych.runner.block_table import BlockTable
from triptych.runner.ec_connector import ECConnector, get_ec_connector
from triptych.runner.ec_transfer import EC_ARENA
from triptych.runner.encoder_cache import EncoderCache, RowWindow
from triptych.runner.encoder_runner import EncoderRunner, NoEncoderRunner
from triptych.runner.input_batch import InputBatch, TokenWindow
from triptych.runner.kv_cache import KVCache, KVCacheSpec, get_kv_cache_spec
from triptych.runner.kv_connector import KV_ARENA, KVConnector, get_kv_connector
from triptych.runner.language_model import LanguageModel, NoLanguageModel
from triptych.runner.logprobs import prompt_logprobs
from triptych.runner.request_state import RequestState
from triptych.runner.sampler import Sampler
from triptych.runner.structured_output import GrammarCompiler, GrammarMatchers
from triptych.runner.warm_up import warm_up
from triptych.transfer.arena import Arena
from triptych.transfer.data_plane import DataPlane

logger = logging.getLogger(__name__)


class ModelRunner:
    """Belongs to the engine thread."""

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        encoder_cache: EncoderCache,
        kv_cache: KVCache,
        ec_connector: ECConnector,
        kv_connector: KVConnector,
    ) -> None:
        self.config = config
        self.encoder_cache = encoder_cache
        self.kv_cache = kv_cache
        self.ec_connector = ec_connector
        self.kv_connector = kv_connector
        self.block_table = _make_block_table(config)
        self._encoder_runner = EncoderRunner(loaded, encoder_cache) if config.has_tower else NoEncoderRunner()
        self._language_model = (
            LanguageModel(loaded, config, kv_cache, self.block_table) if config.has_language_model else NoLanguageModel()
        )
        self.grammars = GrammarCompiler(config.model.path, config.model.vocab_size)
        self._matchers = GrammarMatchers(self.grammars)
        self._sampler = Sampler()
        self._requests: dict[str, RequestState] = {}

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step. What can be blamed on one request or item is in the output; anything else is raised."""
        self.encoder_cache.recycle(scheduler_output.freed_pages)
        self.kv_cache.recycle(scheduler_output.freed_block_ids)
        # Whatever fails below, the loads have begun and will be reported: the scheduler waits for the end of each.
        with (
            self.ec_connector.step(scheduler_output) as ec_output,
            self.kv_connector.step(scheduler_output) as kv_output,
        ):
            output = ModelRunnerOutput(ec_connector_output=ec_output, kv_connector_output=kv_output)
            output.failed_requests = self._update_states(scheduler_output)
            self._encode(scheduler_output, output)
            self._generate(scheduler_output, output)
            self.kv_connector.withhold(output.failed_requests)
            self.kv_connector.withhold(output.refused_requests)
            self.kv_connector.withhold(output.stalled_requests)
        return output

    def get_kv_cache_spec(self) -> tuple[KVCacheSpec, ...]:
        """One entry per KV cache group; none where there is no language model."""
        return get_kv_cache_spec(self.config)

    def dummy_run(self, num_requests: int = 1, num_tokens: int = 1) -> Tensor:
        """Hidden states of a made-up batch, [T, hidden]; an empty tensor where there is no language model. For start-up only."""
        return self._language_model.dummy_run(num_requests, num_tokens)

    def profile_run(self) -> Tensor:
        """The largest step there can be, so that memory runs out now or never; leaves both caches empty."""
        hidden = self.dummy_run(1, self.config.scheduler.max_num_batched_tokens)
        self.encoder_cache.reset()
        return hidden

    def warm_up(self) -> None:
        """Pay once, before the first request, for what the first run of each kind of step costs. Nothing to do without a language model."""
        warm_up(self._language_model, self.config.scheduler)

    def capture_model(self) -> int:
        """How many steps were captured as graphs to be replayed: none, every step runs eagerly."""
        return 0

    def close(self) -> None:
        """Wait for reads under way, then give the memory back. The data plane is closed before."""
        self.grammars.close()
        self.ec_connector.close()
        self.kv_connector.close()
        self.encoder_cache.close()
        self.kv_cache.close()

    def check_invariants(self) -> None:
        self.encoder_cache.check_invariants()
        rows = [request.block_row for request in self._requests.values()]
        assert len(set(rows)) == len(rows), "no two requests share a row of the block table"

    def _update_states(self, scheduler_output: SchedulerOutput) -> dict[str, str]:
        """Forget, add and extend requests; returns request id -> sentence for those that cannot run."""
        for request_id in scheduler_output.finished_request_ids:
            self._forget(request_id)
        failed: dict[str, str] = {}
        for data in scheduler_output.new_requests:
            self._forget(data.request_id)
            try:
                self._requests[data.request_id] = self._language_model.make_request(data)
            except Exception as error:  # the edge to a family's code: a prompt that it cannot place fails alone
                logger.warning("request %s cannot run", data.request_id, exc_info=True)
                failed[data.request_id] = f"the prompt of {len(data.token_ids)} tokens cannot be placed: {error}."
        for data in scheduler_output.cached_requests:
            request = self._requests.get(data.request_id)
            if request is not None:  # else it failed when it was new; `_window_of` says so if it is scheduled all the same
                request.num_computed_tokens = data.num_computed_tokens
                self._language_model.extend_request(request, data.new_block_ids)
        return failed

    def _forget(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._language_model.forget_request(request)

    def _encode(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> None:
        if not scheduler_output.encodes:
            return
        started = time.perf_counter()
        output.failed_encodes = self._encoder_runner.run(scheduler_output.encodes)
        output.encode_s = time.perf_counter() - started

    def _generate(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> None:
        windows = self._select_windows(scheduler_output, output)
        if not windows:  # no_forward: the connectors' steps run all the same
            return
        batch = self._language_model.make_batch(windows)
        hidden = self._language_model.forward(batch, self._gather_rows(batch))
        self._report_prompts(batch, hidden, output)
        requests = batch.sampled
        if requests:
            logits = self._language_model.sampled_logits(hidden, batch)
            masks = self._matchers.masks(requests, output)
            self._take_tokens(requests, self._sampler.sample(logits, requests, masks), output)
        for window in windows:
            window.request.num_computed_tokens = window.end

    def _report_prompts(self, batch: InputBatch, hidden: Tensor, output: ModelRunnerOutput) -> None:
        first = 0
        for window in batch.windows:
            request = window.request
            token_ids: list[int] = request.prompt_ids_to_report(window.start, window.end).tolist()
            if token_ids:
                num_alternatives, vocab_size = request.sampling.prompt_logprobs or 0, self.config.model.vocab_size
                own = hidden[first : first + len(token_ids)]
                tokens = prompt_logprobs(own, token_ids, num_alternatives, self._language_model.logits, vocab_size)
                if tokens is None:
                    output.failed_requests[request.request_id] = "the model gave NaN or infinity for a token of the prompt."
                else:
                    output.prompt_logprobs[request.request_id] = tokens
            first += window.num_tokens

    def _take_tokens(self, requests: list[RequestState], tokens: list[TokenLogprob | str], output: ModelRunnerOutput) -> None:
        for request, token in zip(requests, tokens, strict=True):
            ended = (output.failed_requests, output.refused_requests, output.completed)
            if any(request.request_id in each for each in ended):
                continue
            if isinstance(token, str):
                output.failed_requests[request.request_id] = token
                continue
            request.append_token(token.token_id)
            output.sampled[request.request_id] = token
            self._matchers.append(request, token.token_id, output)

    def _select_windows(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> list[TokenWindow]:
        """The windows that can be computed; says in `output` why the others cannot."""
        arriving = {load.ticket.key for load in scheduler_output.ec_connector_metadata.loads}
        arriving.update(encode.key for encode in scheduler_output.encodes)
        windows: list[TokenWindow] = []
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            if request_id in output.failed_requests:
                continue
            window, problem = self._window_of(request_id, num_tokens)
            if window is None:
                output.failed_requests[request_id] = problem
                continue
            absent = self._absent_items(window, scheduler_output.item_pages)
            lost = [item for item in absent if item.key not in arriving or item.key in self.encoder_cache]
            if not absent:
                windows.append(window)
            elif not lost:  # they were to arrive in this step, and did not
                output.stalled_requests.add(request_id)
            else:
                output.failed_requests[request_id] = self._describe_lost(window, lost[0])
        return windows

    def _window_of(self, request_id: str, num_tokens: int) -> tuple[TokenWindow | None, str]:
        """The request's next `num_tokens` tokens; or None, and what is wrong with them."""
        request = self._requests.get(request_id)
        if request is None:
            return None, f"request {request_id} is scheduled, and the runner does not know it."
        start, end = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        if not start < end <= request.num_tokens:
            return None, f"tokens {start} to {end} are scheduled of a request that has {request.num_tokens}."
        num_slots = self.block_table.num_slots(request.block_row)
        if end > num_slots:
            return None, f"tokens {start} to {end} are scheduled of a request whose blocks hold {num_slots}."
        return TokenWindow(request, start, end), ""

    def _absent_items(self, window: TokenWindow, item_pages: Mapping[str, tuple[int, ...]]) -> list[MediaItem]:
        """Items of which the window reads rows, and which are not where the scheduler says."""
        absent: list[MediaItem] = []
        for item in window.request.items_within(window.start, window.end):
            cached = self.encoder_cache.find(item.key)
            if cached is None or cached.num_rows != item.num_rows or cached.pages != item_pages.get(item.key):
                absent.append(item)
        return absent

    def _describe_lost(self, window: TokenWindow, item: MediaItem) -> str:
        state = self.encoder_cache.find(item.key) or "absent"
        return (
            f"tokens {window.start} to {window.end} read {item.num_rows} rows of {item.modality} {item.key}, "
            f"which was scheduled as resident and is not where it should be (in the encoder cache: {state})."
        )

    def _gather_rows(self, batch: InputBatch) -> Tensor:
        """[m, row_width]: what takes the places `batch.row_index`, in that order."""
        wanted: list[RowWindow] = []
        for window in batch.windows:
            for item in window.request.items_within(window.start, window.end):
                cached = self.encoder_cache.find(item.key)
                if cached is not None:  # `_select_windows` has made sure of it
                    wanted.append(RowWindow(cached.pages, item.rows_before(window.start), item.rows_before(window.end)))
        return self.encoder_cache.gather(wanted) if wanted else self._language_model.no_rows()


def make_runner(
    config: EngineConfig,
    loaded: LoadedModel,
    data_plane: DataPlane | None = None,
    on_progress: Callable[[], None] = lambda: None,
) -> ModelRunner:
    """Make the caches and connectors that the role needs, and the runner over them.

    `data_plane` may be None for a worker that serves alone. `on_progress` is called from a copy thread when a transfer ends: the
    engine should then run a step, if only an empty one.
    """
    device = loaded.model.device
    ec_arena = Arena.create(EC_ARENA, config.num_encoder_pages, config.encoder_page_nbytes)
    kv_arena = Arena.create(KV_ARENA, config.num_kv_blocks, config.kv_block_nbytes)
    encoder_cache = EncoderCache(ec_arena, config, device)
    kv_cache = KVCache(kv_arena, config, device)
    ec_connector = get_ec_connector(config, encoder_cache, data_plane, on_progress)
    kv_connector = get_kv_connector(config, kv_cache, data_plane, on_progress)
    return ModelRunner(config, loaded, encoder_cache, kv_cache, ec_connector, kv_connector)


def _make_block_table(config: EngineConfig) -> BlockTable:
    blocks_per_row = -(-config.model.max_model_len // config.cache.block_size)
    num_groups = len(get_kv_cache_spec(config))
    return BlockTable(num_groups, config.scheduler.max_num_seqs, blocks_per_row, config.cache.block_size)
