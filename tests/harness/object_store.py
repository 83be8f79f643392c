"""A moto S3 server process that tests can stop, kill and restart."""

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
    """An S3 server that keeps its objects in memory."""

    def __init__(self, folder: Path) -> None:
        """Prepares the server. Logs are written to `folder`."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = folder / "moto.log"
        self.start()

    def start(self, num_open_calls: int | None = None) -> None:
        """Starts the server and creates the bucket. Credentials are checked after `num_open_calls`
        calls."""
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
        """The engine settings that use the bucket as the object store."""
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
        """Lists the names of all objects that are blocks."""
        found = [each["path"] for batch in obstore.list(self.client) for each in batch]
        return sorted(name for name in found if not name.endswith("/about"))

    def stop(self) -> None:
        """Makes the server hang, including its open connections, until `resume`."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def bring_back(self) -> None:
        """Resumes the server after `stop`, or restarts it without its objects after `kill`."""
        if self._process.poll() is None:
            self.resume()
        else:
            self.start()
