"""Ids of tool calls. Models get them back with the tools' results; some require a format."""

import secrets


def call_id(_written: str) -> str:
    return f"call_{secrets.token_hex(12)}"


def mistral_call_id(_written: str) -> str:
    """Returns nine letters and digits, because Mistral's templates refuse other ids."""
    return secrets.token_hex(5)[:9]


def kimi_call_id(written: str) -> str:
    """Returns the id that the model wrote before the arguments, such as `functions.find:0`."""
    return written if written.startswith("functions.") else call_id(written)
