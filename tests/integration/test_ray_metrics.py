"""Rows of a run reach Ray's own metrics."""

import re
import time
import urllib.request

import pytest
import ray

from areal_ray.runtime.ray_metrics import RayMetricsSink, gauge_name
from areal_ray.telemetry.names import METRICS
from areal_ray.telemetry.rows import Row


def test_every_declared_name_is_one_that_prometheus_takes():
    names = [gauge_name(spec.name) for spec in METRICS]
    assert all(re.fullmatch(r"[a-z_][a-z0-9_]*", name) for name in names)
    assert len(set(names)) == len(names)


@pytest.mark.usefixtures("ray_session")
def test_the_metrics_port_of_the_node_shows_the_last_row():
    sink = RayMetricsSink("demo-run")
    sink.write(
        Row(step=3, version=3, wall_s=1.0, values={"reward/mean": 0.25, "learner/loss": None})
    )
    sink.write(Row(step=4, version=4, wall_s=2.0, values={"reward/mean": 0.75}))
    node = ray.nodes()[0]
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    deadline = time.monotonic() + 40  # Ray reports every ten seconds
    text = ""
    while time.monotonic() < deadline and "areal_ray_reward_mean" not in text:
        time.sleep(0.5)
        with urllib.request.urlopen(url, timeout=10) as page:
            text = page.read().decode()
    (line,) = re.findall(r"^\w*areal_ray_reward_mean\{.*", text, re.MULTILINE)
    assert 'run="demo-run"' in line.lower()
    assert line.endswith(" 0.75")
    assert re.search(r"areal_ray_step\{.*\} 4(\.0)?$", text, re.MULTILINE)
    assert "areal_ray_learner_loss" not in text
