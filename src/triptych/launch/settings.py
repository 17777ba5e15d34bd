"""The settings of `EngineConfig` that a user can set, as one table: the command line's flags and the README are made from it.

A setting has the name of its field (`block_size`, `--block-size`) unless the unit a person types is another one than the
field's (`--kv-cache-mib` for `kv_cache_nbytes`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from triptych.config import CacheConfig, ConnectorConfig, DeviceConfig, MediaConfig, SchedulerConfig, from_mapping
from triptych.runner.ec_registry import find_ec_connector

MIB = 1024**2

# The sections of EngineConfig, with the heading under which `--help` shows their flags.
SECTIONS: dict[str, tuple[type[Any], str]] = {
    "cache": (CacheConfig, "Caches"),
    "scheduler": (SchedulerConfig, "Scheduler"),
    "connector": (ConnectorConfig, "Connectors"),
    "device": (DeviceConfig, "Device"),
    "media": (MediaConfig, "Media"),
}


def _unchanged(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Setting:
    """One flag. `type` is what a person types; `to_field` makes of it what the field holds, and `default` is in the typed unit."""

    flag: str
    section: str
    field: str
    type: Any
    help: str
    default: Any
    to_field: Callable[[Any], Any] = _unchanged

    @property
    def name(self) -> str:
        """The flag as a Python name."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def declaration(self) -> str:
        """As the command line takes it: what is on or off has a flag for each."""
        return f"{self.flag}/--no-{self.flag.removeprefix('--')}" if self.type is bool else self.flag


def _default(section: str, name: str) -> Any:
    return next(each.default for each in fields(SECTIONS[section][0]) if each.name == name)


def _setting(section: str, field: str, type: Any, help: str, flag: str = "") -> Setting:
    return Setting(flag or "--" + field.replace("_", "-"), section, field, type, help, _default(section, field))


def _mib(section: str, field: str, flag: str, help: str) -> Setting:
    return Setting(flag, section, field, int, help, _default(section, field) // MIB, lambda mib: mib * MIB)


SETTINGS: tuple[Setting, ...] = (
    _setting("cache", "block_size", int, "Tokens per KV block."),
    _mib("cache", "kv_cache_nbytes", "--kv-cache-mib", "Memory for KV blocks of one worker, in MiB."),
    _setting("cache", "num_kv_blocks", int | None, "KV blocks of one worker; overrides --kv-cache-mib."),
    _setting("cache", "enable_prefix_caching", bool, "Keep KV blocks for later prompts that begin alike."),
    _setting("cache", "encoder_cache_rows", int, "Embedding rows that one worker's encoder cache holds."),
    _setting("scheduler", "max_num_batched_tokens", int, "Tokens of one step, over all requests (chunk size of prefill)."),
    _setting("scheduler", "max_num_seqs", int, "Requests that one worker runs at once."),
    _setting("scheduler", "max_encoder_rows", int, "Rows that the tower may produce in one step."),
    _setting("scheduler", "max_num_waiting", int, "Requests that may wait in one worker before new ones are refused."),
    _setting("scheduler", "priority_aging_s", float, "Seconds that a level of priority is worth: who waits longer goes first."),
    _setting("connector", "data_plane", str, "How embeddings and KV blocks move: shm (same host) or file."),
    _setting("connector", "data_plane_path", Path | None, "Directory of the file data plane."),
    _setting("connector", "ec_connector", str, "How embeddings move: data-plane, file, or one that an installed package adds."),
    _setting("connector", "ec_path", Path | None, "Directory of the file EC connector, the same for all workers."),
    _mib("connector", "ec_path_nbytes", "--ec-path-mib", "What that directory may hold, in MiB; items used least recently go first."),
    _setting("connector", "ec_timeout_s", float, "Seconds that a request waits for one media item, and an item for its encode."),
    _setting("connector", "kv_timeout_s", float, "Seconds that a request waits for its KV blocks."),
    _setting("connector", "ec_lease_s", float, "Seconds that an encode worker keeps an item for a prefill worker that has not read it."),
    _setting("connector", "kv_lease_s", float, "Seconds that a prefill worker keeps KV blocks for a decode worker that has not read them."),
    _setting("device", "device", str, "auto, cpu, cuda, cuda:1 ..."),
    _setting("device", "num_threads", int | None, "CPU threads of one worker; by default the cores are shared out."),
    _setting("media", "max_image_pixels", int, "Largest picture, in pixels after decoding."),
    _mib("media", "max_media_nbytes", "--max-media-mib", "Largest picture, in MiB as it is sent."),
    _setting("media", "max_items", int, "Most pictures of one request."),
    Setting(
        "--allow-media-domain", "media", "allowed_domains", list[str],
        "Host from which pictures may be fetched; give it once per host. None by default: data URLs only.", None, tuple,
    ),
    _setting("media", "fetch_timeout_s", float, "Seconds that fetching one picture may take.", flag="--media-fetch-timeout-s"),
)  # fmt: skip


def sections_from(values: Mapping[str, Any]) -> dict[str, Any]:
    """The five sections of `EngineConfig` from values keyed by the settings' names; None leaves a field's default.

    Raises `ConfigError` for a value that a section refuses, and for an EC connector that does not exist.
    """
    chosen: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for setting in SETTINGS:
        value = values.get(setting.name)
        if value is not None:
            chosen[setting.section][setting.field] = setting.to_field(value)
    sections = {section: from_mapping(cls, chosen[section], section) for section, (cls, _) in SECTIONS.items()}
    find_ec_connector(sections["connector"].ec_connector)
    return sections
