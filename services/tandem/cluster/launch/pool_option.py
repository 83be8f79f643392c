"""Parses `--prefill`, `--decode`, `--encode` and `--routers`: SIZE, or SIZE:LABEL=VALUE,..."""

import re
from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter, Token

from tandem.common.options import Bounds, by_comma, to_int
from tandem.errors import ConfigError

_WORD = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_LABEL = re.compile(f"{_WORD}={_WORD}")
_OWN = ("ray.io", "tandem-")


class LabelledSize(int):
    """A pool size with the labels that the pool's hosts must have, such as 2:gpu=H100. It equals
    only a size with the same labels."""

    labels: tuple[str, ...]

    def __new__(cls, size: int, labels: tuple[str, ...]) -> "LabelledSize":
        made = super().__new__(cls, size)
        made.labels = labels
        return made

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, int)
            and labels_of(other) == self.labels
            and int.__eq__(self, int(other))
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((int(self), self.labels))

    def __str__(self) -> str:
        return f"{int(self)}:{','.join(self.labels)}"


def labels_of(size: object) -> tuple[str, ...]:
    """Returns the labels that a pool's hosts must have; () for a plain int."""
    return size.labels if isinstance(size, LabelledSize) else ()


def parse_labels(text: str) -> tuple[str, ...]:
    """Parses NAME=VALUE,... with the rules of Ray's labels. Raises ConfigError."""
    labels = tuple(part.strip() for part in text.split(",") if part.strip())
    for label in labels:
        if not _LABEL.fullmatch(label) or label.startswith(_OWN):
            raise ConfigError(
                f"the label {label[:80]!r} must be NAME=VALUE; NAME and VALUE must each have 1 to "
                "63 letters, digits, '-', '_' and '.', and must begin and end with a letter or "
                "digit; NAME must not begin with ray.io or tandem-"
            )
    return labels


def as_mapping(labels: tuple[str, ...]) -> dict[str, str]:
    return dict(label.split("=", 1) for label in labels)


def _parse_size(_: object, tokens: Sequence[Token]) -> int:
    size, colon, labels = tokens[-1].value.partition(":")
    return LabelledSize(to_int(size), parse_labels(labels)) if colon else to_int(size)


Labels = Annotated[tuple[str, ...], by_comma("NAME=VALUE,...", parse_labels)]
PoolSize = Annotated[
    int,
    Bounds(least=0, most=64),
    Parameter(converter=_parse_size, n_tokens=1, metavar="N[:LABEL=VALUE,...]"),
]
