"""Forms that a client may ask for, and hostile ones, in the router's own process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tandem.errors import BadRequest, CompilerBusy
from tandem.models.grammars.text import Kind, StructuredOutput
from tandem.models.source import resolve
from tandem.models.tokenizer.tokenizer import Tokenizer
from tandem.router.request.prompt import prompts
from tandem.router.request.prompt.grammar_checker import GrammarChecker
from tandem.router.request.prompt.prompts import PromptPreparer

MODEL = resolve("smollm2")
FOLDER = MODEL.path


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def chain(num_rules: int, rule: str = "r{next}") -> str:
    """Returns a grammar whose rules lead one into the next."""
    rules = [f"r{i}: {rule.format(next=i + 1)}" for i in range(num_rules)]
    return "\n".join(["start: r0", *rules, f'r{num_rules}: "a"'])


def references(num: int, schema: str = '{"$ref": "BASE/d%d"}', base: str = "#/$defs") -> str:
    """Returns a schema whose definitions refer one to the next."""
    text = schema.replace("BASE", base)
    defs = {f"d{i}": json.loads(text % (i + 1)) for i in range(num)} | {f"d{num}": {}}
    return json.dumps({"$id": base.split("#")[0], "$defs": defs, "$ref": f"{base}/d0"})


def overlapping(num: int) -> str:
    """Returns a grammar with so many terminals that begin alike: a mask visits all of them."""
    terminals = [f"t{i}: T{i}\nT{i}: /[a-z ]{{1,{i + 2}}}/" for i in range(num)]
    return f"start: ({'|'.join(f't{i}' for i in range(num))})+\n" + "\n".join(terminals)


REFS = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(40)}
RULES = "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(3000))
ABROAD = "http://schemas.test/a#/$defs"  # no reference that the check before the compiler follows
GOOD: dict[str, tuple[Kind, str]] = {
    "nested": ("json_schema", json.dumps(nested(20))),
    "references": ("json_schema", json.dumps({"$defs": {**REFS, "d40": {}}, "$ref": "#/$defs/d0"})),
    "recursive": ("json_schema", '{"properties": {"children": {"items": {"$ref": "#"}}}}'),
    "any": ("json_schema", "true"),
    "repeated": ("regex", "(a{1,1000}){1,1000}"),
    "long": ("json_schema", '{"type": "string", "minLength": 100000}'),
    "ambiguous": ("grammar", 'start: a a a a a a\na: a a | a a a | "x" | "x"?'),
    "GBNF": ("grammar", 'root ::= "yes" | "no"'),
    "divided": ("json_schema", '{"multipleOf": 0.01, "items": {"multipleOf": 3600000}}'),
    "a chain": ("grammar", chain(200)),
    "long references": ("json_schema", references(200)),
    "a long text": ("grammar", f'start: "{"ab " * 40_000}"'),
    "a range": ("json_schema", f'{{"type": "integer", "maximum": {10**300}}}'),
    "a wide array": ("json_schema", '{"items": {"maxItems": 100000}, "maxItems": 100000000}'),
    "keywords": ("grammar", overlapping(40)),
    "a property that is named so": ("json_schema", '{"properties": {"multipleOf": {}}}'),
    "an option of the compiler": ("json_schema", '{"x-guidance": {"lenient": true}}'),
}
BAD: dict[str, tuple[Kind, str, str]] = {
    "too deep": ("json_schema", json.dumps(nested(100)), "nested"),
    "a loop": ("json_schema", '{"$ref": "#"}', "no text|NoExtension"),
    "too wide": ("json_schema", json.dumps({"enum": [f"{i}" * 9 for i in range(9000)]}), "bytes"),
    "unknown keyword": ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
    "no schema": ("json_schema", "[1]", "object"),
    "no JSON": ("json_schema", "{", "cannot be used"),
    "parentheses": ("regex", "(" * 20000 + "a" + ")" * 20000, "regex|nest"),
    "look-ahead": ("regex", "(?=a)b", "look-around"),
    "no rule": ("grammar", "root: x", "cannot be used"),
    "no text": ("choice", '["a", ""]', "non-empty"),
    "the stack": ("grammar", f'start: a0\n{RULES}\na3000: "x"', "250 levels deep"),
    "rules": ("grammar", chain(5000), "250 levels deep"),
    "rules in brackets": ("grammar", chain(60, "((((((((r{next}))))))))"), "250 levels deep"),
    "terminals": ("grammar", f"start: R0\n{chain(5000).upper()}".replace("START: R0", ""), "250"),
    "GBNF rules": (
        "grammar",
        chain(900).replace(":", " ::=").replace("start", "root"),
        "250 levels deep",
    ),
    "references": (
        "json_schema",
        references(2000),
        "nested more than 250 levels deep; the levels in the targets of references count, too",
    ),
    "references of properties": (
        "json_schema",
        references(300, '{"properties": {"a": {"$ref": "BASE/d%d"}}}'),
        "250 levels deep",
    ),
    "references that are not followed": ("json_schema", references(1500, base=ABROAD), "stack"),
    "a prime": ("json_schema", '{"type": "integer", "multipleOf": 99999989}', "multipleOf"),
    "a power": ("json_schema", f'{{"multipleOf": {2**30}}}', "multipleOf"),
    "a divisor beyond floats": ("json_schema", f'{{"multipleOf": {7 * 10**400}}}', "range"),
    "one in a grammar": ("grammar", f'start: %json {{"multipleOf": {10**400}}}', "range"),
    "divided twice": (
        "json_schema",
        '{"allOf": [{"multipleOf": 991}, {"multipleOf": 997}]}',
        "991|mu",
    ),
    "divided often": (
        "json_schema",
        json.dumps({"prefixItems": [{"multipleOf": 997}] * 101}),
        "mult",
    ),
    "a schema in a grammar": ("grammar", 'start: %json {"multipleOf": 99999989}', "multipleOf"),
    "overlapping terminals": ("grammar", overlapping(700), "Too many items"),
    "many choices": ("choice", json.dumps([f"{i:05}" for i in range(9000)]), "max is 800"),
    "a nested repetition": ("regex", "(.{1,1000}){1,100000}", "too many expressions"),
}


@pytest.fixture(scope="module")
def preparer() -> Iterator[PromptPreparer]:
    """The checks of a router; their process starts with the first."""
    preparer = PromptPreparer(FOLDER, Tokenizer(FOLDER), num_processes=1)
    yield preparer
    preparer.close()


async def grammar(preparer: PromptPreparer, kind: Kind, source: str, **fields: Any) -> str:
    wanted = StructuredOutput("guided_json", kind, source, **fields)
    return await preparer.grammar(wanted, "")


@pytest.mark.parametrize("name", GOOD)
async def test_what_can_be_followed_is_one_text(name: str, preparer: PromptPreparer) -> None:
    kind, source = GOOD[name]
    assert await grammar(preparer, kind, source)


@pytest.mark.parametrize("name", BAD)
async def test_a_hostile_grammar_is_refused_with_its_field(
    name: str, preparer: PromptPreparer
) -> None:
    kind, source, why = BAD[name]
    with pytest.raises(BadRequest, match=why) as caught:
        await grammar(preparer, kind, source)
    assert caught.value.param == "guided_json"
    assert len(caught.value.message) < 400


async def test_a_lenient_schema_leaves_out_what_is_not_supported(preparer: PromptPreparer) -> None:
    kind, source, _ = BAD["unknown keyword"]
    assert await grammar(preparer, kind, source, is_lenient=True)


async def test_a_grammar_is_checked_once(preparer: PromptPreparer) -> None:
    text = await grammar(preparer, "regex", "once")
    checked = len(preparer._checked)
    assert await grammar(preparer, "regex", "once") == text
    assert len(preparer._checked) == checked


async def test_a_refusal_is_kept_for_a_while(preparer: PromptPreparer) -> None:
    for _ in range(2):
        with pytest.raises(BadRequest, match="stack"):
            await grammar(preparer, "json_schema", references(1499, base=ABROAD))
        preparer._checked.clear()
    assert (until := max(until for until, _ in preparer._refused.values()))
    assert until > 0
    assert not preparer._checking


SLOW = json.dumps({"type": "integer", "multipleOf": 99991})  # 0.2 s of CPU time
DEEP = references(1500, base=ABROAD)


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    """A checker of its own."""
    file = FOLDER / "tokenizer.json"
    config = MODEL.config
    checker = GrammarChecker(file, config.vocab_size, config.eos_token_ids)
    yield checker
    checker.close()


def schema(source: str) -> StructuredOutput:
    return StructuredOutput("guided_json", "json_schema", source)


def test_the_limits_of_a_check_end_its_process_alone(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checker.check(schema("{}"), 5.0)
    process = checker._process
    assert checker.check(schema(SLOW), 0.02) is None
    monkeypatch.setattr(checker, "_memory_bytes", 8 << 20)
    with pytest.raises(BadRequest, match="over 8 MB of memory"):
        checker.check(schema(SLOW), 5.0)
    monkeypatch.undo()
    with pytest.raises(BadRequest, match="stack"):
        checker.check(schema(DEEP), 5.0)
    assert checker.check(schema("{}"), 5.0)
    assert checker._process is process  # nothing had to start anew


def forks(checker: GrammarChecker) -> list[psutil.Process]:
    """Returns the processes that make checks now."""
    assert checker._process is not None
    with contextlib.suppress(psutil.NoSuchProcess):
        overseers = psutil.Process(checker._process.pid).children()
        return [fork for overseer in overseers for fork in overseer.children()]
    return []


def test_checks_run_beside_a_long_one(checker: GrammarChecker) -> None:
    """One that is stopped stands for one that takes for ever."""
    answers: list[str | None] = []
    assert checker.check(schema("{}"), 5.0)
    long = threading.Thread(target=lambda: answers.append(checker.check(schema(SLOW), 60.0)))
    long.start()
    while not (running := forks(checker)):
        assert long.is_alive()
    running[0].send_signal(signal.SIGSTOP)
    for number in range(3):
        assert checker.check(schema(json.dumps({"maxLength": number})), 5.0)
    running[0].send_signal(signal.SIGCONT)
    long.join(60)
    assert len(answers) == 1


def test_a_lost_process_is_replaced_and_its_check_may_be_tried_again(
    checker: GrammarChecker,
) -> None:
    assert checker.check(schema("{}"), 5.0)
    assert checker._process is not None
    checker._process.kill()
    assert checker.check(schema('{"maxLength": 1}'), 5.0)  # it had not begun
    answers: list[CompilerBusy] = []

    def ask() -> None:
        with pytest.raises(CompilerBusy) as raised:
            checker.check(schema(SLOW), 60.0)
        answers.append(raised.value)

    asking = threading.Thread(target=ask)
    asking.start()
    while not forks(checker):
        assert asking.is_alive()
    os.killpg(checker._process.pid, signal.SIGKILL)
    asking.join(60)
    assert [answer.http_status for answer in answers] == [503]
    assert checker.check(schema("{}"), 5.0)


async def test_who_waits_too_long_may_try_again(
    preparer: PromptPreparer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "GRAMMAR_DEADLINE_S", 0.0)
    with pytest.raises(CompilerBusy, match="try again") as caught:
        await grammar(preparer, "regex", "late")
    assert (caught.value.http_status, caught.value.grpc_code) == (503, "UNAVAILABLE")
    assert caught.value.retry_after_s
    monkeypatch.undo()
    assert await grammar(preparer, "regex", "late")  # it was not the grammar's fault


async def test_what_takes_too_long_is_refused_with_the_limit(
    preparer: PromptPreparer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "_QUICK_CPU_S", 0.01)
    assert await grammar(preparer, "json_schema", SLOW)  # the second try has more time
    monkeypatch.setattr(prompts, "GRAMMAR_CPU_S", 0.02)
    other = json.dumps({"type": "integer", "multipleOf": 99989})
    with pytest.raises(BadRequest, match=r"over 0.02 s of CPU time"):
        await grammar(preparer, "json_schema", other)


async def test_equal_grammars_wait_for_one_check(preparer: PromptPreparer) -> None:
    asked = [asyncio.create_task(grammar(preparer, "regex", "equal")) for _ in range(5)]
    await asyncio.sleep(0)
    assert len(preparer._checking) == 1
    asked[0].cancel()
    texts = await asyncio.gather(*asked[1:])
    assert len(set(texts)) == 1
