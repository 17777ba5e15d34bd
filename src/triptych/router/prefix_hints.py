"""`PrefixHints`: which blocks of prompts each worker has computed and probably still keeps, by their hashes.

A hint, like those about items: taken from what was computed where, in the order in which a worker gives blocks up. When it is wrong, the
worker asks for what it needs, and the hint is forgotten.
"""

from collections import OrderedDict
from collections.abc import Sequence

from triptych.router.pool import PooledWorker


class PrefixHints:
    """Per worker as many blocks as it can keep. Hashes are those of `BlockHashes`, a prompt's in order from its first block on."""

    def __init__(self) -> None:
        self._held: dict[str, OrderedDict[bytes, None]] = {}  # worker id -> hashes, those that go first in front

    def num_tokens_held(self, worker: PooledWorker, hashes: Sequence[bytes]) -> int:
        """How much of the beginning need not be computed there."""
        held = self._held.get(worker.id, ())
        num_blocks = next((number for number, each in enumerate(hashes) if each not in held), len(hashes))
        return num_blocks * worker.info.fingerprint.block_size

    def remember(self, worker: PooledWorker, hashes: Sequence[bytes]) -> None:
        """The worker has computed these blocks. It gives up a prompt's last block first."""
        if not worker.is_ready:
            return
        held = self._held.setdefault(worker.id, OrderedDict())
        for each in reversed(hashes):
            held[each] = None
            held.move_to_end(each)
        capacity = worker.info.prefix_cache_tokens // worker.info.fingerprint.block_size
        while len(held) > capacity:
            held.popitem(last=False)

    def forget(self, worker: PooledWorker, hashes: Sequence[bytes]) -> None:
        held = self._held.get(worker.id, OrderedDict[bytes, None]())
        for each in hashes:
            held.pop(each, None)

    def forget_worker(self, worker: PooledWorker) -> None:
        self._held.pop(worker.id, None)
