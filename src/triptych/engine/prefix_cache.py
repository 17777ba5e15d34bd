"""`PrefixCache`: what of a waiting request's tokens need not be computed, since blocks that hold it are here, or about to be.

It is looked up when the request arrives, which decides what items to ask for, and each time that it could start, when blocks may have gone or
come. Between the two nothing is reserved.
"""

from collections.abc import Iterable

from triptych.config import EngineConfig
from triptych.engine.block_hashes import BlockHashes, NoBlockHashes
from triptych.engine.encoder_cache_manager import Rank
from triptych.engine.events import EngineEvent, PrefixHit
from triptych.engine.kv_cache_manager import KVCacheManager
from triptych.engine.request import Request, RequestSpec
from triptych.engine.step_plan import StepPlan


class PrefixCache:
    def __init__(self, config: EngineConfig, kv: KVCacheManager) -> None:
        self._is_on = config.cache.enable_prefix_caching
        self._kv = kv
        self._block_size = kv.block_size
        self.num_tokens_asked = 0  # of requests that started
        self.num_tokens_found = 0

    def block_hashes(self, spec: RequestSpec) -> BlockHashes:
        return BlockHashes(self._block_size, spec.items, spec.cache_salt) if self._is_on else NoBlockHashes(self._block_size)

    def look_up(self, request: Request) -> bool:
        """Set the computed tokens of a request that has no blocks to those which the cache holds. Whether that has changed them."""
        num_found = self._kv.find_prefix(request.findable_hashes) * self._block_size
        has_changed = num_found != request.num_computed_tokens
        request.num_computed_tokens = num_found
        return has_changed

    def start(self, request: Request, num_tokens: int) -> bool:
        """Give the request what was found a moment ago, and blocks for `num_tokens` tokens more. False if they are not there."""
        num_shared = self._kv.start(request.request_id, request.findable_hashes, request.num_computed_tokens + num_tokens)
        if num_shared is None:
            return False
        assert num_shared * self._block_size == request.num_computed_tokens, "the prefix is another than a moment ago"
        if request.timeline.started_at is None:
            self.num_tokens_asked += len(request.token_ids)
            self.num_tokens_found += request.num_computed_tokens
        return True

    def tell(self, request: Request) -> list[EngineEvent]:
        """The news for the router, if it is any."""
        if request.num_cached_tokens == request.num_computed_tokens:
            return []
        request.num_cached_tokens = request.num_computed_tokens
        return [PrefixHit(request.request_id, request.num_computed_tokens)]

    def note_window(self, request: Request, num_tokens: int, plan: StepPlan) -> None:
        """The blocks that a window of the prompt writes to can be shared after this step."""
        first, end = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        hashes = request.block_hashes.extend(request.token_ids)
        plan.computing.update(hashes[first // self._block_size : -(-end // self._block_size)])

    def is_computed_by_another(self, request: Request, running: Iterable[Request], plan: StepPlan) -> bool:
        """Whether the block that the request would compute first is being computed: by a window of this step, or by a running request that is
        before it in line. It can be shared when it is done, which costs less than to compute it twice."""
        hashes, index = request.findable_hashes, request.num_computed_tokens // self._block_size
        if index >= len(hashes):
            return False
        if plan.under_way is None:
            plan.under_way = self._under_way(running)
        rank = plan.under_way.get(hashes[index])
        return hashes[index] in plan.computing or (rank is not None and rank < request.rank)

    def _under_way(self, running: Iterable[Request]) -> dict[bytes, Rank]:
        """Of each running request the block in which it computes next, if that is full already, with the rank of the first in line at it."""
        ranks: dict[bytes, Rank] = {}
        for request in running:
            if request.num_computed_tokens >= request.num_prompt_tokens:
                continue  # nobody waits for what it decodes
            hashes, index = request.block_hashes.extend(request.token_ids), request.num_computed_tokens // self._block_size
            if index < len(hashes):
                ranks[hashes[index]] = min(request.rank, ranks.get(hashes[index], request.rank))
        return ranks

    def enter(self, request: Request) -> None:
        """Whoever begins like the request can share what it has computed from now on."""
        num_full = request.num_computed_tokens // self._block_size
        if num_full > self._kv.num_entered(request.request_id):
            self._kv.enter(request.request_id, request.block_hashes.extend(request.token_ids)[:num_full])
