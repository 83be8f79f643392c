"""The files of a host that checks read, and the result of a check."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check. If the check found a problem, `cost` is the effect of the problem on
    Tandem and `remedy` is what to do. If not, both are ""."""

    name: str
    found: str
    cost: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class HostFiles:
    """The host's files below `root`, and the environment of this process."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def text(self, path: str) -> str:
        """Returns the text of a file without surrounding spaces, or "" if the file cannot be
        read."""
        try:
            return (self.root / path).read_text().strip()
        except OSError:
            return ""

    @property
    def in_container(self) -> bool:
        """True if this process runs in a container."""
        marks = (self.root / ".dockerenv", self.root / "run/.containerenv")
        named = "KUBERNETES_SERVICE_HOST" in self.environment or "container" in self.environment
        return named or any(mark.exists() for mark in marks)

    def has_capability(self, number: int) -> bool:
        """Returns whether this process has a Linux capability. `number` is the capability's number
        in capability.h."""
        effective = re.search(r"^CapEff:\s*(\w+)", self.text("proc/self/status"), re.MULTILINE)
        return effective is not None and bool(int(effective[1], 16) >> number & 1)
