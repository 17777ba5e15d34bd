"""Starting and stopping, with real processes: whatever happens, nothing of ours is left."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from urllib.error import HTTPError, URLError

import psutil
import pytest
from safetensors.torch import load_file, save_file
from server_state import Traces, eventually, is_alive, processes_of

from triptych.demo import CHECKPOINT
from triptych.launch.background import BackgroundServer

SMALL = ("--kv-cache-mib", "16", "--port", "0")


def run_triptych(*arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "triptych", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def health(url: str) -> int:
    """The status of /health; 0 while nobody answers."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5.0) as response:
            return int(response.status)
    except HTTPError as error:
        return error.code
    except (URLError, ConnectionError):
        return 0


def status_of(url: str, secret: str = "", body: bytes | None = None) -> int:
    """Of a GET, or of a POST with a body."""
    headers = {"authorization": f"Bearer {secret}"} if secret else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=5.0) as response:
            return int(response.status)
    except HTTPError as error:
        return error.code


@pytest.fixture
def shm_before() -> set[str]:
    return set(os.listdir("/dev/shm"))


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "tmp"
    folder.mkdir()
    return {"TMPDIR": str(folder)}


def test_ctrl_c_stops_in_order_and_leaves_nothing(tmp_path: Path, environment: dict[str, str], shm_before: set[str]) -> None:
    with BackgroundServer("demo", "--layout", "E1P1D1", *SMALL, environment=environment) as server:
        url = server.wait_until_ready()
        assert health(url) == 200
        traces = Traces(list(processes_of(server).values()), tmp_path / "tmp", shm_before)
        assert len(traces.processes) == 5  # router, fork server, three workers
        assert server.stop() == 0
        assert traces.are_gone(), traces.left()


def test_a_killed_launcher_leaves_nothing(tmp_path: Path, environment: dict[str, str], shm_before: set[str]) -> None:
    with BackgroundServer("demo", "--layout", "E1P1D1", *SMALL, environment=environment) as server:
        server.wait_until_ready()
        traces = Traces(list(processes_of(server).values()), tmp_path / "tmp", shm_before)
        server.process.send_signal(signal.SIGKILL)
        assert traces.are_gone(), traces.left()


def test_ctrl_c_while_starting_leaves_nothing_and_says_nothing(tmp_path: Path) -> None:
    with (tmp_path / "stderr").open("w+") as stderr, BackgroundServer("demo", *SMALL, stderr=stderr) as server:
        assert eventually(lambda: len(psutil.Process(server.process.pid).children()) == 2)
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert server.stop() == 0
        assert eventually(lambda: not any(is_alive(child) for child in children))
        stderr.seek(0)
        assert stderr.read() == ""


def test_a_killed_worker_is_started_again_and_served_by(tmp_path: Path) -> None:
    with (tmp_path / "stderr").open("w+") as stderr, BackgroundServer("demo", *SMALL, stderr=stderr) as server:
        url = server.wait_until_ready()
        first = processes_of(server)["aggregated-0"]
        first.kill()
        assert eventually(lambda: health(url) == 503)
        assert eventually(lambda: health(url) == 200, timeout_s=30.0)
        assert processes_of(server)["aggregated-0"].pid != first.pid
        stderr.seek(0)
        assert "aggregated-0 died (SIGKILL); starting it again" in stderr.read()


def test_a_killed_router_is_started_again_and_finds_its_workers() -> None:
    with BackgroundServer("demo", *SMALL) as server:
        url = server.wait_until_ready()
        processes_of(server)["router"].kill()
        assert eventually(lambda: health(url) == 200, timeout_s=30.0)


@pytest.mark.parametrize("secret", ["a-secret-of-the-environment", ""])
def test_members_need_the_clusters_secret_which_no_command_line_and_no_log_shows(secret: str, tmp_path: Path) -> None:
    """Without one in the environment, `serve` makes its own, which nobody knows."""
    environment = {"TRIPTYCH_CLUSTER_SECRET": secret} if secret else {}
    with (
        (tmp_path / "stderr").open("w+") as stderr,
        BackgroundServer("demo", *SMALL, stderr=stderr, environment=environment) as server,
    ):
        router = server.wait_until_ready()
        connections = processes_of(server)["aggregated-0"].net_connections("tcp")
        port = next(each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN)
        worker = f"http://127.0.0.1:{port}"
        registration = b'{"url": "%s"}' % worker.encode()
        assert [status_of(f"{worker}/inference/v1/{path}") for path in ("info", "watch")] == [401, 401]
        assert [status_of(f"{worker}/inference/v1/{path}", "x" * 64, b"{}") for path in ("generate", "encode", "ec")] == [401] * 3
        assert [status_of(f"{worker}/{path}") for path in ("health", "metrics")] == [200, 200]
        assert status_of(f"{router}/workers", "", registration) == 401
        assert status_of(f"{router}/v1/models") == 200
        if secret:
            assert status_of(f"{worker}/inference/v1/info", secret) == 200
            assert status_of(f"{router}/workers", secret, registration) == 200
            processes = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
            assert not any(secret in " ".join(process.cmdline()) for process in processes)
        stderr.seek(0)
        log = stderr.read()
        assert log.count("without this cluster's secret") == 2  # once by the worker, once by the router
        assert not secret or secret not in log


def test_a_secret_that_is_none_is_refused_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_CLUSTER_SECRET", "short")
    for command in (("serve",), ("route",), ("worker", "--role", "EPD")):
        result = run_triptych(*command, "demo", "--port", "0")
        assert (result.returncode, result.stderr.count("\n")) == (2, 1)
        assert "the cluster secret must be" in result.stderr
        assert "short" not in result.stderr


def test_a_port_in_use_is_one_sentence_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        started_at = time.monotonic()
        result = run_triptych("serve", "demo", "--port", str(taken.getsockname()[1]))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1
    assert "Address already in use" in result.stderr
    assert time.monotonic() - started_at < 5.0


def test_a_missing_model_folder_is_one_sentence() -> None:
    result = run_triptych("serve", "./no/such/folder", *SMALL)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert "./no/such/folder" in result.stderr


def test_weights_that_are_cut_short_are_one_sentence(broken: Path) -> None:
    weights = broken / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    assert_start_fails(broken, "model.safetensors")


def test_a_worker_that_dies_while_starting_ends_everything_with_one_sentence(broken: Path) -> None:
    weights = broken / "model.safetensors"
    tensors = load_file(weights)
    missing = next(name for name in tensors if "layers.0.mlp" in name)
    save_file({name: tensor for name, tensor in tensors.items() if name != missing}, weights, metadata={"format": "pt"})
    assert_start_fails(broken, "died while starting")


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A copy of the checkpoint, to be spoilt."""
    return Path(shutil.copytree(CHECKPOINT, tmp_path / "broken"))


def assert_start_fails(model: Path, words: str) -> None:
    children_before = set(psutil.Process().children(recursive=True))
    result = run_triptych("serve", str(model), "--layout", "E1P1D1", *SMALL)
    assert result.returncode in (1, 2)
    assert result.stdout == ""
    sentences = [line for line in result.stderr.splitlines() if not line.endswith("is ready")]
    assert len(sentences) == 1, result.stderr
    assert words in sentences[0]
    assert set(psutil.Process().children(recursive=True)) <= children_before


def test_a_layout_without_decode_is_refused_with_the_flag_that_adds_it() -> None:
    result = run_triptych("serve", "demo", "--encode", "1", "--prefill", "1")
    assert result.returncode == 2
    assert "--decode 1" in result.stderr


def test_an_unknown_flag_gets_the_nearest_one() -> None:
    result = run_triptych("serve", "demo", "--block-sise", "4")
    assert result.returncode == 2
    assert "--block-size" in result.stderr


def test_the_command_line_and_the_router_import_no_torch() -> None:
    code = "import sys, triptych.cli, triptych.launch.launcher, triptych.router.router; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
