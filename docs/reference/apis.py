"""Writes the reference pages of the APIs: http.md, grpc.md and python.md.

    python -m docs.reference.apis        # make reference

They come from the OpenAPI documents of both HTTP ports, from the contracts in proto/ and from the
docstrings of the package `tandem`. A test compares the pages with these.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import subprocess
import sys
import tempfile
import textwrap
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorSet,
)

import tandem
from tandem.api.admin.app import make_admin_app
from tandem.api.app import make_app
from tandem.common.config.engine import EngineOptions
from tandem.common.config.router import RouterConfig
from tandem.common.options import make_app as make_parser
from tandem.llm import _VLLM_OPTIONS, _engine_config

ROOT = Path(__file__).parents[2]
_WIDTH = 120
_METHODS = "get", "post", "put", "patch", "delete"
_PROTOS = {"inference": "Public API", "cluster": "API of operators"}


def pages() -> dict[str, str]:
    """Returns the complete text of each page, by its path in the repository."""
    made = {"http": http_page(), "grpc": grpc_page(), "python": python_page()}
    return {f"docs/reference/{name}.md": text for name, text in made.items()}


def http_page() -> str:
    config = MagicMock(spec=RouterConfig, api="all", responses_kept=1, cluster=MagicMock())
    part: Any = MagicMock()  # the functions of the routes use the router's parts; documents do not
    public = make_app(config, part, part, part, part, part, part).openapi()
    admin = make_admin_app(config, [part], {}, part, part, part).openapi()
    text = _paragraph(
        "`make reference` writes this page from the OpenAPI documents that a router serves at "
        "`/openapi.json` of each port. [The guide](../api.md) says what the fields mean and which "
        "calls other APIs have."
    )
    schemas = public["components"]["schemas"] | admin.get("components", {}).get("schemas", {})
    return "\n".join(
        [
            *("# HTTP API: routes and fields", "", *text),
            *("## Public port", "", *_routes(public)),
            *("## Admin port", "", *_routes(admin)),
            *_schemas(schemas),
        ]
    )


def _routes(document: Mapping[str, Any]) -> Iterator[str]:
    rows = []
    for path, operations in sorted(document["paths"].items()):
        for method in (m for m in _METHODS if m in operations):
            operation = operations[method]
            content = operation.get("requestBody", {}).get("content", {})
            body = _type(content.get("application/json", {}).get("schema", {}))
            if "multipart/form-data" in content:
                body = "`multipart/form-data`"
            described = " ".join(operation.get("description", "").split())
            rows.append((f"`{method.upper()} {path}`", body, described))
    yield from _table(("route", "body", "what it does"), rows)


def _schemas(schemas: Mapping[str, Any]) -> Iterator[str]:
    yield from ("## Bodies", "")
    for name, schema in sorted(schemas.items()):
        if name.startswith(("HTTPValidationError", "ValidationError")):
            continue
        yield from (f"### {name}", "")
        if described := schema.get("description"):
            yield from _paragraph(described)
        required = schema.get("required", ())
        rows = [
            (
                f"`{field}`",
                _type(value),
                "required" if field in required else _default(value),
                " ".join(value.get("description", "").split()),
            )
            for field, value in schema.get("properties", {}).items()
        ]
        if rows:
            yield from _table(("field", "type", "default", "meaning"), rows)
        elif "enum" in schema:
            yield from _paragraph("One of " + ", ".join(f"`{v}`" for v in schema["enum"]) + ".")


def _type(schema: Any) -> str:
    """Returns a schema's type in words, with links to the schemas of this page."""
    if not isinstance(schema, dict) or not schema:
        return ""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for key in ("anyOf", "oneOf"):
        if key in schema:
            kinds = [_type(each) or "any" for each in schema[key] if each.get("type") != "null"]
            return " or ".join(dict.fromkeys(kinds))
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items')) or 'any'}"
    return str(schema.get("type", "any"))


def _default(schema: Mapping[str, Any]) -> str:
    value = schema.get("default")
    return "" if value in (None, "", [], {}) else f"`{str(value).lower()}`"


def grpc_page() -> str:
    text = _paragraph(
        "`make reference` writes this page from the contracts in `proto/tandem/v1/`. Both ports "
        "have reflection, so gRPC tools find the services without these files. Fields have "
        "proto3's defaults. The contract between routers and workers, "
        "[worker.proto](../../proto/tandem/v1/worker.proto), is not for clients."
    )
    lines = ["# gRPC API: services and messages", "", *text]
    for file in _descriptors().file:
        name = Path(file.name).stem
        if name not in _PROTOS:
            continue
        comments = {
            tuple(where.path): where.leading_comments or where.trailing_comments
            for where in file.source_code_info.location
        }
        lines += [f"## {_PROTOS[name]}", ""]
        for number, service in enumerate(file.service):
            lines += [f"### {file.package}.{service.name}", ""]
            rows = [
                (
                    f"`{method.name}`",
                    _message_link(method.input_type),
                    ("stream of " if method.server_streaming else "")
                    + _message_link(method.output_type),
                    _cell(comments.get((6, number, 2, index), "")),
                )
                for index, method in enumerate(service.method)
            ]
            lines += _table(("call", "request", "answer", "what it does"), rows)
        for path, message in _messages(file.message_type, (4,)):
            lines += [f"### {message.name}", ""]
            if comment := comments.get(path, ""):
                lines += _paragraph(comment)
            rows = [
                (
                    f"`{field.name}`",
                    _field_type(field),
                    str(field.number),
                    _cell(comments.get((*path, 2, index), "")),
                )
                for index, field in enumerate(message.field)
            ]
            if rows:
                lines += _table(("field", "type", "number", "meaning"), rows)
    return "\n".join(lines)


def _messages(
    messages: Iterable[DescriptorProto], path: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], DescriptorProto]]:
    """Yields each message, and those inside of it, with its path in the descriptor of the file."""
    for number, message in enumerate(messages):
        if not message.options.map_entry:
            yield (*path, number), message
            yield from _messages(message.nested_type, (*path, number, 3))


def _descriptors() -> FileDescriptorSet:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set.bin"
        files = [str(ROOT / "proto/tandem/v1" / f"{name}.proto") for name in _PROTOS]
        arguments = [f"-I{ROOT / 'proto'}", "--include_source_info", f"--descriptor_set_out={out}"]
        # In a process of its own, because the compiler's protobuf library must not be loaded beside
        # another one.
        subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *arguments, *files], check=True)
        return FileDescriptorSet.FromString(out.read_bytes())


def _message_link(full_name: str) -> str:
    name = full_name.rpartition(".")[2]
    return f"[{name}](#{name.lower()})"


def _field_type(field: FieldDescriptorProto) -> str:
    of_messages = field.type == FieldDescriptorProto.TYPE_MESSAGE
    plain = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    if of_messages and field.type_name.endswith("Entry"):
        return "map"
    name = _message_link(field.type_name) if of_messages else plain
    return f"list of {name}" if field.label == FieldDescriptorProto.LABEL_REPEATED else name


def python_page() -> str:
    text = _paragraph(
        "`make reference` writes this page from the docstrings of the package `tandem`. [The "
        "guide](../python.md) has examples."
    )
    lines = ["# Python API: classes", "", *text]
    for name in tandem.__all__:
        made = getattr(tandem, name)
        lines += [f"## {name}", "", *_paragraph(inspect.getdoc(made) or "")]
        if is_dataclass(made):
            lines += _table(("field", "type", "default", "meaning"), _fields(made))
        for method, function in vars(made).items():
            described = getattr(function, "__doc__", None)
            is_public = not method.startswith("_") or method == "__init__"
            if not is_public or not described or (is_dataclass(made) and method == "__init__"):
                continue
            shown = name if method == "__init__" else f"{name}.{method}"
            call = "" if isinstance(function, property) else _signature(function)
            lines += [f"### {shown}", "", "```text", f"{shown}{call}", "```", ""]
            lines += _paragraph(inspect.cleandoc(described))
    return "\n".join([*lines, *_llm_options()])


def _signature(function: Any) -> str:
    found = inspect.signature(function)
    parameters = [
        p.replace(annotation=inspect.Parameter.empty)
        for n, p in found.parameters.items()
        if n != "self"
    ]
    return str(found.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def _fields(made: Any) -> Iterator[tuple[str, ...]]:
    comments = _comments(made)
    for field in fields(made):
        if field.name.startswith("_"):
            continue
        default = field.default
        if default is MISSING:
            default = None if field.default_factory is MISSING else field.default_factory()
            shown = "required" if field.default_factory is MISSING else f"`{default!r}`"
        else:
            shown = f"`{default!r}`"
        kind = field.type if isinstance(field.type, str) else inspect.formatannotation(field.type)
        kind = re.sub(r"\b(?:\w+\.)+(?=\w)", "", kind)
        yield (
            f"`{field.name}`",
            f"`{kind}`".replace("|", "\\|"),
            shown,
            comments.get(field.name, ""),
        )


def _comments(made: Any) -> dict[str, str]:
    """Returns the comment of each field of a class: beside it, or in the lines above it."""
    source = textwrap.dedent(inspect.getsource(made))
    notes = {
        token.start[0]: (token.string.lstrip("# "), token.line.lstrip().startswith("#"))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    found = {}
    (body,) = (node.body for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            above, line = [], node.lineno - 1
            while notes.get(line, ("", False))[1]:
                above.insert(0, notes[line][0])
                line -= 1
            beside = [
                notes[n][0] for n in range(node.lineno, (node.end_lineno or 0) + 1) if n in notes
            ]
            found[node.target.id] = _cell(" ".join([*above, *beside]))
    return found


def _llm_options() -> Iterator[str]:
    yield from ("## Options of LLM and AsyncLLM", "")
    yield from _paragraph(
        "`LLM` and `AsyncLLM` take these options by name, most of which `tandem worker` has, too. "
        "Where vLLM's `LLM` has an option, its name is vLLM's. Sizes are numbers of bytes, and "
        "times are seconds. Where the default is `None`, the text says what it means under `0`."
    )
    names = {own: name for name, own in _VLLM_OPTIONS.items()}
    found = make_parser(EngineOptions).assemble_argument_collection(parse_docstring=True)
    fields_of = {argument.name: argument.keys[-1] for argument in found if argument.keys}
    defaults = _engine_config("", enable_lora=True, options={})

    def as_argument(option: re.Match[str]) -> str:
        field = fields_of.get(option[0])
        return f"`{names.get(field, field)}`" if field else option[0]

    rows = []
    for argument in found:
        field = argument.field_info.names[0] if argument.field_info.names else ""
        if argument.parse and field not in ("", "settings", "lora", "queue_max"):
            default = f"`{getattr(defaults, field)!r}`"
            if field == "num_threads":
                default = "the cores of the process, divided by `tensor_parallel_size`"
            text = re.sub(r"--[a-z-]+", as_argument, argument.parameter.help or "")
            rows.append((f"`{names.get(field, field)}`", default, _cell(text)))
    yield from _table(("option", "default", "meaning"), rows)


def _paragraph(text: str) -> list[str]:
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(text))
    return [
        line
        for paragraph in paragraphs
        for line in (*textwrap.wrap(" ".join(paragraph.split()), _WIDTH), "")
    ]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [
        "|" + "|".join(f" {cell} " if cell else " " for cell in row) + "|"
        for row in (columns, *rows)
    ]
    return [lines[0], "|---" * len(columns) + "|", *lines[1:], ""]


if __name__ == "__main__":
    for path, text in pages().items():
        (ROOT / path).write_text(text, "utf-8")
