"""A host as its files show it, and what a check of it finds."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Finding:
    """`cost` says what is lost, and `remedy` what to do; both are empty if nothing is lost."""

    name: str
    found: str
    cost: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class HostFiles:
    """The host as its files and this process's environment show it."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def text(self, path: str) -> str:
        """Returns a file's text without its last newline; empty if there is none."""
        try:
            return (self.root / path).read_text().strip()
        except OSError:
            return ""

    @property
    def in_container(self) -> bool:
        """True if this process sees other files than the host's programs do."""
        marks = (self.root / ".dockerenv", self.root / "run/.containerenv")
        named = "KUBERNETES_SERVICE_HOST" in self.environment or "container" in self.environment
        return named or any(mark.exists() for mark in marks)

    def has_capability(self, number: int) -> bool:
        """Returns whether this process has a capability of Linux, by its number in capability.h."""
        effective = re.search(r"^CapEff:\s*(\w+)", self.text("proc/self/status"), re.MULTILINE)
        return effective is not None and bool(int(effective[1], 16) >> number & 1)
