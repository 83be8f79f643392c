"""Events of a stream, as their bytes."""

from __future__ import annotations

import json

from tandem.api.sse import event


def test_an_event_is_one_line_for_every_client() -> None:
    """Some clients split a stream at all characters that Python's `splitlines` splits at."""
    breaks = "".join(map(chr, (*range(32), 0x7F, 0x85, 0x2028, 0x2029)))
    said = {"text": f"a{breaks}b\u2027\u2030é\U0001f642", breaks: 1}
    name, data, *rest = event(said, "delta").decode().splitlines()
    assert (name, rest) == ("event: delta", [""])
    assert json.loads(data.removeprefix("data: ")) == said
