"""`--ec-connector` with real processes: the file connector gives the answers of one process, and a wrong flag one sentence."""

import subprocess
import sys
from pathlib import Path

import pytest
from chat_parts import data_url, fresh_picture, png, user
from openai import OpenAI
from safetensors import safe_open

from triptych.launch.background import BackgroundServer

SMALL = ("--kv-cache-mib", "32", "--port", "0")


def answer_of(url: str, picture: bytes) -> str | None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60.0)
    messages = user("describe the picture.", data_url(picture))
    return client.chat.completions.create(model="demo", messages=messages, temperature=0).choices[0].message.content


def test_the_file_connector_gives_the_answers_of_one_process_and_leaves_a_file_per_picture(tmp_path: Path, epd1: str):
    pictures = [png(fresh_picture(f"file {index}")) for index in range(3)]
    wanted = [answer_of(epd1, picture) for picture in pictures]
    connector = ("--ec-connector", "file", "--ec-path", str(tmp_path))
    with BackgroundServer("demo", "--layout", "E1P1D1", *connector, *SMALL) as server:
        url = server.wait_until_ready()
        assert [answer_of(url, picture) for picture in [*pictures, *pictures]] == [*wanted, *wanted]
    files = list(tmp_path.iterdir())
    assert len(files) == 3
    assert len(set(wanted)) > 1, "answers that are all alike prove little"
    for file in files:
        assert len(file.stem) == 64
        with safe_open(file, framework="numpy") as opened:
            assert list(opened.keys()) == ["rows"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    (
        (("--ec-connector", "fil"), "ec_connector is 'fil', which does not exist; did you mean 'file'?"),
        (("--ec-connector", "file"), "the file EC connector needs a directory; set --ec-path DIR."),
    ),
)
def test_a_wrong_connector_is_one_sentence_before_anything_starts(flags: tuple[str, ...], sentence: str):
    command = [sys.executable, "-m", "triptych", "serve", "demo", "--layout", "E1PD1", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False)
    assert (ended.returncode, ended.stderr) == (2, f"triptych: {sentence}\n")
