"""A real Prometheus with promtool from Debian: installed, or downloaded by apt without root."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx

from tests.harness.cluster import free_port, wait_for
from tests.harness.debian import unpacked

SCRAPE_INTERVAL = "1s"


def program(name: str) -> str:
    """Path of `prometheus` or `promtool`. Skips the test if it is not available."""
    if found := shutil.which(name):
        return found
    return str(unpacked("prometheus", f"usr/bin/{name}"))


class Prometheus:
    """Scrapes `targets` (job -> addresses) and evaluates the rules of a file at short intervals.

    The job `vllm` scrapes with vLLM's metric names.
    """

    def __init__(self, folder: Path, targets: dict[str, list[str]], rules: Path) -> None:
        self._folder = folder
        self._url = f"http://127.0.0.1:{(port := free_port())}"
        config = {
            "global": {"scrape_interval": SCRAPE_INTERVAL, "evaluation_interval": SCRAPE_INTERVAL},
            "rule_files": [str(rules)],
            "scrape_configs": [
                {
                    "job_name": job,
                    "scrape_timeout": SCRAPE_INTERVAL,
                    "static_configs": [{"targets": addresses}],
                    "params": {"names": ["vllm"]} if job == "vllm" else {},
                }
                for job, addresses in targets.items()
            ],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is valid YAML
        self._command = [
            program("prometheus"),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=warn",
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Prometheus:
        with (self._folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        wait_for(self._is_ready, deadline_s=30, what="Prometheus")
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()  # its data is not needed any more
        self._process.wait()

    def query(self, expression: str, at: float | None = None) -> list[dict[str, Any]]:
        """Runs an instant query, now or at `at` seconds since the Unix epoch. Raises AssertionError
        with Prometheus's error."""
        then = {} if at is None else {"time": str(at)}
        answer = self._get("query", query=expression, **then)
        result = answer["result"]
        return [{"value": result}] if answer["resultType"] == "scalar" else result

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def firing(self) -> set[str]:
        return {a["labels"]["alertname"] for a in self.alerts() if a["state"] == "firing"}

    def alerts(self) -> list[dict[str, Any]]:
        """The alerts whose expression is true: pending ones, and those firing after their `for`
        duration."""
        return self._get("alerts")["alerts"]  # type: ignore[no-any-return]

    def wait_scrapes(self, count: int = 2) -> None:
        """Waits until every target has been scraped `count` more times."""
        since = time.time()

        def scraped() -> bool:
            expression = f"count_over_time(up[{max(1, round(time.time() - since))}s]) >= {count}"
            up, enough = self.query("up"), self.query(expression)
            return time.time() - since > 1 and len(enough) == len(up) > 0

        wait_for(scraped, deadline_s=20, what="scrapes of all targets")

    def _get(self, path: str, **query: str) -> dict[str, Any]:
        answer = httpx.get(f"{self._url}/api/v1/{path}", params=query, timeout=10).json()
        assert answer["status"] == "success", f"{query}: {answer.get('error')}"
        return answer["data"]  # type: ignore[no-any-return]

    def _is_ready(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError((self._folder / "prometheus.log").read_text()[-3000:])
        try:
            return httpx.get(f"{self._url}/-/ready", timeout=2).status_code == 200
        except httpx.TransportError:
            return False
