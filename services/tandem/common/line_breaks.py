"""Keeps a JSON text in one line for all clients."""

# UTF-8 of U+2028, U+2029 and U+0085 -> their escapes in JSON. Some clients split a text at every
# character that Unicode calls a line break, and would cut an event or a line of JSON there.
_BREAKS = (
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
    (b"\xc2\x85", b"\\u0085"),
)


def without_breaks(encoded: bytes) -> bytes:
    """Returns a JSON text, in which such characters only occur in strings, with their escapes."""
    for character, escape in _BREAKS:
        encoded = encoded.replace(character, escape)
    return encoded
