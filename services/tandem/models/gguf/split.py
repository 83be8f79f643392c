"""Finds the files of a model that was split by llama.cpp's gguf-split.

The parts are named NAME-00001-of-00003.gguf and so on. The first part has the keys of the model.
Each part has some of the tensors, its part number and the total number of tensors.
"""

from __future__ import annotations

import re
from pathlib import Path

from tandem.errors import ConfigError
from tandem.models.files import few

_PART = re.compile(r"(?P<name>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.I)


def whole_name(file: Path) -> str:
    """Returns the file's name without suffix and part number: NAME for NAME-00001-of-00003.gguf."""
    found = _PART.fullmatch(file.name)
    return found["name"] if found else file.stem


def parts_of(file: Path) -> tuple[Path, ...]:
    """Returns all parts of the model to which `file` belongs, in order. Raises ConfigError naming
    the parts that are missing."""
    found = _PART.fullmatch(file.name)
    if found is None:
        return (file,)
    count = int(found["count"])
    if not 1 <= int(found["number"]) <= count:
        raise ConfigError(
            f"{file} has the part number {found['number']} in its name; it must be from 1 to "
            f"{found['count']}"
        )
    numbers = range(1, count + 1)
    parts = tuple(
        file.with_name(f"{found['name']}-{number:05}-of-{count:05}{found['suffix']}")
        for number in numbers
    )
    if missing := [part.name for part in parts if not part.is_file()]:
        raise ConfigError(
            f"{file} is one of {count} parts of a model, but {file.parent} lacks {few(missing)}"
        )
    return parts
