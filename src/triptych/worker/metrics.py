"""A worker's Prometheus text: the engine's gauges and counters, read when they are asked for."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

Read = Callable[[], dict[str, float]]


class EngineCollector(Collector):
    def __init__(self, role: str, gauges: Read, counters: Read) -> None:
        self._role = role
        self._gauges = gauges
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        for read, kind in ((self._gauges, GaugeMetricFamily), (self._counters, CounterMetricFamily)):
            for name, value in read().items():
                family = kind(f"triptych_worker_{name}", name.replace("_", " "), labels=["role"])
                family.add_metric([self._role], value)
                yield family


def make_registry(role: str, gauges: Read, counters: Read) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(EngineCollector(role, gauges, counters))
    return registry
