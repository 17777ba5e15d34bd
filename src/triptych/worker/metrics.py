"""A worker's Prometheus text: the engine's gauges, read when they are asked for."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector


class GaugeCollector(Collector):
    def __init__(self, role: str, read: Callable[[], dict[str, float]]) -> None:
        self._role = role
        self._read = read

    def collect(self) -> Iterator[Metric]:
        for name, value in self._read().items():
            family = GaugeMetricFamily(f"triptych_worker_{name}", name.replace("_", " "), labels=["role"])
            family.add_metric([self._role], value)
            yield family


def make_registry(role: str, read: Callable[[], dict[str, float]]) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(GaugeCollector(role, read))
    return registry
