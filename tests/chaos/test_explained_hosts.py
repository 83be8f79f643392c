"""A lost host and a cut link, and what status, page, alerts and logs report within 10 s.

Hosts are namespaces of this machine (tests/harness/hosts.py); Redis and the operator are outside of
them.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tests.harness.cluster import LocalCluster, wait_for
from tests.harness.hosts import Machine, why_not
from tests.harness.monitoring import ALERTS
from tests.harness.network import Network, Place
from tests.harness.prometheus import Prometheus
from tests.harness.surfaces import Surfaces, problem, report
from tests.tiny_models import make_random_speaker

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TANDEM = [sys.executable, "-m", "tandem.ops.cli"]
START_DEADLINE_S = 180.0


def test_a_host_that_is_gone_is_named(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("a token of this test alone")
    with ExitStack() as ends:
        network = ends.enter_context(Network(2))
        redis = ends.enter_context(EmbeddedRedis(host=network.home.address))
        first, second = (Machine(place) for place in network.hosts)
        ends.callback(first.close)
        ends.callback(second.close)
        model = make_random_speaker(tmp_path / "model").path
        options = ["--listen", first.address, "--host", first.address, "--allow-anonymous"]
        options += ["--admin-host", first.address, "--join-token-file", str(token_file)]
        options += ["--redis", redis.url, "--model", str(model), "--kv-memory", "33554432"]
        first.run(*TANDEM, "up", *options, "--prefill", "1", "--decode", "1")
        wait_for(lambda: "--ca-sha256" in first.text(), deadline_s=START_DEADLINE_S, what="the up")
        found = re.search(r"--ca-sha256 (\w+)", first.text())
        assert found
        join_options = ["--token-file", str(token_file), "--ca-sha256", found[1]]
        second.run(*TANDEM, "join", first.address, *join_options)
        wait_for(lambda: "joined as" in second.text(), deadline_s=START_DEADLINE_S, what="a host")
        url = f"http://{first.address}:8002"
        scale = [*TANDEM, "scale", "prefill=2", "decode=2", "--url", url, "--deadline", "120"]
        subprocess.run(scale, check=True)
        targets = {"routers": [f"{first.address}:8002"]}
        prometheus = ends.enter_context(Prometheus(tmp_path, targets, ALERTS))
        logs = [*first.folder.glob("state/tandem/runs/*")]
        surfaces = Surfaces(url, logs, prometheus)
        ends.callback(surfaces.close)
        surfaces.wait_well()
        sizes = surfaces.log_sizes()
        alerts = surfaces.alerts()
        second.kill()
        words = problem(re.escape(second.address) + r"\b.* (silent|down)|down or cut off")
        assert not report("node gone", surfaces.watch(words, sizes, alerts))


def test_a_link_between_two_workers_that_is_cut_is_named(tmp_path: Path) -> None:
    with ExitStack() as ends:
        network = ends.enter_context(Network(2))
        redis = ends.enter_context(EmbeddedRedis(host=network.home.address))
        model = make_random_speaker(tmp_path / "model").path
        cluster = LocalCluster(redis, tmp_path, str(model))
        cluster.options = ["--prefill-at", "remote", "--local-prefill-max-tokens", "0"]
        cluster.options += ["--num-blocks", "400"]
        ends.callback(cluster.close)
        cluster.start_router()
        for place, role in zip(network.hosts, ("prefill", "decode"), strict=True):
            cluster.start_worker(f"{role}-0", role, at=place)
        cluster.wait_ready()
        targets = {"routers": [cluster.admin_url.removeprefix("http://")]}
        prometheus = ends.enter_context(Prometheus(tmp_path, targets, ALERTS))
        surfaces = Surfaces(cluster.admin_url, [tmp_path], prometheus)
        ends.callback(surfaces.close)
        ends.callback(chatting(cluster).set)
        surfaces.wait_well()
        sizes = surfaces.log_sizes()
        alerts = surfaces.alerts()
        prefill, decode = network.hosts
        cut(prefill, decode)
        words = problem("decode-0 cannot read KV blocks from it")
        assert not report("link cut", surfaces.watch(words, sizes, alerts))


def cut(one: Place, other: Place) -> None:
    """Cuts the link between two hosts, but not their links to others."""
    for source, target in ((one, other), (other, one)):
        route = ["ip", "-n", source.namespace, "route", "add", "blackhole", f"{target.address}/32"]
        subprocess.run(route, check=True)


def chatting(cluster: LocalCluster) -> threading.Event:
    """Sends requests to the cluster until the returned event is set."""
    ends = threading.Event()

    def chat() -> None:
        number = 0
        while not ends.is_set():
            number += 1
            body = {"prompt": f"{number} " * 60, "max_tokens": 4}
            with suppress(httpx.TransportError):  # at the end the router is stopped first
                httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)

    threading.Thread(target=chat, daemon=True).start()
    return ends
