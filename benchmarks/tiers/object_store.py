"""An object store for benchmarks: a process of moto's S3 server."""

from __future__ import annotations

import subprocess
import sys
from typing import Self

import boto3
import httpx
from obstore.store import S3Store

from benchmarks.shared.cluster import free_port, wait_for

BUCKET = "tandem-kv"
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}


class ObjectStore:
    """The server and a bucket in it, until the block ends."""

    def __enter__(self) -> Self:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            wait_for(self._answers, deadline_s=120, what="moto's server")
            keys = {name.lower(): value for name, value in KEYS.items()}
            boto3.client(
                "s3", endpoint_url=self.url, region_name="us-east-1", **keys
            ).create_bucket(Bucket=BUCKET)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def settings(self) -> dict[str, str]:
        """Settings of an engine that has the bucket as its store; `KEYS` are its environment."""
        return {
            "kv_store_url": f"s3://{BUCKET}/kv",
            "kv_store_endpoint": self.url,
            "kv_store_region": "us-east-1",
        }

    @property
    def client(self) -> S3Store:
        keys = {name.lower().removeprefix("aws_"): value for name, value in KEYS.items()}
        return S3Store(
            BUCKET,
            endpoint=self.url,
            region="us-east-1",
            client_options={"allow_http": True},
            **keys,
        )

    def _answers(self) -> bool:
        if self._process.poll() is not None:
            raise RuntimeError("moto's server ended")
        try:
            return httpx.get(self.url, timeout=5).status_code < 500
        except httpx.TransportError:
            return False
