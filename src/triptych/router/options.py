"""`RouterOptions`: what a router is started with. Apart from router.py, as whoever starts one need not import its HTTP server."""

from dataclasses import dataclass, field

from triptych.config import ClusterLayout, MediaConfig, ModelConfig, check_cluster_secret


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """`layout` None: P and D are expected, E may come."""

    model: ModelConfig
    host: str = "127.0.0.1"
    port: int = 8000
    layout: ClusterLayout | None = None
    worker_urls: tuple[str, ...] = ()
    media: MediaConfig = field(default_factory=MediaConfig)
    max_in_flight: int = 256
    request_timeout_s: float = 600.0
    worker_wait_s: float = 15.0
    encode_timeout_s: float = 20.0
    cluster_secret: str = field(default="", repr=False)  # as in EngineConfig

    def __post_init__(self) -> None:
        if self.cluster_secret:
            check_cluster_secret(self.cluster_secret)

    @property
    def max_body_nbytes(self) -> int:
        """Room for a few of the largest pictures in base64, and for text."""
        return 4 * (self.media.max_media_nbytes * 4 // 3) + 2**20
