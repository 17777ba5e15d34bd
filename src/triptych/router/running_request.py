"""`GenerateJob`, what the pipeline is given, and `RunningRequest`, what comes of it while it runs."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from triptych.engine.block_hashes import BlockHashes
from triptych.errors import TriptychError
from triptych.media.item import MediaItem
from triptych.output import TokenLogprob
from triptych.router.timing import Stopwatch
from triptych.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class GenerateJob:
    """A rendered request. `media` has each item's file by key, and is kept until the end: an item may have to be encoded again."""

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    items: tuple[MediaItem, ...] = ()
    media: dict[str, bytes] = field(default_factory=dict[str, bytes])
    priority: int = 0
    cache_salt: str = ""


class RunningRequest:
    """Written by the pipeline, read by who started it: any number of tokens, then one end."""

    def __init__(self, job: GenerateJob, stopwatch: Stopwatch) -> None:
        self.job = job
        self.token_ids = list(job.token_ids)  # prompt and what was generated
        self.stopwatch = stopwatch
        self._num_calls = 0
        self._block_hashes: BlockHashes | None = None
        self.finish_reason = ""
        self.num_cached_tokens = 0  # of the prompt, as the first prefill worker found them
        self.prompt_logprobs: dict[int, TokenLogprob] = {}  # by the token's place; a replay may send some again
        self.waits_for = "a worker"  # in words, for the sentence of a deadline
        self._inbox: asyncio.Queue[tuple[TokenLogprob, ...] | TriptychError | None] = asyncio.Queue()

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - len(self.job.token_ids)

    def block_hashes(self, block_size: int) -> Sequence[bytes]:
        """Of the blocks that a worker can have of it."""
        if self._block_hashes is None:
            self._block_hashes = BlockHashes(block_size, self.job.items, self.job.cache_salt)
        return self._block_hashes.findable(self.token_ids)

    def next_call_id(self) -> str:
        """Each call to a worker has an id of its own, so that what is under way for an earlier one cannot touch a later."""
        self._num_calls += 1
        return f"{self.job.request_id}-{self._num_calls}"

    def see_prefix_hit(self, num_tokens: int) -> None:
        """The last word before the first token counts. What is found when it is prefilled again has partly been computed for this request."""
        if not self.stopwatch.num_replays and not self.num_generated_tokens:
            self.num_cached_tokens = num_tokens

    def add_prompt_logprobs(self, start: int, tokens: tuple[TokenLogprob, ...]) -> None:
        self.prompt_logprobs.update(enumerate(tokens, start))

    async def tokens(self) -> AsyncGenerator[tuple[TokenLogprob, ...]]:
        """Ends when the request has finished, or raises its one error."""
        while (message := await self._inbox.get()) is not None:
            if isinstance(message, TriptychError):
                raise message
            yield message

    def add(self, tokens: tuple[TokenLogprob, ...]) -> None:
        self.stopwatch.see_token()
        self.token_ids.extend(token.token_id for token in tokens)
        self._inbox.put_nowait(tokens)

    def finish(self, reason: str) -> None:
        self.finish_reason = reason
        self._inbox.put_nowait(None)

    def fail(self, error: TriptychError) -> None:
        self._inbox.put_nowait(error)
