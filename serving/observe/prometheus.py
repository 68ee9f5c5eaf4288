"""Metrics in the text format of Prometheus."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
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
    """Metric families for prometheus_client: one per name, with the samples of all models."""

    def __init__(self, labelled_families: Iterable[tuple[Mapping[str, str], Family]]):
        self.labelled_families = list(labelled_families)

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Any] = {}
        for model_labels, family in self.labelled_families:
            for labels, value in family.samples:
                labels = {**model_labels, **labels}
                if family.name not in families:
                    families[family.name] = KINDS[family.kind](
                        family.name, family.help, labels=list(labels)
                    )
                if family.kind == "histogram":
                    buckets = [
                        (floatToGoString(bound), count) for bound, count in value.cumulative()
                    ]
                    families[family.name].add_metric(list(labels.values()), buckets, value.sum)
                else:
                    families[family.name].add_metric(list(labels.values()), value)
        yield from families.values()


def expose(labelled_families: Iterable[tuple[Mapping[str, str], Family]]) -> tuple[bytes, str]:
    """Return the text of metric families with their models' labels, and its content type."""
    registry = CollectorRegistry()
    registry.register(FamilyCollector(labelled_families))
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4
