"""A server of an object store for tests of engine processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.harness.object_store import ObjectStoreServer


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStoreServer]:
    """A server of S3, whose credentials processes find in their environment."""
    pytest.importorskip("obstore")
    pytest.importorskip("moto")
    from tests.harness.object_store import ObjectStoreServer

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    made = ObjectStoreServer(tmp_path)
    yield made
    made.kill()
