"""State that the pool controller must not lose: its file `controller.json` in the run folder.

The controller alone writes it, before it tells anybody. An agent that Ray started again reads there
whether its process is still wanted: the one that was told is dead, and the controller may be too.
"""

from pathlib import Path

import msgspec

from tandem.cluster.pools import Member
from tandem.config.cluster import Pool

_FILE = "controller.json"


class Owned(msgspec.Struct):
    wanted: dict[Pool, int]
    members: list[Member]

    def wants(self, agent_name: str) -> bool:
        """Returns whether this agent's process is to run: it is known and not on its way out."""
        return any(m.agent_name == agent_name and not m.leaves for m in self.members)

    def write(self, run_folder: Path) -> None:
        fresh = (run_folder / _FILE).with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(self))
        fresh.replace(run_folder / _FILE)


def read(run_folder: Path) -> Owned | None:
    """Reads the file; None before the first controller of this folder has written it."""
    try:
        return msgspec.json.decode((run_folder / _FILE).read_bytes(), type=Owned)
    except FileNotFoundError:
        return None
