"""Rows as gauges of ray.util.metrics: the Ray dashboard and Prometheus show them."""

from ray.util.metrics import Gauge

from areal_ray.telemetry.metrics import MetricRegistry
from areal_ray.telemetry.names import METRICS
from areal_ray.telemetry.rows import Row


class RayMetricsSink:
    """One gauge a metric, tagged with the run; made when the metric is first logged."""

    def __init__(self, run: str, *, registry: MetricRegistry = METRICS) -> None:
        self._run = run
        self._registry = registry
        self._gauges: dict[str, Gauge] = {}

    def write(self, row: Row) -> None:
        """Set each gauge to the row's value; values that are not numbers leave it as it is."""
        if row.kind == "step":
            self._set("areal_ray_step", "Steps done.", row.step)
            self._set("areal_ray_version", "Committed version.", row.version)
        for name, value in row.values.items():
            if value is not None:
                self._set(gauge_name(name), self._registry[name].meaning, value)

    def close(self) -> None:
        """Nothing to do: gauges live as long as the process."""

    def _set(self, name: str, meaning: str, value: float) -> None:
        gauge = self._gauges.get(name)
        if gauge is None:
            gauge = Gauge(name, description=meaning, tag_keys=("run",))
            gauge.set_default_tags({"run": self._run})
            self._gauges[name] = gauge
        gauge.set(float(value))


def gauge_name(metric: str) -> str:
    """What Ray and Prometheus call a metric: `reward/mean` is `areal_ray_reward_mean`."""
    return "areal_ray_" + metric.replace("/", "_")
