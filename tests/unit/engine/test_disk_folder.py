"""Workers that start together on a machine find the folders of the workers before them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tandem.engine.tiers.disk_folder import claim


def test_workers_that_start_together_take_the_folders_that_are_there(tmp_path: Path) -> None:
    """One looks into all free folders while the other one starts: it locks them for that."""
    before = [claim(tmp_path, lambda path: False) for _ in range(2)]
    for folder in before:
        folder.close()
    looks, has_other = threading.Event(), threading.Event()

    def is_own(path: Path) -> bool:
        looks.set()
        has_other.wait(0.3)  # the other one waits in turn
        return True

    with ThreadPoolExecutor(1) as threads:
        one = threads.submit(claim, tmp_path, is_own)
        assert looks.wait(60)
        two = claim(tmp_path, lambda path: True)
        has_other.set()
        assert [one.result().path.name, two.path.name] == ["0", "1"]
    one.result().close()
    two.close()
