"""A process of moto's S3 server, which may be stopped, killed and started again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import boto3
import obstore
from obstore.store import S3Store

BUCKET = "tandem-kv"
DEADLINE_S = 120.0


class ObjectStoreServer:
    """Its objects are in its memory."""

    def __init__(self, folder: Path) -> None:
        """Logs go to `folder`."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = folder / "moto.log"
        self.start()

    def start(self, num_open_calls: int | None = None) -> None:
        """Starts it and makes the bucket. After so many calls it looks at credentials."""
        environment = dict(os.environ)
        if num_open_calls is not None:
            environment["INITIAL_NO_AUTH_ACTION_COUNT"] = str(num_open_calls)
        command = ["-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *command], env=environment, stdout=log, stderr=log
            )
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                break
            except OSError:
                assert self._process.poll() is None, self._log.read_text()
                assert time.monotonic() < deadline, self._log.read_text()
                time.sleep(0.05)
        boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
        ).create_bucket(Bucket=BUCKET)

    @property
    def settings(self) -> dict[str, str]:
        """The settings of an engine that has the bucket as its store."""
        return {
            "kv_store_url": f"s3://{BUCKET}/kv",
            "kv_store_endpoint": self.url,
            "kv_store_region": "us-east-1",
        }

    @property
    def client(self) -> S3Store:
        return S3Store(
            BUCKET,
            endpoint=self.url,
            region="us-east-1",
            access_key_id="test",
            secret_access_key="test",
            client_options={"allow_http": True},
        )

    def blocks(self) -> list[str]:
        """Returns the names of all objects that are blocks."""
        found = [each["path"] for batch in obstore.list(self.client) for each in batch]
        return sorted(name for name in found if not name.endswith("/about"))

    def stop(self) -> None:
        """Lets it hang, connections and all, until `resume`."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def bring_back(self) -> None:
        """Ends `stop`, or starts it without its objects after `kill`."""
        if self._process.poll() is None:
            self.resume()
        else:
            self.start()
