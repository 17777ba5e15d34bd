"""A worker's Prometheus text: the engine's gauges and counters, read when they are asked for."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

Count = float | Mapping[str, float]  # a mapping counts by reason
Read = Callable[[], Mapping[str, Count]]


class EngineCollector(Collector):
    def __init__(self, role: str, gauges: Read, counters: Read) -> None:
        self._role = role
        self._gauges = gauges
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        for read, kind in ((self._gauges, GaugeMetricFamily), (self._counters, CounterMetricFamily)):
            for name, count in read().items():
                name, text = f"triptych_worker_{name}", name.replace("_", " ")
                if isinstance(count, Mapping):
                    family = kind(name, text, labels=["role", "reason"])
                    for reason, value in count.items():
                        family.add_metric([self._role, reason], value)
                else:
                    family = kind(name, text, labels=["role"])
                    family.add_metric([self._role], count)
                yield family


def make_registry(role: str, gauges: Read, counters: Read) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(EngineCollector(role, gauges, counters))
    return registry
