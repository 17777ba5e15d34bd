"""The examples run as they stand."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import psutil
import pytest

from triptych.launch.options import free_port

EXAMPLES = Path(__file__).parents[2] / "examples"
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


@contextmanager
def running(script: str, port: int) -> Generator[subprocess.Popen[bytes]]:
    """In a session of its own, as in a terminal; whatever is left of it is killed in the end."""
    process = subprocess.Popen([EXAMPLES / script, "demo", str(port)], env=ENVIRONMENT, start_new_session=True)
    try:
        yield process
    finally:
        for left in session_of(process.pid):
            left.kill()
        process.wait()


def session_of(session: int) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def is_healthy(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/health", timeout=5.0) as response:
            return response.status == 200
    except (URLError, ConnectionError):  # an error status is a URLError, too
        return False


def registration_without_secret(port: int) -> int:
    try:
        with urlopen(f"http://127.0.0.1:{port}/workers", b'{"url": "http://127.0.0.1:1"}', timeout=5.0) as response:
            return response.status
    except HTTPError as error:
        return error.code


@pytest.mark.parametrize("script", ["serve_1e1pd.sh", "serve_1e1p1d.sh"])
def test_a_layouts_script_serves_and_ctrl_c_stops_all_of_it(script: str) -> None:
    port = free_port("127.0.0.1", 0)
    with running(script, port) as process:
        deadline_s = time.monotonic() + 120.0
        while not is_healthy(port):
            assert process.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.1)
        assert registration_without_secret(port) == 401
        os.killpg(process.pid, signal.SIGINT)
        process.wait(timeout=30.0)
        assert session_of(process.pid) == []


def test_the_demo_answers_every_question_and_says_where_the_time_went() -> None:
    result = subprocess.run([sys.executable, EXAMPLES / "demo.py"], capture_output=True, text=True, timeout=200.0, check=False)
    assert result.returncode == 0, result.stderr
    assert len(re.findall(r"answer    \S", result.stdout)) == 5
    for part in ("preprocess", "encode", "EC transfer", "prefill", "KV transfer", "decode", "sum"):
        assert re.search(rf"{part} .*\d", result.stdout)
