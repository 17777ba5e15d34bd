"""`ServeOptions`: what `triptych serve` was asked for, resolved: the router's options and one `EngineConfig` per worker."""

import os
import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from errno import EACCES, EADDRINUSE
from importlib.metadata import version
from pathlib import Path
from typing import Any

from triptych.config import (
    CLUSTER_SECRET_VARIABLE,
    ClusterLayout,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    Role,
    Stage,
    check_cluster_secret,
)
from triptych.errors import ConfigError, StartError
from triptych.router.options import RouterOptions

_STAGE_WORDS = {Stage.ENCODE: "encode", Stage.PREFILL: "prefill", Stage.DECODE: "decode"}


@dataclass(frozen=True, slots=True)
class ServeOptions:
    layout: ClusterLayout
    router: RouterOptions
    workers: Mapping[str, EngineConfig]  # by name: encode-0, prefill-0 ..., in the layout's order

    def can_serve(self, names: set[str]) -> bool:
        """Whether the workers `names` still have every stage of the layout."""
        wanted = {stage for config in self.workers.values() for stage in config.role.stages}
        return wanted <= {stage for name in names if name in self.workers for stage in self.workers[name].role.stages}


def choose_layout(text: str | None, encode: int | None, prefill: int | None, decode: int | None) -> ClusterLayout:
    """The layout that `--layout` or the counts name; everything in one worker with neither. Raises `ConfigError` for both."""
    counts = (encode, prefill, decode)
    if text is not None:
        if any(count is not None for count in counts):
            raise ConfigError("--layout and --encode/--prefill/--decode say the same thing twice; give one of them.")
        return ClusterLayout.parse(text)
    if all(count is None for count in counts):
        return ClusterLayout.parse("EPD1")
    return ClusterLayout.from_counts(*(count or 0 for count in counts))


def role_name(role: Role) -> str:
    """`encode`, `prefill-decode` ...; `aggregated` for all three."""
    words = [word for stage, word in _STAGE_WORDS.items() if stage in role]
    return "aggregated" if len(words) == len(_STAGE_WORDS) else "-".join(words)


def cluster_secret(environment: Mapping[str, str]) -> str:
    """The one that a user has set; empty if none is. Raises `ConfigError` for one that is no secret, the empty one included."""
    if CLUSTER_SECRET_VARIABLE not in environment:
        return ""
    secret = environment[CLUSTER_SECRET_VARIABLE].strip()  # a file's line has an end
    check_cluster_secret(secret)
    return secret


def worker_configs(
    layout: ClusterLayout, model: ModelConfig, sections: Mapping[str, Any], cluster_secret: str = ""
) -> dict[str, EngineConfig]:
    """One `EngineConfig` per worker of `layout`, by name. CPU workers share the host's cores out unless told otherwise."""
    roles = layout.roles
    device: DeviceConfig = sections["device"]
    if device.num_threads is None:
        sections = {**sections, "device": replace(device, num_threads=threads_per_worker(available_cores(), len(roles)))}
    numbers: Counter[Role] = Counter()
    configs: dict[str, EngineConfig] = {}
    for role in roles:
        name = f"{role_name(role)}-{numbers[role]}"
        numbers[role] += 1
        is_alone = len(roles) == 1
        configs[name] = EngineConfig(model=model, role=role, is_alone=is_alone, cluster_secret=cluster_secret, **sections)
    return configs


def threads_per_worker(num_cores: int, num_workers: int) -> int:
    """More threads than cores make every step slower."""
    return max(1, num_cores // num_workers)


def available_cores() -> int:
    """Those this process may run on."""
    return len(os.sched_getaffinity(0))


def resolve_device(device: str) -> str:
    """`auto` becomes cuda where the driver is and PyTorch was built for it, else cpu; looked up without importing torch."""
    if device != "auto":
        return device
    has_gpu = Path("/dev/nvidiactl").exists() and not version("torch").endswith("+cpu")
    return "cuda" if has_gpu else "cpu"


def free_port(host: str, port: int) -> int:
    """`port`, or a free one for 0. Raises `StartError` if it cannot be listened on."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except OSError as error:
        flag = "--port" if error.errno in (EADDRINUSE, EACCES) else "--host"
        raise StartError(f"cannot listen on {host}:{port} ({error.strerror}); choose another with {flag}.") from error
