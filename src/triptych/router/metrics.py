"""What the router counts, in a registry of its own: a process may hold several routers."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from triptych.router.pool import PooledWorker

LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
ROLES = ("E", "P", "D", "EP", "PD", "ED", "EPD")


class RouterMetrics:
    """Off is the same object: counting costs next to nothing."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "triptych_requests", "Requests ended, by outcome and status.", ("outcome", "status"), registry=self.registry
        )
        self.ttft = Histogram(
            "triptych_ttft_seconds", "Arrival to first token.", buckets=LATENCY_BUCKETS_S, registry=self.registry
        )
        self.e2e = Histogram("triptych_e2e_seconds", "Arrival to last token.", buckets=LATENCY_BUCKETS_S, registry=self.registry)
        self.prompt_tokens = Counter("triptych_prompt_tokens", "Prompt tokens of ended requests.", registry=self.registry)
        self.completion_tokens = Counter("triptych_completion_tokens", "Tokens sent to clients.", registry=self.registry)
        self.encodes = Counter(
            "triptych_encodes",
            "Encodes of items: started, shared with one under way, or saved because a worker probably holds the item or a prefix that covers it.",
            ("kind",),
            registry=self.registry,
        )
        self.prefix_hints = Counter(
            "triptych_prefix_hints", "Prompts sent where a part of them was probably kept.", registry=self.registry
        )
        self.prefix_hint_tokens = Counter(
            "triptych_prefix_hint_tokens", "Prompt tokens that the worker had probably kept.", registry=self.registry
        )
        self.encode_retries = Counter(
            "triptych_encode_retries", "Items encoded again, by reason.", ("reason",), registry=self.registry
        )
        self.replays = Counter(
            "triptych_replays",
            "Requests that were prefilled again after a fault, by reason.",
            ("reason",),
            registry=self.registry,
        )
        self.worker_waits = Counter(
            "triptych_worker_waits",
            "Waits for a worker of a stage that had none, by stage.",
            ("stage",),
            registry=self.registry,
        )
        self.refusals = Counter(
            "triptych_worker_refusals",
            "Calls that a worker refused because it was full, by stage.",
            ("stage",),
            registry=self.registry,
        )
        self.early_decodes = Counter(
            "triptych_early_decodes",
            "Calls to a decode worker made while the prompt was prefilled: kept at the hand-over, or dropped before.",
            ("outcome",),
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "triptych_requests_in_flight", "Requests under way; one for n answers counts n times.", registry=self.registry
        )
        self.workers = Gauge("triptych_workers", "Workers, by role and state.", ("role", "state"), registry=self.registry)
        self.lost_workers = Counter("triptych_workers_lost", "Workers lost, by role.", ("role",), registry=self.registry)

    def render(self, workers: Iterable[PooledWorker]) -> bytes:
        """Prometheus text."""
        roles = [str(worker.role) for worker in workers]
        for role in ROLES:
            self.workers.labels(role, "ready").set(roles.count(role))
        return generate_latest(self.registry)
