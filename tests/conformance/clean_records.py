"""Makes test data of the requests that `run_clients.py --programs --records FOLDER` wrote.

    python tests/conformance/clean_records.py FOLDER

For each program, `tests/data/agents/PROGRAM.json` gets the first and the last request with the same
types of tools, and the first one without tools, of each API. Names, types, numbers and schemas
stay. Prose becomes `{"filler": N}`, where N is the number of its tokens: no text of a vendor is
kept. Ids get other digits.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

from tandem.models.source import resolve
from tandem.models.tokenizer.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data" / "agents"
# This text at the beginning of a block has a meaning of its own.
_BILLING = "x-anthropic-billing-header:"
# A text without spaces is a name, a type, a path or an id.
_NAME = re.compile(r"[^\s{}<>`]{0,400}")
_ID = re.compile(r"(?=[a-f]*[0-9])(?=[0-9]*[a-f])[0-9a-f]{8,}")
# Headers of the requests that say something about a program and not about its HTTP client.
_HEADER = re.compile(r"session|thread|anthropic-(version|beta)|x-codex|x-stainless-(lang|runtime)$")


def clean(value: Any, tokenizer: Tokenizer) -> Any:
    """Returns a JSON value without prose."""
    if isinstance(value, dict):
        return {_with_other_ids(k): clean(v, tokenizer) for k, v in value.items()}
    if isinstance(value, list):
        return [clean(item, tokenizer) for item in value]
    if not isinstance(value, str) or value.isspace():
        return value
    if value.startswith(_BILLING):
        return f"{_BILLING} cc_version=2.1.0; cc_entrypoint=cli;"
    if value.startswith("{"):
        try:
            return json.dumps(clean(json.loads(value), tokenizer))
        except ValueError:
            pass
    if _NAME.fullmatch(value):
        return _with_other_ids(value)
    return {"filler": len(tokenizer.encode(value, add_special_tokens=False))}


def _with_other_ids(text: str) -> str:
    def other(found: re.Match[str]) -> str:
        return hashlib.sha256(found[0].encode()).hexdigest()[: len(found[0])]

    return _ID.sub(other, text)


def chosen(records: list[Any]) -> list[Any]:
    """Returns the first and the last request of each path with the same types of tools, and the
    first one without tools."""
    kept: dict[tuple[str, frozenset[str], str], Any] = {}
    for record in records:
        path, _, body = record
        kinds = frozenset(tool.get("type", "") for tool in body.get("tools", []))
        kept.setdefault((path, kinds, "first"), record)
        if kinds:
            kept[path, kinds, "last"] = record
    return list({id(record): record for record in kept.values()}.values())


def main() -> None:
    """Writes a file for each program."""
    tokenizer = Tokenizer(resolve("smollm2").path)
    DATA.mkdir(exist_ok=True)
    for file in sorted(Path(sys.argv[1]).glob("*.jsonl")):
        records = [json.loads(line) for line in file.read_text().splitlines()]
        cleaned = []
        for path, headers, body in chosen(records):
            kept = {k.lower(): v for k, v in headers.items() if _HEADER.search(k.lower())}
            cleaned.append(
                {"path": path, "headers": clean(kept, tokenizer), "body": clean(body, tokenizer)}
            )
        target = DATA / f"{file.stem}.json"
        target.write_text(json.dumps(cleaned, indent=1, ensure_ascii=True) + "\n")
        print(f"{target.name}: {len(cleaned)} requests, {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
