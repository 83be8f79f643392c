"""Runs a worker in its place of a network, selected by its id, because Ray's agents know no places.

python -m tests.harness.placing PLACES COMMAND ...

The process becomes the command by exec, so its pid and start time do not change.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict

from tests.harness.network import Network, Place


def format_places(network: Network, places: Mapping[str, Place]) -> str:
    """Formats PLACES: the places of workers by id. All other workers run at home."""
    all_places = {"": network.home, **places}
    return json.dumps({worker_id: asdict(place) for worker_id, place in all_places.items()})


def main() -> None:
    places = json.loads(sys.argv[1])
    command = sys.argv[2:]
    worker_id = command[command.index("--worker-id") + 1]
    place = Place(**places.get(worker_id, places[""]))
    command = [*place.prefix, *command, "--host", place.address]
    environment = place.environment if place.namespace else {}
    os.execvpe(command[0], command, {**os.environ, **environment})


if __name__ == "__main__":
    main()
