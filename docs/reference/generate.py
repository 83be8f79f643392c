"""Generates files from the definitions of options: options.md, and parts of the Helm chart
(defaults, schema, Redis users).

`make options` runs it, and a test checks that its output is current. Options are defined as
described in `services/tandem/common/options.py`.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cyclopts import Argument, Group

from tandem.cluster.launch.controller import ControllerOptions
from tandem.cluster.launch.joined_host import JoinOptions
from tandem.cluster.launch.options import LaunchOptions
from tandem.common.config.cluster import ClusterConfig
from tandem.common.config.groups import MEASUREMENT, PROCESS
from tandem.common.config.redis_front import RedisFrontOptions
from tandem.common.config.router import RouterOptions
from tandem.common.config.tls import Kind
from tandem.common.config.worker import WorkerOptions
from tandem.common.options import bounds, choices, make_app, to_text
from tandem.net.store.roles import rules
from tandem.ops.kv_size.options import KvSizeOptions
from tandem.ops.simulator.options import SimulateOptions

ROOT = Path(__file__).parents[2]
PAGE = "docs/reference/options.md"
VALUES, SCHEMA = "helm/tandem/values.yaml", "helm/tandem/values.schema.json"
PROGRAMS = {
    "tandem up": LaunchOptions,
    "tandem join": JoinOptions,
    "tandem controller": ControllerOptions,
    "tandem router": RouterOptions,
    "tandem worker": WorkerOptions,
    "tandem redis-front": RedisFrontOptions,
    "tandem simulate": SimulateOptions,
    "tandem kv-size": KvSizeOptions,
}
_INTRODUCTION = """
`make options` writes this page from the settings in `services/tandem/common/config/`. A size
is a number of bytes or has a unit, such as `500MB` or `4GiB`. A time is a number of seconds or has
a unit, such as `250ms`, `90s`, `5m` or `1h30m`. Variables and a file can set the options of
`tandem up` and `tandem join` ([configuration](../configuration.md)). The chart has the options of
routers as `router.options` and those of workers as `worker.options`, in camel case: `--kv-memory`
is `kvMemory`. Times in the chart are numbers of seconds. The chart has no options of the groups
Process, and Tests and measurements.
"""
_YAML_WORDS = ("", "on", "off", "yes", "no", "true", "false")


def generated() -> dict[str, str]:
    """Returns the complete text of each generated file, by path."""
    values, schema = (ROOT / VALUES).read_text("utf-8"), (ROOT / SCHEMA).read_text("utf-8")
    for program in ("router", "worker"):
        mirrored = [
            a for a in _options(f"tandem {program}") if _group(a) not in (PROCESS, MEASUREMENT)
        ]
        title = f"of `tandem {program}`, in "
        values = _spliced(values, f"  options: # {title}", _yaml(mirrored))
        lines = ",\n".join(f'"{_camel(a)}": {json.dumps(_schema(a))}' for a in mirrored).split("\n")
        schema = _spliced(schema, f'"description": "{title}', lines, below='"properties": {')
    kinds: tuple[Kind, ...] = ("router", "worker", "controller")
    users = {f"helm/tandem/redis/{kind}.acl": rules(kind, "%CLUSTER%") + "\n" for kind in kinds}
    return {PAGE: _page(), VALUES: values, SCHEMA: schema, **users}


def _options(program: str) -> list[Argument]:
    """Returns a program's options with their help texts, sorted by group."""
    found = make_app(PROGRAMS[program]).assemble_argument_collection(parse_docstring=True)
    options = [a for a in found if a.parse and a.name != "*"]
    return sorted(options, key=lambda a: _group(a).sort_key)


def _group(argument: Argument) -> Group:
    (group,) = argument.parameter.group
    return group


def _camel(argument: Argument) -> str:
    first, *words = argument.name.removeprefix("--").split("-")
    return first + "".join(word.capitalize() for word in words)


def _help(argument: Argument) -> str:
    return " ".join(argument.parameter.help.split())


def _yaml(options: Iterable[Argument]) -> Iterator[str]:
    for argument in options:
        value = argument.field_info.default
        text = f"{value:g}" if isinstance(value, float) else to_text(value)
        if isinstance(value, bool):
            text = text.lower()
        elif text in _YAML_WORDS:
            text = f'"{text}"'
        yield from textwrap.wrap(f"# {_help(argument)}", 96, subsequent_indent="# ")
        yield f"{_camel(argument)}: {text}"


def _schema(argument: Argument) -> dict[str, Any]:
    schema: dict[str, Any] = {"description": _help(argument)}
    if words := choices(argument):
        return schema | {"enum": list(words)}
    default, allowed = argument.field_info.default, bounds(argument)
    types = {bool: "boolean", int: "integer", float: "number", type(None): "integer"}
    schema["type"] = types.get(type(default), "string")
    if argument.parameter.metavar == "SIZE":
        schema |= {"type": ["integer", "string"], "pattern": "^[0-9]+(\\.[0-9]+)?[KMGTkmgt]i?B$"}
    if allowed.least is not None:
        schema["minimum"] = 0 if default is None else allowed.least
    if allowed.above is not None:
        schema["exclusiveMinimum"] = allowed.above
    if allowed.most is not None:
        schema["maximum"] = allowed.most
    if allowed.pattern is not None:
        schema["pattern"] = f"^{allowed.pattern}$"
    return schema


def _spliced(text: str, title: str, new: Iterable[str], below: str = "") -> str:
    """Replaces the lines below a title that are indented deeper than it. With `below`, the title is
    the next line that contains it."""
    lines = text.split("\n")
    start = next(i for i, line in enumerate(lines) if title in line)
    start = next(i for i in range(start, len(lines)) if below in lines[i])
    depth = _depth(lines[start])
    end = next(i for i in range(start + 1, len(lines)) if _depth(lines[i]) <= depth)
    return "\n".join([*lines[: start + 1], *(" " * (depth + 2) + n for n in new), *lines[end:]])


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def _page() -> str:
    lines = [
        "# Options",
        "",
        *textwrap.wrap(_INTRODUCTION.strip(), 120),
        "",
    ]
    for program, made in PROGRAMS.items():
        description = textwrap.wrap(" ".join((made.__doc__ or "").split()), 120)
        lines += [f"## {program}", "", *description]
        group = None
        for argument in _options(program):
            if group is not _group(argument):
                group = _group(argument)
                lines += [
                    "",
                    f"### {group.name}",
                    "",
                    "| option | default | allowed | |",
                    "|---|---|---|---|",
                ]
            lines.append(_row(argument))
        lines.append("")
    lines += ["## Environment", "", "Routers and workers of a cluster read these.", ""]
    lines += ["| variable | |", "|---|---|"]
    found = make_app(ClusterConfig).assemble_argument_collection(parse_docstring=True)
    for argument in found:
        if argument.parameter.env_var:
            lines.append(f"| `{argument.parameter.env_var[0]}` | {_help(argument)} |")
    return "\n".join(lines) + "\n"


def _row(argument: Argument) -> str:
    value = argument.field_info.default
    show = argument.parameter.show_default
    text = show(value) if callable(show) and not argument.required else to_text(value)
    default = "required" if argument.required else f"`{text}`" if text else ""
    names = f"`{argument.name}`" + "".join(f", `{n}`" for n in argument.negatives)
    return f"| {names} | {default} | {_allowed(argument)} | {_help(argument)} |"


def _allowed(argument: Argument) -> str:
    allowed = bounds(argument)
    texts = [*(f"`{word}`" for word in choices(argument))]
    if allowed.least is not None:
        texts.append(f"at least {0 if argument.field_info.default is None else allowed.least}")
    if allowed.above is not None:
        texts.append(f"above {allowed.above}")
    if allowed.most is not None:
        texts.append(f"at most {allowed.most}")
    return ", ".join(texts)


if __name__ == "__main__":
    for path, text in generated().items():
        (ROOT / path).write_text(text, "utf-8")
