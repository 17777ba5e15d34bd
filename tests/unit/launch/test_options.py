import socket
from pathlib import Path

import pytest

from triptych.config import ClusterLayout, DeviceConfig, EngineConfig, ModelConfig, Role
from triptych.errors import ConfigError, StartError
from triptych.launch.options import (
    ServeOptions,
    choose_layout,
    cluster_secret,
    free_port,
    role_name,
    threads_per_worker,
    worker_configs,
)
from triptych.launch.settings import sections_from
from triptych.router.options import RouterOptions

MODEL = ModelConfig(
    path=Path("/model"), name="m", family="qwen2_5_vl", weights_digest="d", dtype="float32", max_model_len=128,
    vocab_size=16, hidden_size=8, num_layers=1, num_kv_heads=1, head_dim=8,
)  # fmt: skip


def configs(layout: str, **settings: object) -> dict[str, EngineConfig]:
    return worker_configs(ClusterLayout.parse(layout), MODEL, sections_from(settings))


def options(layout: str) -> ServeOptions:
    router = RouterOptions(model=MODEL, layout=ClusterLayout.parse(layout))
    return ServeOptions(ClusterLayout.parse(layout), router, configs(layout))


def test_one_worker_does_everything_by_default() -> None:
    assert str(choose_layout(None, None, None, None)) == "EPD1"


def test_counts_and_layout_say_the_same() -> None:
    assert choose_layout(None, 1, 2, 3) == choose_layout("E1P2D3", None, None, None)


def test_a_count_of_zero_leaves_the_stage_out() -> None:
    assert str(choose_layout(None, 0, 1, 1)) == "P1D1"


def test_layout_and_counts_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="twice"):
        choose_layout("EPD1", 1, None, None)


def test_a_missing_stage_is_refused_with_the_flag_that_adds_it() -> None:
    with pytest.raises(ConfigError, match="--decode 1"):
        choose_layout(None, 1, 1, None)


@pytest.mark.parametrize(
    ("role", "name"),
    [("E", "encode"), ("P", "prefill"), ("D", "decode"), ("EP", "encode-prefill"), ("PD", "prefill-decode"),
     ("ED", "encode-decode"), ("EPD", "aggregated")],
)  # fmt: skip
def test_a_role_is_named_after_its_stages(role: str, name: str) -> None:
    assert role_name(Role.parse(role)) == name


def test_workers_are_numbered_within_their_role() -> None:
    assert list(configs("E2P1D2")) == ["encode-0", "encode-1", "prefill-0", "decode-0", "decode-1"]


def test_a_worker_is_alone_only_in_a_layout_of_one() -> None:
    assert [config.is_alone for config in configs("EPD1").values()] == [True]
    assert [config.is_alone for config in configs("EPD2").values()] == [False, False]


def test_cores_are_shared_out_and_nobody_gets_none() -> None:
    assert [threads_per_worker(8, workers) for workers in (1, 3, 8, 20)] == [8, 2, 1, 1]


def test_a_number_of_threads_that_was_asked_for_is_kept() -> None:
    assert {config.device for config in configs("E1P1D1", num_threads=7).values()} == {DeviceConfig(num_threads=7)}


def test_the_cluster_secret_is_the_environments_without_the_end_of_its_line() -> None:
    assert cluster_secret({"TRIPTYCH_CLUSTER_SECRET": "0123456789abcdef\n"}) == "0123456789abcdef"
    assert cluster_secret({}) == ""


@pytest.mark.parametrize("value", ["", " ", "\n", "short", "0123456789 abcdef"])
def test_a_cluster_secret_that_is_set_and_none_is_refused_instead_of_an_open_cluster(value: str) -> None:
    with pytest.raises(ConfigError, match="TRIPTYCH_CLUSTER_SECRET"):
        cluster_secret({"TRIPTYCH_CLUSTER_SECRET": value})


def test_all_workers_of_a_layout_share_the_secret_and_no_description_shows_it() -> None:
    secret = "0123456789abcdef"
    layout = ClusterLayout.parse("E1P1D2")
    workers = worker_configs(layout, MODEL, sections_from({}), secret)
    assert [worker.cluster_secret for worker in workers.values()] == [secret] * 4
    router = RouterOptions(model=MODEL, layout=layout, cluster_secret=secret)
    assert secret not in repr(ServeOptions(layout, router, workers))


def test_a_layout_can_serve_while_every_stage_is_left() -> None:
    three = options("E1P1D2")
    assert three.can_serve({"router", "encode-0", "prefill-0", "decode-1"})
    assert not three.can_serve({"router", "encode-0", "decode-0", "decode-1"})
    mixed = options("EP1EPD1")
    assert mixed.can_serve({"aggregated-0"})
    assert not mixed.can_serve({"encode-prefill-0"})


def test_a_text_only_layout_needs_no_encode_worker() -> None:
    assert options("P1D1").can_serve({"prefill-0", "decode-0"})


def test_port_0_gives_a_port_that_can_be_listened_on() -> None:
    port = free_port("127.0.0.1", 0)
    with socket.create_server(("127.0.0.1", port)) as server:
        assert server.getsockname()[1] == port


def test_a_port_in_use_is_one_sentence_with_the_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(StartError, match=rf"127\.0\.0\.1:{port}.*--port"):
            free_port("127.0.0.1", port)


def test_an_address_of_another_machine_is_a_start_error() -> None:
    with pytest.raises(StartError, match=r"192\.0\.2\.1.*--host"):  # reserved for documentation: nobody's address
        free_port("192.0.2.1", 0)
