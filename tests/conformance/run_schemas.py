"""Draws answers to the JSON schemas of a folder, validates them, and counts.

    python tests/conformance/run_schemas.py FOLDER [--seeds 3] [--max-tokens 200]

FOLDER has files with one schema each, or those of the JSON-Schema-Test-Suite. The model is a tiny
random one with the built-in model's tokenizer. Ends with 1 if an answer that ends by `stop` is
invalid.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.harness.schema_answers import SchemaAnswers, read_schemas
from tests.tiny_models import make_random_speaker


def main() -> None:
    """Prints the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=200)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        speaker = make_random_speaker(Path(folder))
        answers = SchemaAnswers(speaker, seeds=asked.seeds, max_tokens=asked.max_tokens)
        answers.check(read_schemas(asked.folder))
    print(answers.counts)
    sys.exit(bool(answers.counts.invalid))


if __name__ == "__main__":
    main()
