"""Roles, layouts, and what follows from a role. The table is design's: EC role, KV role, parts loaded, KV cache."""

import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from triptych.config import (
    CacheConfig,
    ClusterLayout,
    ConnectorConfig,
    DeviceConfig,
    EngineConfig,
    MediaConfig,
    ModelConfig,
    Role,
    SchedulerConfig,
    Stage,
    from_mapping,
)
from triptych.errors import ConfigError
from triptych.router.options import RouterOptions

MODEL = ModelConfig(
    path=Path("/model"), name="m", family="qwen2_5_vl", weights_digest="d", dtype="bfloat16", max_model_len=128,
    vocab_size=16, hidden_size=64, num_layers=3, num_kv_heads=2, head_dim=32,
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    role: str
    ec: str  # producer, consumer, both or none
    kv: str
    tower: bool
    language_model: bool


AMONG_OTHERS = [
    Row("E", "producer", "none", tower=True, language_model=False),
    Row("P", "consumer", "producer", tower=False, language_model=True),
    Row("D", "none", "consumer", tower=False, language_model=True),
    Row("PD", "consumer", "none", tower=False, language_model=True),
    Row("EP", "both", "producer", tower=True, language_model=True),
    Row("ED", "producer", "consumer", tower=True, language_model=True),
    Row("EPD", "both", "both", tower=True, language_model=True),
]
ALONE = [
    Row("PD", "none", "none", tower=False, language_model=True),
    Row("EPD", "none", "none", tower=True, language_model=True),
]


def config(role: str, is_alone: bool = False) -> EngineConfig:
    return EngineConfig(MODEL, Role.parse(role), is_alone=is_alone)


def direction(produces: bool, consumes: bool) -> str:
    return {(True, True): "both", (True, False): "producer", (False, True): "consumer", (False, False): "none"}[
        produces, consumes
    ]


@pytest.mark.parametrize(("row", "is_alone"), [*((row, False) for row in AMONG_OTHERS), *((row, True) for row in ALONE)], ids=str)
def test_what_follows_from_a_role(row: Row, is_alone: bool) -> None:
    it = config(row.role, is_alone)
    assert direction(it.is_ec_producer, it.is_ec_consumer) == row.ec
    assert direction(it.is_kv_producer, it.is_kv_consumer) == row.kv
    assert it.is_ec_producer_only == (row.ec == "producer")
    assert it.is_encoder_only == (row.role == "E")
    assert it.has_tower == row.tower
    assert it.has_language_model == it.needs_kv_cache == row.language_model
    assert (it.num_kv_blocks > 0) == row.language_model


@pytest.mark.parametrize("role", ["E", "P", "D", "EP", "ED"])
def test_a_role_that_cannot_serve_alone_is_refused_with_the_remedy(role: str) -> None:
    with pytest.raises(ConfigError, match=f"role {role} cannot serve alone; use EPD"):
        config(role, is_alone=True)


@pytest.mark.parametrize("role", ["E", "P", "D", "EP", "PD", "ED", "EPD"])
def test_a_role_is_written_as_it_is_read(role: str) -> None:
    assert str(Role.parse(role)) == role
    assert Role.parse(role.lower()[::-1]) == Role.parse(role)


@pytest.mark.parametrize("text", ["", " ", "X", "EPX", "EE", "E1"])
def test_what_is_not_a_set_of_stages_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="E, P, D, EP, PD, ED, EPD"):
        Role.parse(text)


@pytest.mark.parametrize(
    ("text", "roles"),
    [
        ("E1P1D1", ["E", "P", "D"]),
        ("E1PD2", ["E", "PD", "PD"]),
        ("EP1D1", ["EP", "D"]),
        ("EPD1", ["EPD"]),
        ("e2p1d2", ["E", "E", "P", "D", "D"]),
        ("ED1P10", ["ED", *["P"] * 10]),
    ],
)
def test_a_layout_names_one_role_per_worker(text: str, roles: list[str]) -> None:
    assert [str(role) for role in ClusterLayout.parse(text).roles] == roles


def test_a_role_named_twice_is_added_up() -> None:
    assert str(ClusterLayout.parse("P1D1P2")) == "P3D1"


@pytest.mark.parametrize("text", ["", "EPD", "1E", "E1-P1-D1", "E1P1D1X1", "EPD-1"])
def test_what_is_not_a_layout_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="E1P1D1, E1PD2, EP1D1 or EPD1"):
        ClusterLayout.parse(text)


def test_a_layout_with_a_role_zero_times_is_refused() -> None:
    with pytest.raises(ConfigError, match="leave it out"):
        ClusterLayout.parse("E0PD1")


@pytest.mark.parametrize(("text", "flag"), [("E1P1", "--decode 1"), ("E1D1", "--prefill 1"), ("E1", "--prefill 1")])
def test_a_layout_without_prefill_or_decode_is_refused_with_the_flag_that_adds_it(text: str, flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        ClusterLayout.parse(text)


def test_counts_make_the_layout_that_spells_them() -> None:
    assert ClusterLayout.from_counts(1, 2, 3) == ClusterLayout.parse("E1P2D3")
    assert ClusterLayout.from_counts(0, 1, 1) == ClusterLayout.parse("P1D1")


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(ConfigError, match="--encode is -1"):
        ClusterLayout.from_counts(-1, 1, 1)


@pytest.mark.parametrize(
    ("text", "takes_media"), [("E1P1D1", True), ("EPD1", True), ("ED1P1", True), ("PD1", False), ("P1D1", False)]
)
def test_a_layout_takes_media_if_someone_encodes(text: str, takes_media: bool) -> None:
    assert ClusterLayout.parse(text).takes_media is takes_media


def test_a_kv_block_holds_keys_and_values_of_all_layers() -> None:
    # 3 layers x (keys + values) x 16 tokens x 2 heads x 32 numbers x 2 bytes
    assert config("P").kv_block_nbytes == 3 * 2 * 16 * 2 * 32 * 2 == 12_288


def test_memory_is_cut_into_whole_kv_blocks() -> None:
    cache = CacheConfig(kv_cache_nbytes=5 * 12_288 + 12_287)
    assert replace(config("P"), cache=cache).num_kv_blocks == 5
    assert replace(config("P"), cache=replace(cache, num_kv_blocks=9)).num_kv_blocks == 9


def test_an_encoder_page_holds_rows_of_all_feature_levels() -> None:
    deepstack = replace(MODEL, num_feature_levels=4)
    assert deepstack.row_width == 4 * 64
    assert EngineConfig(deepstack).encoder_page_nbytes == 16 * 4 * 64 * 2


def test_rows_that_do_not_fill_a_page_get_one() -> None:
    assert CacheConfig(encoder_cache_rows=33, rows_per_page=16).num_encoder_pages == 3


@pytest.mark.parametrize(("role", "keeps"), [("E", True), ("P", True), ("PD", True), ("ED", True), ("D", False)])
def test_only_who_encodes_or_prefills_keeps_embeddings(role: str, keeps: bool) -> None:
    assert (config(role).num_encoder_pages > 0) is keeps


def test_fingerprints_of_one_model_fit_whatever_the_role() -> None:
    assert config("E").fingerprint.difference(config("PD").fingerprint) is None


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (replace(config("P"), model=replace(MODEL, dtype="float32")), "dtype is bfloat16 here and float32 there"),
        (replace(config("P"), model=replace(MODEL, weights_digest="x")), "weights_digest is d here and x there"),
        (replace(config("P"), cache=CacheConfig(block_size=4)), "block_size is 16 here and 4 there"),
        (replace(config("P"), model=replace(MODEL, num_feature_levels=2)), "row_width is 64 here and 128 there"),
    ],
)
def test_fingerprints_that_do_not_fit_name_the_field(other: EngineConfig, words: str) -> None:
    assert config("P").fingerprint.difference(other.fingerprint) == words


def test_a_mapping_sets_what_it_names_and_leaves_the_rest() -> None:
    assert from_mapping(CacheConfig, {"block_size": 4}, "cache") == CacheConfig(block_size=4)


def test_an_unknown_key_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match="cache has no setting 'block_sise'; did you mean 'block_size'"):
        from_mapping(CacheConfig, {"block_sise": 4}, "cache")


def test_an_unknown_key_that_is_near_to_nothing_is_refused_with_all_known_ones() -> None:
    with pytest.raises(ConfigError, match="known are max_num_batched_tokens, max_num_seqs"):
        from_mapping(SchedulerConfig, {"xyz": 4}, "scheduler")


@pytest.mark.parametrize(
    ("cls", "field"),
    [
        (CacheConfig, "block_size"),
        (CacheConfig, "encoder_cache_rows"),
        (SchedulerConfig, "max_num_seqs"),
        (ConnectorConfig, "ec_lease_s"),
        (ConnectorConfig, "kv_lease_s"),
        (ConnectorConfig, "ec_path_nbytes"),
        (MediaConfig, "max_image_pixels"),
        (CacheConfig, "num_kv_blocks"),
        (DeviceConfig, "num_threads"),
    ],
)
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
def test_a_size_or_duration_must_be_positive_and_finite(cls: type, field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{field} is {value}; it must be a number greater than 0"):
        cls(**{field: value})


def test_an_unknown_data_plane_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'file'"):
        ConnectorConfig(data_plane="files")
    with pytest.raises(ConfigError, match="known are shm, file"):
        ConnectorConfig(data_plane="nixl")


def test_the_file_plane_needs_a_directory() -> None:
    with pytest.raises(ConfigError, match="--data-plane-path"):
        ConnectorConfig(data_plane="file")


def test_the_file_connector_needs_a_directory_and_the_data_plane_has_no_use_for_it() -> None:
    with pytest.raises(ConfigError, match="set --ec-path DIR"):
        ConnectorConfig(ec_connector="file")
    with pytest.raises(ConfigError, match="set --ec-connector file"):
        ConnectorConfig(ec_path=Path("/items"))
    assert ConnectorConfig(ec_connector="somebody's", ec_path=Path("/items")).ec_path == Path("/items")


SECRET = "0123456789abcdef"


@pytest.mark.parametrize("secret", [SECRET, "!" * 16, "~" * 512, ""])
def test_a_cluster_secret_is_16_to_512_printable_characters_or_none(secret: str) -> None:
    assert EngineConfig(MODEL, cluster_secret=secret).cluster_secret == secret
    assert RouterOptions(MODEL, cluster_secret=secret).cluster_secret == secret


@pytest.mark.parametrize(
    "secret", [" " * 20, "\t", SECRET[:-1], SECRET + " ", SECRET + "\n", "0123456789 abcdef", "секретсекретсекрет", "x" * 513]
)
def test_what_can_be_guessed_or_not_be_sent_is_no_cluster_secret(secret: str) -> None:
    for make in (partial(EngineConfig, MODEL), partial(RouterOptions, MODEL)):
        with pytest.raises(ConfigError, match=r"^the cluster secret must be 16 to 512 printable.*openssl rand -hex 32") as caught:
            make(cluster_secret=secret)
        assert secret.strip() == "" or secret not in str(caught.value)


def test_a_cluster_secret_is_never_shown() -> None:
    for holder in (EngineConfig(MODEL, cluster_secret=SECRET), RouterOptions(MODEL, cluster_secret=SECRET)):
        assert SECRET not in repr(holder)
        assert SECRET not in f"{holder} {[holder]}"


def test_a_role_answers_for_its_stages() -> None:
    assert [stage for stage in Stage if stage in Role.parse("ED")] == [Stage.ENCODE, Stage.DECODE]
