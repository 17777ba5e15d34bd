"""One decode step of our engine (schedule, forward, sample, update) beside the bare forward of the same model in transformers with its own cache.

Both run in this process, in turns, at the same context lengths; prints median seconds per step and batch size as JSON.
"""

import json
import sys
import time
from statistics import median
from typing import Any

import torch
from transformers import Qwen2_5_VLForConditionalGeneration

from triptych.config import CacheConfig, DeviceConfig, EngineConfig
from triptych.engine.core import EngineCore
from triptych.engine.events import NewTokens
from triptych.engine.request import RequestSpec
from triptych.models.inspect import resolve_model
from triptych.models.loader import load_model
from triptych.runner.model_runner import make_runner
from triptych.sampling_params import SamplingParams

PROMPT_TOKENS = 200  # a question about a picture or two
NUM_STEPS, NUM_WARM_UP = 120, 10
BATCH_SIZES = (1, 8)


class OurEngine:
    def __init__(self) -> None:
        model = resolve_model("demo")
        config = EngineConfig(model, cache=CacheConfig(kv_cache_nbytes=64 * 1024**2), device=DeviceConfig("cpu"))
        runner = make_runner(config, load_model(model))
        runner.warm_up()
        self._core = EngineCore(config, runner, time.monotonic)

    def prefill(self, prompts: list[list[int]]) -> None:
        sampling = SamplingParams(max_tokens=NUM_STEPS + NUM_WARM_UP + 2, temperature=0.0)
        for number, prompt in enumerate(prompts):
            self._core.add_request(RequestSpec(f"{len(prompts)}-{number}", tuple(prompt), len(prompt), sampling))
        num_first_tokens = 0
        while num_first_tokens < len(prompts):
            num_first_tokens += sum(isinstance(event, NewTokens) for event in self._core.step()[0])

    def step(self) -> None:
        self._core.step()

    def finish(self, num_requests: int) -> None:
        for number in range(num_requests):
            self._core.scheduler.abort(f"{num_requests}-{number}")
        self._core.step()


class BareForward:
    def __init__(self) -> None:
        self._model = Qwen2_5_VLForConditionalGeneration.from_pretrained(resolve_model("demo").path, dtype=torch.float32).eval()

    def prefill(self, prompts: list[list[int]]) -> None:
        self._keep(self._model(torch.tensor(prompts), use_cache=True))

    def step(self) -> None:
        self._keep(self._model(self._tokens, cache=self._cache, use_cache=True))

    def _keep(self, output: Any) -> None:
        self._cache = output.cache
        self._tokens = output.logits[:, -1:].argmax(-1)  # [batch, 1]


def seconds_of(step: Any) -> float:
    started_at = time.perf_counter()
    step()
    return time.perf_counter() - started_at


@torch.inference_mode()
def measure(batch_size: int, ours: OurEngine, bare: BareForward) -> tuple[float, float]:
    """Median seconds of one step: ours, bare."""
    generator = torch.Generator().manual_seed(batch_size)
    prompts = torch.randint(16, 1000, (batch_size, PROMPT_TOKENS), generator=generator).tolist()
    ours.prefill(prompts)
    bare.prefill(prompts)
    pairs = [(seconds_of(ours.step), seconds_of(bare.step)) for _ in range(NUM_STEPS + NUM_WARM_UP)][NUM_WARM_UP:]
    ours.finish(batch_size)
    return median(pair[0] for pair in pairs), median(pair[1] for pair in pairs)


def main() -> None:
    torch.set_num_threads(1)  # the model is so small that a second thread only waits, and makes the ratio one of luck
    ours, bare = OurEngine(), BareForward()
    results = {batch_size: measure(batch_size, ours, bare) for batch_size in BATCH_SIZES}
    json.dump({str(size): {"ours_s": pair[0], "bare_s": pair[1]} for size, pair in results.items()}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
