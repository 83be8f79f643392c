"""Answers of a random model constrained by JSON schemas, each validated by the library jsonschema.

The model has random weights and samples at temperature 1, so only the grammar shapes the answers. A
bias towards the tokens that end strings, lists and objects makes most answers finite.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import jsonschema
import referencing.exceptions

from tandem.common.sampling_params import SamplingParams
from tandem.engine.types import Mode, SequenceSpec
from tandem.errors import BadRequest
from tandem.models.folder import ModelFolder
from tandem.models.grammars.compiler import GrammarCompiler
from tandem.models.grammars.text import StructuredOutput, grammar_text
from tandem.models.tokenizer.tokenizer import Tokenizer
from tests.model_engines import make_model_engine

EOS = 2
_ENDS = frozenset('"]},:')
_BIAS = 8.0
_AT_ONCE = 32  # limit of grammars that an engine keeps


@dataclass
class Counts:
    """Counts of schemas, and of the answers to supported ones."""

    refused: Counter[str] = field(default_factory=Counter)  # schemas, by reason
    followed: int = 0  # number of supported schemas
    # supported schemas with at least one answer that ended by `stop`
    answered: set[str] = field(default_factory=set)
    ended: int = 0  # number of answers that ended by `stop`
    cut: int = 0  # number of answers cut by max_tokens
    # answers that failed in the engine, by reason
    failed: Counter[str] = field(default_factory=Counter)
    invalid: list[tuple[str, str, str]] = field(default_factory=list)  # schema, answer, reason
    # answers whose schema the Python library cannot read
    unread: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        reasons = "".join(f"\n  {n:5} {why}" for why, n in self.refused.most_common())
        failed = "".join(f"\n  {n:5} {why}" for why, n in self.failed.most_common())
        unread = "".join(f"\n  {n:5} {why}" for why, n in self.unread.most_common())
        wrong = "".join(f"\n  {name}: {text[:200]!r}: {why}" for name, text, why in self.invalid)
        return (
            f"{self.followed} schemas are followed, {self.refused.total()} refused{reasons}\n"
            f"{len(self.answered)} schemas have answers that end by stop\n"
            f"{self.ended} answers end by stop, {len(self.invalid)} of them invalid{wrong}\n"
            f"{self.unread.total()} of these answers are not validated{unread}\n"
            f"{self.cut} answers are cut, {self.failed.total()} fail{failed}"
        )


class SchemaAnswers:
    """An engine with a random model. `check` adds to `counts`."""

    def __init__(self, folder: ModelFolder, *, seeds: int, max_tokens: int) -> None:
        self._tokenizer = Tokenizer(folder.path)
        self._compiler = GrammarCompiler.of(folder)
        self._end_token_ids = list(folder.config.eos_token_ids)
        num_blocks = _AT_ONCE * (max_tokens // 16 + 2)
        self._engine, _ = make_model_engine(folder, self._compiler, num_blocks=num_blocks)
        self._seeds, self._max_tokens = seeds, max_tokens
        vocabulary = range(self._tokenizer.vocab_size)
        pieces = ((t, self._tokenizer.piece(t).decode(errors="replace")) for t in vocabulary)
        self._bias = {t: _BIAS for t, text in pieces if text and _ENDS.issuperset(text)} | {
            EOS: 20.0
        }
        self.counts = Counts()

    def check(self, schemas: Mapping[str, Any]) -> None:
        """Generates answers to each schema by name, and validates them."""
        specs = self._specs(schemas)
        while batch := list(islice(specs, _AT_ONCE)):
            for spec in batch:
                self._engine.add(spec)
            self._drive(schemas, batch)

    def _specs(self, schemas: Mapping[str, Any]) -> Iterator[SequenceSpec]:
        for name, schema in schemas.items():
            try:
                source = json.dumps(schema)
                text = grammar_text(StructuredOutput("schema", "json_schema", source))
                if why := self._compiler.check(text):
                    raise BadRequest(why)
            except BadRequest as error:
                self.counts.refused[error.message.splitlines()[0][:90]] += 1
                continue
            self.counts.followed += 1
            for seed in range(self._seeds):
                yield SequenceSpec(
                    sequence_id=f"{name} {seed}",
                    token_ids=[1, 2, 3],
                    num_prompt_tokens=3,
                    mode=Mode.LOCAL,
                    sampling=SamplingParams(
                        seed=seed,
                        max_tokens=self._max_tokens,
                        stop_token_ids=self._end_token_ids,
                        logit_bias=self._bias,
                    ),
                    grammar=text,
                )

    def _drive(self, schemas: Mapping[str, Any], batch: Iterable[SequenceSpec]) -> None:
        made: dict[str, list[int]] = {spec.sequence_id: [] for spec in batch}
        while self._engine.has_work() or self._engine.awaits_threads():
            if not self._engine.has_work():
                time.sleep(0.001)
                continue
            report = self._engine.step()
            self.counts.failed.update(failed.message[:90] for failed in report.failed)
            for new in report.new_tokens:
                made[new.sequence_id] += new.token_ids
                if new.finish_reason == "stop":
                    name = new.sequence_id.rpartition(" ")[0]
                    self._validate(name, schemas[name], made[new.sequence_id][:-1])
                elif new.finish_reason:
                    self.counts.cut += 1

    def _validate(self, name: str, schema: Any, token_ids: list[int]) -> None:
        self.counts.ended += 1
        self.counts.answered.add(name)
        text = self._tokenizer.decode(token_ids)
        kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        try:
            kind(schema).validate(json.loads(text))
        except (ValueError, jsonschema.ValidationError) as error:
            reason = str(error).splitlines()[0]
            self.counts.invalid.append((name, text, reason[:200]))
        except (re.error, referencing.exceptions.Unresolvable) as error:
            self.counts.unread[f"{name}: {error}"[:90]] += 1


def read_schemas(folder: Path) -> dict[str, Any]:
    """Reads the schemas of a folder's JSON files by name. A file has one schema, or a list of
    groups with one schema each, as in the JSON-Schema-Test-Suite."""
    schemas: dict[str, Any] = {}
    for file in sorted(folder.rglob("*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(content, list):
            for place, group in enumerate(content):
                schemas[f"{file.stem}/{place}"] = group["schema"]
        else:
            schemas[file.stem] = content
    return schemas
