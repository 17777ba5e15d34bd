"""What `make bench-smoke` runs: start-up, decode step and TTFT, each beside its target. A figure that misses its target fails the run.

On a busy machine the figures mean little: the table says how busy it was.
"""

import base64
import io
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from openai import OpenAI
from rich.console import Console
from rich.table import Table

from triptych.demo.pictures import draw, random_picture
from triptych.launch.background import BackgroundServer

NUM_PAIRS, NUM_WARM_UP = 40, 5
LAYOUTS = ("EPD1", "E1P1D1")


@dataclass(frozen=True)
class Figure:
    """`limit` is the most that the figure may be; None where there is no target."""

    what: str
    value: float
    unit: str
    limit: float | None = None

    @property
    def is_met(self) -> bool:
        return self.limit is None or self.value <= self.limit


def serving_figures(console: Console) -> list[Figure]:
    """Start-up of both layouts, one after the other, then TTFT with both up and requests in turns."""
    figures: list[Figure] = []
    flags = ("--port", "0", "--kv-cache-mib", "64")
    with (
        BackgroundServer("demo", "--layout", LAYOUTS[0], *flags) as aggregated,
        start_measured(aggregated, LAYOUTS[0], figures) as first,
        BackgroundServer("demo", "--layout", LAYOUTS[1], *flags) as disaggregated,
        start_measured(disaggregated, LAYOUTS[1], figures) as second,
    ):
        console.print(f"{NUM_PAIRS} requests to each of {LAYOUTS[0]} and {LAYOUTS[1]}, in turns")
        pairs = ttft_pairs(first, second)
    medians = [1000 * median(column) for column in zip(*pairs, strict=True)]
    figures += [Figure(f"TTFT of {layout}", value, "ms") for layout, value in zip(LAYOUTS, medians, strict=True)]
    figures.append(Figure(f"TTFT that {LAYOUTS[1]} adds", medians[1] - medians[0], "ms", limit=15.0))
    return figures


def start_measured(server: BackgroundServer, layout: str, figures: list[Figure]) -> OpenAI:
    """A client, once the server is ready; the time from its command goes into `figures`."""
    url = server.wait_until_ready()
    figures.append(Figure(f"start-up of {layout}", time.monotonic() - server.started_at, "s", limit=10.0))
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def ttft_pairs(first: OpenAI, second: OpenAI) -> list[tuple[float, float]]:
    """Seconds to the first token, by pair; every picture is new to both servers, and each goes first in every other pair."""
    pairs: list[tuple[float, float]] = []
    for number in range(NUM_PAIRS + NUM_WARM_UP):
        request = fresh_request(Random(number))
        if number % 2:
            pairs.append((ttft(first, request), ttft(second, request)))
        else:
            later = ttft(second, request)
            pairs.append((ttft(first, request), later))
    return pairs[NUM_WARM_UP:]


def fresh_request(rng: Random) -> dict[str, Any]:
    file = io.BytesIO()
    draw(random_picture(rng, (168, 168))).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "describe the picture."}]
    return {"model": "demo", "messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 4}


def ttft(client: OpenAI, request: dict[str, Any]) -> float:
    """The stream is read to its end, so that requests never overlap."""
    started_at = time.perf_counter()
    first_at = 0.0
    for chunk in client.chat.completions.create(**request, stream=True):
        if not first_at and chunk.choices and chunk.choices[0].delta.content:
            first_at = time.perf_counter()
    return first_at - started_at


def decode_figures() -> list[Figure]:
    script = Path(__file__).with_name("decode_step.py")
    output = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True).stdout
    results = {int(size): pair for size, pair in json.loads(output).items()}
    (ours_1, bare_1), (ours_8, bare_8) = ((results[size]["ours_s"], results[size]["bare_s"]) for size in (1, 8))
    return [
        Figure("decode step at batch 1 ÷ bare forward", ours_1 / bare_1, "", limit=1.5),
        Figure("decode per token at batch 8 ÷ bare forward at batch 1", ours_8 / 8 / bare_1, "", limit=0.5),
        Figure("decode step at batch 8 ÷ bare forward at batch 8", ours_8 / bare_8, ""),
    ]


def show(console: Console, figures: list[Figure]) -> None:
    table = Table(caption=f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}")
    for heading in ("", "measured", "target", ""):
        table.add_column(heading, justify="left" if not heading else "right")
    for each in figures:
        target = "" if each.limit is None else f"≤ {each.limit:g} {each.unit}"
        verdict = "" if each.limit is None else "met" if each.is_met else "missed"
        table.add_row(each.what, f"{each.value:.2f} {each.unit}", target, verdict)
    console.print(table)


def main() -> int:
    console = Console()
    figures = serving_figures(console)
    console.print("decode steps, ours and bare ones in turns")
    figures += decode_figures()
    show(console, figures)
    return 0 if all(each.is_met for each in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
