"""Warm-up: run each kind of step once before the first request, so that no client pays for lazy initialisation."""

from triptych.config import SchedulerConfig
from triptych.runner.language_model import LanguageModel

_NUM_PREFILL_TOKENS = 256  # enough to make thread pools and kernels start; more only takes longer


def warm_up(language_model: LanguageModel, config: SchedulerConfig) -> None:
    """A prefill, a decode of one request and a decode of several. The blocks it wrote are cleared when a request gets them."""
    language_model.dummy_run(1, min(_NUM_PREFILL_TOKENS, config.max_num_batched_tokens))
    for num_requests in (1, min(8, config.max_num_seqs)):
        language_model.dummy_run(num_requests, 1)
