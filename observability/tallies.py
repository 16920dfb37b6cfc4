"""Counters and histograms for Prometheus that one thread adds to, without locks; any may read.

The series of prometheus_client take a lock for each addition, and its histograms search their
bounds one by one. The dozen additions of a call cost a router more than its choice of a worker.
"""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Tally:
    """A sum that only grows."""

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        """Add an amount, 0 or more."""
        self.value += amount


class Spread:
    """How values are spread over ranges.

    Args:
        bounds: Upper bounds of the ranges, included, in ascending order.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.sum = 0.0
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)  # of values up to each bound, and of larger ones

    def observe(self, value: float) -> None:
        """Count a value."""
        self.sum += value
        self._counts[bisect_left(self._bounds, value)] += 1

    def buckets(self) -> list[tuple[str, float]]:
        """Return cumulative counts by upper bound, as Prometheus expects."""
        bounds = (*map(floatToGoString, self._bounds), "+Inf")
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True))


SeriesT = TypeVar("SeriesT", Tally, Spread)


class _ByLabels(Collector, Generic[SeriesT]):
    def __init__(
        self, name: str, meaning: str, labels: tuple[str, ...], registry: CollectorRegistry
    ) -> None:
        self._told = (name, meaning)
        self._label_names = labels
        # By the values of the labels. To read it, copy it: series are added meanwhile.
        self._series: dict[tuple[str, ...], SeriesT] = {}
        registry.register(self)

    def labels(self, *values: str) -> SeriesT:
        """Return the series of these values."""
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = self._new()
        return series

    def _new(self) -> SeriesT:
        raise NotImplementedError


class Tallies(_ByLabels[Tally]):
    """A metric of type counter: a tally for each combination of labels."""

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the metric."""
        family = CounterMetricFamily(*self._told, labels=self._label_names)
        for values, tally in list(self._series.items()):
            family.add_metric(values, tally.value)
        yield family

    def _new(self) -> Tally:
        return Tally()


class Spreads(_ByLabels[Spread]):
    """A metric of type histogram: a spread for each combination of labels."""

    def __init__(
        self,
        name: str,
        meaning: str,
        labels: tuple[str, ...],
        registry: CollectorRegistry,
        *,
        bounds: tuple[float, ...],
    ) -> None:
        self._bounds = bounds
        super().__init__(name, meaning, labels, registry)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the metric."""
        family = HistogramMetricFamily(*self._told, labels=self._label_names)
        for values, spread in list(self._series.items()):
            family.add_metric(values, spread.buckets(), spread.sum)
        yield family

    def _new(self) -> Spread:
        return Spread(self._bounds)
