"""The command `tandem kv-size`: prints the results as tables or as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import msgspec
from rich.console import Console

from tandem.common.options import read
from tandem.common.process.progress import ProgressRow, Waiting
from tandem.errors import TandemError
from tandem.ops.kv_size.answer import compute
from tandem.ops.kv_size.options import KvSizeOptions
from tandem.ops.kv_size.tables import tables


def main() -> None:
    options = read(KvSizeOptions, "tandem kv-size")
    try:
        with Waiting(ProgressRow(options.model, "is read")):
            answer = compute(options)
    except (TandemError, OSError, msgspec.MsgspecError) as error:
        print(f"tandem kv-size: {getattr(error, 'message', error)}", file=sys.stderr)
        raise SystemExit(1) from None
    if options.json:
        result = asdict(answer) | {"rates": msgspec.to_builtins(answer.rates)}
        print(json.dumps(result, indent=1))
        return
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    for part in tables(answer, options):
        console.print(part, soft_wrap=isinstance(part, str))
        console.print()
