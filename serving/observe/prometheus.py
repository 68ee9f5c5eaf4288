"""Metrics in the form that Prometheus reads."""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from .metric_families import Family

KINDS = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "info": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


class FamilyCollector(Collector):
    """Metric families as prometheus_client wants them: one for each name, with all samples."""

    def __init__(self, found: Iterable[tuple[Mapping[str, str], Family]]):
        self.found = list(found)

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for own, family in self.found:
            for labels, value in family.samples:
                labels = {**own, **labels}
                if family.name not in families:
                    families[family.name] = KINDS[family.kind](family.name, family.help, labels=list(labels))
                if family.kind == "histogram":
                    buckets = [(floatToGoString(bound), count) for bound, count in value.cumulative()]
                    families[family.name].add_metric(list(labels.values()), buckets, value.sum)
                else:
                    families[family.name].add_metric(list(labels.values()), value)
        yield from families.values()


def expose(found: Iterable[tuple[Mapping[str, str], Family]]) -> tuple[bytes, str]:
    """The text and its content type, of metric families with their model's label."""
    registry = CollectorRegistry()
    registry.register(FamilyCollector(found))
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4
