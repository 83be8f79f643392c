"""Settings of a cluster's further models: each has its own value of some options.

    --more-models "qwen2.5-0.5b decode=2 kv-memory=2GiB; ./my-model served-model-name=small"

The text has an entry for each model, with ";" between two entries. An entry has the model and then
its options without their dashes. A word with spaces or with ";" needs quotation marks, as in a
shell. All other options have the values that the program got for all models.
"""

import re
import shlex
from collections.abc import Collection, Iterable, Sequence
from typing import TypeVar

from tandem.common.options import Options, arguments, parse, to_argv
from tandem.errors import ConfigError

T = TypeVar("T", bound=Options)

OPTION = "--more-models"
_GROUP_MAX = 40  # largest number of characters; the group is part of file names


def split_models(text: str) -> list[list[str]]:
    """Returns the words of each entry, of which the first is the model. Raises ConfigError."""
    words = shlex.shlex(text, posix=True, punctuation_chars=";")
    words.whitespace_split = True
    words.commenters = ""
    entries: list[list[str]] = [[]]
    try:
        for word in words:
            if word and not word.strip(";"):
                entries.append([])
            else:
                entries[-1].append(word)
    except ValueError as error:
        raise ConfigError(f"{OPTION[2:]} cannot be read: {error}") from None
    return [entry for entry in entries if entry]


def join_models(entries: Iterable[Sequence[str]]) -> str:
    """Returns the text of entries; `split_models` reads it."""
    return "; ".join(map(shlex.join, entries))


def with_all_models(argv: Sequence[str]) -> list[str]:
    """Returns the command line with every --model after the first as an entry of --more-models."""
    models: list[str] = []
    more: list[str] = []
    others: list[str] = []
    words = iter(argv)
    for word in words:
        name, has_value, value = word.partition("=")
        if name not in ("--model", OPTION):
            others.append(word)
            continue
        found = models if name == "--model" else more
        found.extend([value] if has_value else [next(words, "")])
    if len(models) < 2:
        return list(argv)
    return ["--model", models[0], OPTION, "; ".join(filter(None, [*models[1:], *more])), *others]


def as_words(argv: Sequence[str]) -> list[str]:
    """Returns the words of an entry for the options of a command line of `to_argv`."""
    words: list[str] = []
    for text in argv:
        if text.startswith("--"):
            words.append(text[2:])
        else:
            words[-1] += f"={text}"
    return words


def names_of(*classes: type[Options]) -> frozenset[str]:
    """Returns the names of the options of classes of settings, such as "--kv-memory"."""
    return frozenset(a.name for each in classes for a in arguments(each) if a.parse)


def settings_of(
    settings: T,
    made: type[T],
    entry: Sequence[str],
    *,
    own: Collection[str],
    reset: Collection[str],
) -> T:
    """Returns the settings of one further model.

    `made` is the class of the new settings. `own` has the options that an entry may set. Options in
    `reset` have their defaults unless the entry sets them, and all others the values of `settings`.
    Raises ConfigError that names the entry.
    """
    model, *words = entry
    line = []
    for word in words:
        name, has_value, value = word.partition("=")
        if f"--{name}" not in own and f"--{name.removeprefix('no-')}" not in own:
            allowed = ", ".join(sorted(each[2:] for each in own))
            raise ConfigError(
                f"more-models: {model} has the option {name!r}, which a model cannot have for "
                f"itself; the options of a model are: {allowed}"
            )
        line += [f"--{name}", value] if has_value else [f"--{name}"]
    inherited = to_argv(settings, without={*reset, "--model", OPTION})
    try:
        return parse(made, model, [*inherited, "--model", model, *line])
    except ConfigError as error:
        raise ConfigError(f"more-models: {model}: {error.message}") from None


def group_name(served_name: str) -> str:
    """Returns the name of the group of pools for a model's name: "qwen2.5-0.5b" for
    "Qwen/Qwen2.5-0.5B". Returns "" if the name has no letter or digit."""
    last = served_name.rstrip("/").rpartition("/")[2].lower().removesuffix(".gguf")
    return re.sub("[^a-z0-9.-]+", "-", last)[:_GROUP_MAX].strip("-.")


def check_groups(first: str, groups: Sequence[str]) -> None:
    """Raises ConfigError if a further model has no group, or two models have the same one. `first`
    is the group of the first model, if it has one."""
    for number, group in enumerate(groups):
        if not group or group in (first, *groups[:number]):
            raise ConfigError(
                f"more-models: the pools of a further model would have the name {group!r}; the "
                "names must differ, and have a letter or a digit. They come from the names of the "
                "models: set served-model-name in the entries"
            )
