"""Every family through encode, prefill and decode workers: pictures cut by chunks, deepstack, separators, bidirectional items."""

import asyncio
from pathlib import Path

import pytest
import torch
from cluster import running_cluster
from tiny_families import FAMILIES, IMAGE, SIZES, Case, build_prompt, noise, save_tiny_model

from triptych.media.item import MediaItem
from triptych.router.running_request import GenerateJob
from triptych.sampling_params import SamplingParams

NUM_TOKENS = 5


def continuation(case: Case, prompt: list[int], files: list[bytes]) -> tuple[list[int], list[float]]:
    """Greedy, by the whole model's forward over everything so far, again for each token."""
    inputs = case.tower_inputs_of_the_library(files)
    ids, logprobs = list(prompt), list[float]()
    for _ in range(NUM_TOKENS):
        tokens = torch.tensor([ids])
        types = {case.family.types_name: (tokens == IMAGE).int()} if case.family.types_name else {}
        with torch.inference_mode():
            logits = case.whole(input_ids=tokens, **types, **inputs).logits[0, -1]
        best = torch.log_softmax(logits, -1).max(-1)
        ids.append(int(best.indices))
        logprobs.append(float(best.values))
    return ids[len(prompt) :], logprobs


@pytest.mark.parametrize("name", FAMILIES)
async def test_a_family_served_apart_gives_the_whole_models_tokens(name: str, tmp_path: Path):
    case = save_tiny_model(name, tmp_path, [noise(seed, size) for seed, size in enumerate(SIZES)])
    async with running_cluster("E1P1D1", model=tmp_path, block_size=4, chunk=7) as cluster:
        for count in (1, 3):
            files = case.files[-count:]
            prompt, items = build_prompt([case.lay_out(data, count) for data in files])
            keys = [f"{count}{index}".ljust(64, "0") for index in range(count)]
            keyed = tuple(
                MediaItem(key, "image", item.runs, item.num_rows, item.grid) for key, item in zip(keys, items, strict=True)
            )
            sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, logprobs=0)
            job = GenerateJob(f"r{count}", tuple(prompt), sampling, keyed, dict(zip(keys, files, strict=True)))
            answer = await asyncio.wait_for(cluster.ask(job), 60.0)
            tokens, logprobs = continuation(case, prompt, files)
            assert answer.tokens == tokens
            assert answer.logprobs == pytest.approx(logprobs, abs=1e-3)


@pytest.mark.parametrize("name", FAMILIES)
async def test_what_follows_a_prefix_hit_inside_a_picture_is_computed_as_by_the_whole_model(name: str, tmp_path: Path):
    """The second prompt is the first up to the end of its picture, which is not the end of a block."""
    case = save_tiny_model(name, tmp_path, [noise(0, SIZES[0])])
    (file,) = case.files
    prompt, (item,) = build_prompt([case.lay_out(file, 1)])
    end = item.end
    block_size = next(each for each in (4, 5, 7) if end % each and end - end % each > item.start)
    other = [*prompt[:end], *reversed(prompt[end:]), 7]
    keyed = (MediaItem("1".ljust(64, "0"), "image", item.runs, item.num_rows, item.grid),)
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, logprobs=0)
    async with running_cluster("EPD1", model=tmp_path, block_size=block_size, chunk=64) as cluster:
        for number, tokens in enumerate((prompt, other)):
            job = GenerateJob(f"r{number}", tuple(tokens), sampling, keyed, {keyed[0].key: file})
            answer = await asyncio.wait_for(cluster.ask(job), 60.0)
            wanted, logprobs = continuation(case, tokens, [file])
            assert answer.tokens == wanted
            assert answer.logprobs == pytest.approx(logprobs, abs=1e-3)
        assert cluster.workers[0].counters()["prefix_cache_hits"] == end - end % block_size
