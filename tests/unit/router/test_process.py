"""The router as a process: what it imports, how it starts, how it stops."""

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from triptych.demo import CHECKPOINT
from triptych.errors import StartError
from triptych.models.inspect import resolve_model
from triptych.router.options import RouterOptions
from triptych.router.router import run_router

RUN = """
import sys
from triptych.config import ClusterLayout
from triptych.models.inspect import resolve_model
from triptych.router.options import RouterOptions
from triptych.router.router import run_router
run_router(RouterOptions(resolve_model(sys.argv[1], name="demo"), port=int(sys.argv[2]), layout=ClusterLayout.parse("E1P1D1")))
print("stopped", "torch" in sys.modules, "transformers" in sys.modules, flush=True)
"""


def test_importing_the_package_and_the_router_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, triptych, triptych.router.router; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_port_in_use_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=rf"cannot listen on 127\.0\.0\.1:{port}.*--port"):
            run_router(RouterOptions(resolve_model(CHECKPOINT), port=port))


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_within_seconds_and_it_never_imported_torch(signum: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-c", RUN, str(CHECKPOINT), str(port)], stdout=subprocess.PIPE, text=True)
    try:
        assert wait_for_models(port) == ["demo"]
        started = time.monotonic()
        process.send_signal(signum)
        output, _ = process.communicate(timeout=10)
        assert time.monotonic() - started < 5
        assert (process.returncode, output.strip()) == (0, "stopped False False")
    finally:
        process.kill()


def wait_for_models(port: int) -> list[str]:
    deadline = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=1) as response:
                return [card["id"] for card in json.load(response)["data"]]
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def test_the_sources_of_the_router_name_neither_torch_nor_transformers() -> None:
    folder = Path(__file__).parents[3] / "src" / "triptych" / "router"
    for path in folder.glob("*.py"):
        assert "import torch" not in path.read_text(), path
        assert "from transformers" not in path.read_text(), path
