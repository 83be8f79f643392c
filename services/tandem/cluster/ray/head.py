"""Starts Ray on one machine: a head with the pool controller, or a node that joins a head.

  python -m tandem.cluster.ray.head RUN_FOLDER [NODE]

NODE is a `RayNode` as JSON. By default, the program starts a head on free ports of 127.0.0.1.

1. The program starts a raylet, and for a head also a GCS.
2. For a head, it prints the line `LISTENING` and waits for a `ClusterSpec` as JSON on standard
   input. The caller may send the spec later. Then the program creates the pool controller.
3. It prints one line of JSON (`HeadStarted`) and exits. The processes that it started remain.
"""

import sys
import time
from pathlib import Path

import msgspec

from tandem.cluster.pools import ClusterSpec
from tandem.cluster.ray.node import (
    LISTENING,
    NAMESPACE,
    START_DEADLINE_S,
    HeadStarted,
    RayNode,
    start_head,
)


def main(run_folder: Path, node: RayNode) -> None:
    began = time.monotonic()
    import ray

    from tandem.cluster.ray.controller import start_controller

    address, pids = start_head(run_folder / "ray", node)
    head_s = time.monotonic() - began
    spec_at = time.monotonic()
    if not node.head_address:
        sys.stdout.buffer.write(LISTENING)
        sys.stdout.buffer.flush()
        spec = msgspec.json.decode(sys.stdin.buffer.read(), type=ClusterSpec)
        spec_at = time.monotonic()
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            configure_logging=False,
            _node_ip_address=node.address,
        )
        controller = start_controller(spec)
        ray.get(controller.state.remote(), timeout=START_DEADLINE_S)
    done = HeadStarted(address, pids, head_s, time.monotonic() - spec_at)
    sys.stdout.buffer.write(msgspec.json.encode(done) + b"\n")


if __name__ == "__main__":
    node_json = sys.argv[2] if len(sys.argv) > 2 else "{}"
    main(Path(sys.argv[1]), msgspec.json.decode(node_json, type=RayNode))
