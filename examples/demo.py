"""What `make demo` runs: three workers answer questions about pictures, asked with the official openai client.

Draws pictures, starts `triptych serve demo --encode 1 --prefill 1 --decode 1`, asks, and shows each picture, question and answer, where the
time of each request went, and stops everything. The pictures stay in out/demo.
"""

import base64
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from openai import OpenAI, OpenAIError
from openai.types.chat import ChatCompletionChunk
from PIL import Image
from rich.columns import Columns
from rich.console import Console
from rich.table import Table
from rich.text import Text

from triptych.demo.pictures import Picture, Question, draw, questions_about, random_picture
from triptych.errors import StartError
from triptych.launch.background import BackgroundServer

FOLDER = Path(__file__).parents[1] / "out" / "demo"
# Per request: the size of each picture, the sort of question, and whether the answer is streamed.
SCRIPT = (
    (((112, 112),), "colour", False),
    (((168, 112),), "shape", True),
    (((140, 140),), "count", False),
    (((168, 168),), "describe", True),
    (((112, 112), (112, 112)), "colour", False),
)
# The parts of an answer's `timing`, in the order in which they happen, and what to call them.
PARTS = {
    "preprocess": "preprocess",
    "encode_queue": "encode queue",
    "encode": "encode",
    "ec_transfer": "EC transfer",
    "prefill_queue": "prefill queue",
    "prefill": "prefill",
    "kv_transfer": "KV transfer",
    "decode": "decode",
    "router": "router, HTTP",
}


@dataclass(frozen=True)
class Scene:
    """One request of the demo. `files` are the pictures as they are sent."""

    pictures: tuple[Picture, ...]
    files: tuple[Path, ...]
    question: Question
    is_streamed: bool


@dataclass(frozen=True)
class Answer:
    """`timing` in milliseconds by part, and counts; `seen_ms` is what the client measured."""

    text: str
    timing: dict[str, float]
    seen_ms: float


def make_scenes(seed: int) -> list[Scene]:
    FOLDER.mkdir(parents=True, exist_ok=True)
    rng = Random(seed)
    scenes: list[Scene] = []
    for sizes, sort, is_streamed in SCRIPT:
        pictures = tuple(random_picture(rng, size) for size in sizes)
        files = tuple(FOLDER / f"{len(scenes) + 1}{'ab'[i] if len(sizes) > 1 else ''}.png" for i in range(len(sizes)))
        for picture, file in zip(pictures, files, strict=True):
            draw(picture).save(file)
        question = rng.choice([each for each in questions_about(pictures) if each.sort == sort])
        scenes.append(Scene(pictures, files, question, is_streamed))
    return scenes


def ask(client: OpenAI, console: Console, scene: Scene) -> Answer:
    urls = ["data:image/png;base64," + base64.b64encode(file.read_bytes()).decode() for file in scene.files]
    content: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content.append({"type": "text", "text": scene.question.text})
    request: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 40,
    }
    started_at = time.perf_counter()
    if scene.is_streamed:
        text, extra = print_stream(console, client.chat.completions.create(**request, stream=True))
    else:
        completion = client.chat.completions.create(**request)
        text, extra = completion.choices[0].message.content or "", completion.model_extra or {}
        console.print(text, markup=False, highlight=False, end="")
    return Answer(text, extra["timing"], 1000 * (time.perf_counter() - started_at))


def print_stream(console: Console, chunks: Iterable[ChatCompletionChunk]) -> tuple[str, dict[str, Any]]:
    """The text, printed as it comes, and what the last chunk has beside it."""
    text, extra = "", dict[str, Any]()
    for chunk in chunks:
        piece = chunk.choices[0].delta.content or "" if chunk.choices else ""
        console.print(piece, markup=False, highlight=False, end="")
        text, extra = text + piece, {**extra, **(chunk.model_extra or {})}
    return text, extra


def sketch(file: Path, width: int = 28) -> Text:
    """The picture in half blocks: two pixels a character, the upper one its colour, the lower one its ground."""
    image = Image.open(file).convert("RGB")
    pixels = np.asarray(image.resize((width, 2 * round(width * image.height / image.width / 2))))
    text = Text()
    for upper_row, lower_row in zip(pixels[::2], pixels[1::2], strict=True):
        for upper, lower in zip(upper_row, lower_row, strict=True):
            text.append("▀", style=f"#{upper.tobytes().hex()} on #{lower.tobytes().hex()}")
        text.append("\n")
    return text


def show_times(console: Console, answers: list[Answer]) -> None:
    table = Table(
        title="Where the time went (ms)",
        caption="The parts add up to the total. What ran beside an encode that prefill waited for counts as encode.",
    )
    table.add_column("")
    for number in range(len(answers)):
        table.add_column(str(number + 1), justify="right")
    for part, words in PARTS.items():
        table.add_row(words, *(f"{answer.timing[part]:.1f}" for answer in answers))
    table.add_section()
    table.add_row("sum", *(f"{sum(answer.timing[part] for part in PARTS):.1f}" for answer in answers), style="bold")
    table.add_row("seen by the client", *(f"{answer.seen_ms:.1f}" for answer in answers))
    console.print(table)


def main() -> int:
    console = Console()
    scenes = make_scenes(seed=int(sys.argv[1]) if len(sys.argv) > 1 else 7)
    console.print("triptych serve demo --encode 1 --prefill 1 --decode 1", style="bold")
    with BackgroundServer("demo", "--encode", "1", "--prefill", "1", "--decode", "1", "--port", "0") as server:
        url = server.wait_until_ready()
        console.print(f"ready on {url} after {time.monotonic() - server.started_at:.1f} s\n", highlight=False)
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        answers: list[Answer] = []
        for number, scene in enumerate(scenes, start=1):
            console.print(f"{number}. " + ", ".join(str(file) for file in scene.files), highlight=False, soft_wrap=True)
            if console.is_terminal:
                console.print(Columns([sketch(file) for file in scene.files]))
            console.print(f"   question  {scene.question.text}\n   answer    ", highlight=False, end="")
            answers.append(ask(client, console, scene))
            console.print(f"\n   expected  {scene.question.answer}\n", highlight=False)
        show_times(console, answers)
    num_right = sum(answer.text == scene.question.answer for answer, scene in zip(answers, scenes, strict=True))
    console.print(f"{num_right} of {len(scenes)} answers as expected; router and workers stopped.", highlight=False)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OpenAIError, StartError) as error:
        sys.exit(f"demo: {error}")
