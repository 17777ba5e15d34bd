"""`EngineConfig`: one frozen object per worker, composed of small ones, and the facts derived from a role.

A role is a non-empty set of stages; a cluster layout is roles with counts. Everything that depends on the role is a read-only
property here and is computed nowhere else.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from msgspec import Meta

from triptych.errors import ConfigError, suggest

PROTOCOL_VERSION = 1
DATA_PLANES = ("shm", "file")
CLUSTER_SECRET_VARIABLE = "TRIPTYCH_CLUSTER_SECRET"  # of the environment
_SECRET = re.compile(r"[!-~]{16,512}")  # what an HTTP header can carry

T = TypeVar("T")


def _check_positive(config: object, *names: str) -> None:
    """None means that the setting is left to others."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name} is {value}; it must be a number greater than 0.")


def check_cluster_secret(secret: str) -> None:
    """Raises `ConfigError` for what can be guessed, or cannot be sent; its sentence does not repeat it."""
    if not _SECRET.fullmatch(secret):
        raise ConfigError(
            f"the cluster secret must be 16 to 512 printable ASCII characters without spaces; set {CLUSTER_SECRET_VARIABLE} to what "
            "`openssl rand -hex 32` prints."
        )


class Stage(StrEnum):
    ENCODE = "E"
    PREFILL = "P"
    DECODE = "D"


@dataclass(frozen=True, slots=True)
class Role:
    """A non-empty set of stages, written with their letters: E, P, D, EP, PD, ED, EPD."""

    stages: frozenset[Stage]

    @classmethod
    def parse(cls, text: str) -> Self:
        letters = text.strip().upper()
        known = {stage.value for stage in Stage}
        if not letters or set(letters) - known or len(set(letters)) != len(letters):
            raise ConfigError(f"role '{text}' is not a set of stages; write one of E, P, D, EP, PD, ED, EPD.")
        return cls(frozenset(Stage(letter) for letter in letters))

    @property
    def takes_kv(self) -> bool:
        """Decodes what another has prefilled; PD decodes only its own."""
        return Stage.DECODE in self.stages and str(self) != "PD"

    def __contains__(self, stage: Stage) -> bool:
        return stage in self.stages

    def __str__(self) -> str:
        return "".join(stage.value for stage in Stage if stage in self.stages)


@dataclass(frozen=True, slots=True)
class ClusterLayout:
    """Roles with counts: `E1P2D3` is one encode, two prefill and three decode workers; `EPD1` does everything in one."""

    counts: tuple[tuple[Role, int], ...]

    def __post_init__(self) -> None:
        stages = {stage for role, _ in self.counts for stage in role.stages}
        for stage, flag in ((Stage.PREFILL, "--prefill"), (Stage.DECODE, "--decode")):
            if stage not in stages:
                raise ConfigError(
                    f"layout {self} has no {stage.name.lower()} worker; add one with {flag} 1 or a role with {stage.value}."
                )

    @classmethod
    def parse(cls, text: str) -> Self:
        if not re.fullmatch(r"(?:[EPDepd]+[0-9]+)+", text.strip()):
            raise ConfigError(f"layout '{text}' is not roles with counts; write for example E1P1D1, E1PD2, EP1D1 or EPD1.")
        merged: dict[str, int] = {}
        for letters, count in re.findall(r"([EPDepd]+)([0-9]+)", text.strip()):
            role = str(Role.parse(letters))
            if int(count) == 0:
                raise ConfigError(f"layout '{text}' has {role} zero times; leave it out instead.")
            merged[role] = merged.get(role, 0) + int(count)
        return cls(tuple((Role.parse(letters), count) for letters, count in merged.items()))

    @classmethod
    def from_counts(cls, encode: int, prefill: int, decode: int) -> Self:
        named = (("E", encode, "--encode"), ("P", prefill, "--prefill"), ("D", decode, "--decode"))
        for _, count, flag in named:
            if count < 0:
                raise ConfigError(f"{flag} is {count}; it must be 0 or more.")
        return cls(tuple((Role.parse(letter), count) for letter, count, _ in named if count))

    @property
    def roles(self) -> tuple[Role, ...]:
        """One entry per worker, in the order in which they are written."""
        return tuple(role for role, count in self.counts for _ in range(count))

    @property
    def takes_media(self) -> bool:
        return any(Stage.ENCODE in role for role, _ in self.counts)

    def __str__(self) -> str:
        return "".join(f"{role}{count}" for role, count in self.counts)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the model folder says, resolved once at start (see `models/inspect.py`), before any weight is read."""

    path: Path
    name: str  # the name under which it is served
    family: str  # config.json's model_type
    weights_digest: str  # of every byte of the weights, and of the settings beside them
    dtype: str  # resolved: float32, bfloat16 or float16
    max_model_len: int
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    weights_stamp: str = ""  # sizes and times of the files behind `weights_digest`; empty: they are not looked at again
    num_feature_levels: int = 1  # 1, plus one per deepstack level: a row of an item has levels * hidden_size numbers

    @property
    def row_width(self) -> int:
        return self.num_feature_levels * self.hidden_size

    @property
    def dtype_nbytes(self) -> int:
        return {"float32": 4, "bfloat16": 2, "float16": 2}[self.dtype]

    @property
    def row_nbytes(self) -> int:
        return self.row_width * self.dtype_nbytes


@dataclass(frozen=True, slots=True)
class CacheConfig:
    block_size: int = 16  # tokens per KV block
    kv_cache_nbytes: int = 512 * 1024**2  # host or device memory for KV blocks
    num_kv_blocks: int | None = None  # overrides kv_cache_nbytes
    enable_prefix_caching: bool = True  # keep KV blocks for later prompts that begin alike
    encoder_cache_rows: int = 16_384  # embedding rows this worker's encoder cache holds
    rows_per_page: int = 16  # rows of one page of the encoder cache

    def __post_init__(self) -> None:
        _check_positive(self, "block_size", "kv_cache_nbytes", "num_kv_blocks", "encoder_cache_rows", "rows_per_page")

    @property
    def num_encoder_pages(self) -> int:
        return -(-self.encoder_cache_rows // self.rows_per_page)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_num_batched_tokens: int = 2048  # tokens of one step, over all requests
    max_num_seqs: int = 64  # requests that run at once
    max_encoder_rows: int = 4096  # rows the tower may produce in one step (one item may exceed it alone)
    max_num_waiting: int = 1024  # requests and encodes that may wait before new ones are refused with 429
    priority_aging_s: float = 60.0  # a request is passed only by those of a priority better by n that come within n times this

    def __post_init__(self) -> None:
        _check_positive(self, "max_num_batched_tokens", "max_num_seqs", "max_encoder_rows", "max_num_waiting", "priority_aging_s")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, less than max_num_seqs ({self.max_num_seqs}): not every request "
                "could get a token in each step. Raise the one or lower the other."
            )


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    data_plane: str = "shm"  # shm (same host) or file (a shared directory)
    data_plane_path: Path | None = None  # the directory of the file data plane
    ec_connector: str = "data-plane"  # how embeddings move: over the data plane, file (a directory), or what a package adds
    ec_path: Path | None = None  # the directory of the file EC connector
    ec_path_nbytes: int = 4096 * 1024**2  # what that directory may hold before the items used least recently go
    ec_timeout_s: float = 60.0  # how long a request waits for one media item, and an item for its encode
    kv_timeout_s: float = 60.0  # how long a request waits for its KV blocks
    # How long a producer keeps what it has published without hearing of it. An item whose lease lapsed is cheap to publish again, and a
    # cache full of items that nobody can take yet would hold up those that could be: its lease is the shorter.
    ec_lease_s: float = 20.0
    kv_lease_s: float = 120.0
    verify_checksums: bool = True

    def __post_init__(self) -> None:
        _check_positive(self, "ec_timeout_s", "kv_timeout_s", "ec_lease_s", "kv_lease_s", "ec_path_nbytes")
        if self.data_plane not in DATA_PLANES:
            raise ConfigError(f"data_plane is '{self.data_plane}', which does not exist; {suggest(self.data_plane, DATA_PLANES)}")
        if self.data_plane == "file" and self.data_plane_path is None:
            raise ConfigError("the file data plane needs a directory; set --data-plane-path DIR.")
        if self.ec_connector == "file" and self.ec_path is None:
            raise ConfigError("the file EC connector needs a directory; set --ec-path DIR.")
        if self.ec_connector == "data-plane" and self.ec_path is not None:
            raise ConfigError("--ec-path is set, but embeddings move over the data plane; set --ec-connector file as well.")


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    device: str = "auto"  # auto, cpu, cuda, cuda:1 ...
    num_threads: int | None = None  # CPU threads of one worker; None leaves PyTorch's choice

    def __post_init__(self) -> None:
        _check_positive(self, "num_threads")


@dataclass(frozen=True, slots=True)
class MediaConfig:
    """Limits on what a client sends; shared by the router (header) and the encode worker (pixels)."""

    max_image_pixels: int = 64 * 1024**2  # of the decoded picture
    max_media_nbytes: int = 32 * 1024**2  # of one item as it came
    max_items: int = 64  # of one request
    allowed_domains: tuple[str, ...] = ()  # hosts from which http(s) URLs are fetched; none by default
    fetch_timeout_s: float = 10.0
    num_threads: int = 2  # pictures decoded and resized at once, beside the engine thread

    def __post_init__(self) -> None:
        _check_positive(self, "max_image_pixels", "max_media_nbytes", "max_items", "fetch_timeout_s", "num_threads")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Two workers are paired only if theirs are equal."""

    weights_digest: str
    family: str
    dtype: str
    block_size: Annotated[int, Meta(ge=1)]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    row_width: int
    data_plane: str = "shm"
    ec_connector: str = "data-plane"
    protocol_version: int = PROTOCOL_VERSION

    def difference(self, other: Self) -> str | None:
        """Name the first field that differs, with both values; None if they fit."""
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if mine != theirs:
                return f"{each.name} is {mine} here and {theirs} there"
        return None


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All of a worker's configuration. `is_alone`: the layout has this one worker only, so nothing is ever sent or taken."""

    model: ModelConfig
    role: Role = field(default_factory=lambda: Role.parse("EPD"))
    is_alone: bool = True
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    connector: ConnectorConfig = ConnectorConfig()
    device: DeviceConfig = DeviceConfig()
    media: MediaConfig = MediaConfig()
    cluster_secret: str = field(default="", repr=False)  # who knows it is a member; empty: whoever reaches this worker

    def __post_init__(self) -> None:
        if self.cluster_secret:
            check_cluster_secret(self.cluster_secret)
        if self.is_alone and str(self.role) not in ("EPD", "PD"):
            raise ConfigError(f"role {self.role} cannot serve alone; use EPD, or PD for text only, or add workers.")

    @property
    def has_tower(self) -> bool:
        return Stage.ENCODE in self.role

    @property
    def has_language_model(self) -> bool:
        return self.needs_kv_cache

    @property
    def is_ec_producer(self) -> bool:
        return Stage.ENCODE in self.role and not self.is_alone

    @property
    def is_ec_consumer(self) -> bool:
        return Stage.PREFILL in self.role and not self.is_alone

    @property
    def is_ec_producer_only(self) -> bool:
        return self.is_ec_producer and not self.is_ec_consumer

    @property
    def is_encoder_only(self) -> bool:
        return self.role.stages == frozenset({Stage.ENCODE})

    @property
    def is_kv_producer(self) -> bool:
        return Stage.PREFILL in self.role and str(self.role) != "PD" and not self.is_alone

    @property
    def is_kv_consumer(self) -> bool:
        return self.role.takes_kv and not self.is_alone

    @property
    def needs_kv_cache(self) -> bool:
        return Stage.PREFILL in self.role or Stage.DECODE in self.role

    @property
    def kv_block_nbytes(self) -> int:
        """Bytes of one KV block: all layers, keys and values."""
        model = self.model
        return model.num_layers * 2 * self.cache.block_size * model.num_kv_heads * model.head_dim * model.dtype_nbytes

    @property
    def num_kv_blocks(self) -> int:
        if not self.needs_kv_cache:
            return 0
        if self.cache.num_kv_blocks is not None:
            return self.cache.num_kv_blocks
        return max(1, self.cache.kv_cache_nbytes // self.kv_block_nbytes)

    @property
    def encoder_page_nbytes(self) -> int:
        return self.cache.rows_per_page * self.model.row_nbytes

    @property
    def num_encoder_pages(self) -> int:
        """A worker that neither encodes nor prefills keeps no embeddings."""
        needs = Stage.ENCODE in self.role or Stage.PREFILL in self.role
        return self.cache.num_encoder_pages if needs else 0

    @property
    def fingerprint(self) -> Fingerprint:
        model = self.model
        return Fingerprint(
            weights_digest=model.weights_digest,
            family=model.family,
            dtype=model.dtype,
            block_size=self.cache.block_size,
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            row_width=model.row_width,
            data_plane=self.connector.data_plane,
            ec_connector=self.connector.ec_connector,
        )


def from_mapping(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """Build one of the dataclasses above from `values`; an unknown key is refused with the nearest known one."""
    known = [each.name for each in fields(cls)]  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise ConfigError(f"{where} has no setting '{key}'; {suggest(key, known)}")
    return cls(**values)
