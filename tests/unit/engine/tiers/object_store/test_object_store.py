"""A store that workers share, in this process's memory: what one wrote another loads.

tests/service/test_kv_store.py has a server, and what it does wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.common.cached_tokens import CachedTokens
from tandem.common.config.engine import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.tiers import make_tiers, writes
from tandem.engine.tiers.object_store import lookups
from tandem.engine.tiers.object_store import storage as object_storage
from tandem.engine.tiers.object_store.search import search
from tandem.engine.tiers.tier import LoadRate
from tandem.errors import ConfigError
from tandem.net.object_store import read_credentials, split_url
from tests.engine_driver import make_engine, make_spec
from tests.grouped_toy import STATE, GroupedToyRunner, Windows, make_grouped_engine
from tests.grouped_toy import continuation as grouped_continuation
from tests.toy_runner import continuation
from tests.unit.engine.tiers.test_seal import ONE, TWO, key_file
from tests.unit.engine.tiers.test_tiers import prompt, run, tier

obstore = pytest.importorskip("obstore")
URL = "s3://bucket/kv"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The store of all engines of a test, which wait for it and load from it at any time."""
    from obstore.store import MemoryStore

    made = MemoryStore()
    monkeypatch.setattr(make_tiers, "open_store", lambda *_, **__: made)
    monkeypatch.setattr(LoadRate, "observe", lambda *_: None)
    monkeypatch.setattr(lookups, "WAIT_SHARE", 1e9)
    monkeypatch.setattr(lookups, "WAIT_S_MAX", 600.0)
    monkeypatch.setattr(object_storage.ObjectStorage, "num_slots", 64)  # soon checked
    return made


def worker(**settings: Any) -> Engine:
    settings.setdefault("num_blocks", 16)
    return make_engine(kv_store_url=URL, **settings)[0]


def names(store: Any) -> list[str]:
    found = [each["path"] for batch in obstore.list(store) for each in batch]
    return sorted(name for name in found if not name.endswith("/about"))


def cached(engine: Engine, salt: bytes = b"", number: int = 0) -> CachedTokens:
    """Asks a prompt of 24 tokens and one more; returns where they were."""
    outcome = run(engine, prompt(number), salt=salt)
    assert outcome.token_ids["0"] == continuation(prompt(number), 5)
    return outcome.ends["0"].cached


@pytest.mark.parametrize("turn_s", [0.0, 60.0])
def test_a_block_of_one_worker_is_loaded_by_another(turn_s: float, store: Any) -> None:
    """The engine takes what was found in one turn, or in as many turns as it can."""
    one, two = worker(), worker()
    one._tiers.turn_s = two._tiers.turn_s = turn_s
    assert cached(one) == CachedTokens()
    assert tier(one).blocks_written == len(names(store)) >= 6
    assert cached(two) == CachedTokens(store=24)
    assert (tier(two).name, tier(two).blocks_loaded, tier(two).blocks_bad) == ("store", 6, 0)
    assert two.tier_block_hashes("store", b"", b"")
    one.close()
    two.close()


def test_blocks_come_from_the_pool_the_disk_and_the_store(store: Any, tmp_path: Path) -> None:
    one = worker()
    run(one, [1] * 41)
    one.close()
    two = worker(kv_disk_path=str(tmp_path), kv_disk_bytes=1 << 15)
    run(two, [1] * 17)  # of which the store has all: loaded, and written to the disk
    outcome = run(two, [1] * 41)
    assert outcome.token_ids["0"] == continuation([1] * 41, 5)
    assert outcome.ends["0"].cached == CachedTokens(device=16, store=24)
    two.close()
    three = worker(kv_disk_path=str(tmp_path), kv_disk_bytes=1 << 15)
    assert run(three, [1] * 41).ends["0"].num_cached_tokens == 40
    three.close()


def test_a_tenants_blocks_are_for_its_salt_alone(store: Any) -> None:
    one, two, three = worker(), worker(), worker()
    cached(one, b"a tenant")
    assert cached(two, b"another") == CachedTokens()
    assert cached(three, b"a tenant") == CachedTokens(store=24)
    for engine in (one, two, three):
        engine.close()


def test_another_models_blocks_are_in_another_folder(store: Any) -> None:
    one, other = worker(), worker(block_size=8)
    cached(one)
    assert cached(other) == CachedTokens()
    assert len({name.split("/")[0] for name in names(store)}) == 2
    one.close()
    other.close()


def test_what_is_looked_up_ends_where_the_store_ends(store: Any) -> None:
    one = worker(num_blocks=64)
    run(one, [1] * 150)
    every = one.tier_block_hashes("store", b"", b"")
    one.close()
    storage = one._tiers.tiers[0].storage
    for depth in (0, 1, 2, 9, 10, 11, 36, 37):
        other = object_storage.ObjectStorage(
            obstore.store.MemoryStore(), place=URL, identity="x", seal=storage._seal
        )
        for block_hash in every[:depth]:
            obstore.put(other._client, other._name(block_hash), b"x")
        assert other.look_up(every[:37], 0) == depth
        other.close()


@pytest.mark.parametrize("damage", ["flipped", "short", "long", "gone", "anothers"])
def test_bad_objects_are_computed_again_and_counted(damage: str, store: Any) -> None:
    one, two = worker(), worker()
    cached(one)
    bad, other = one.tier_block_hashes("store", b"", b"")[2:4]
    name, path = (one._tiers.tiers[0].storage._name(each) for each in (bad, other))
    data = bytes(obstore.get(store, name).bytes())
    changed = {
        "flipped": data[:20] + bytes([data[20] ^ 1]) + data[21:],
        "short": data[:-1],
        "long": data + b"x",
        "anothers": bytes(obstore.get(store, path).bytes()),
    }
    obstore.delete(store, name)
    if damage in changed:
        obstore.put(store, name, changed[damage])
    outcome = run(two, prompt(0))
    assert outcome.token_ids["0"] == continuation(prompt(0), 5)
    found = 8 if damage == "gone" else 12  # before the bad one by the look-up, or after it
    assert outcome.ends["0"].cached == CachedTokens(store=found)
    assert tier(two).blocks_bad == (damage != "gone")  # which the look-up found out
    assert bytes(obstore.get(store, name).bytes()) == data  # written anew
    two.close()
    three = worker()
    assert cached(three) == CachedTokens(store=24)
    three.close()
    one.close()


def test_blocks_that_are_gone_leave_the_workers_entries(store: Any) -> None:
    one, two = worker(), worker()
    cached(one)
    cached(two)
    for name in names(store):
        obstore.delete(store, name)
    run(two, *map(prompt, range(1, 6)))  # which pushes the blocks out of the pool
    outcome = run(two, prompt(0))
    told = [change for report in outcome.reports for change in report.tiers]
    assert outcome.ends["0"].num_cached_tokens == 0
    assert any(change.removed for change in told)
    one.close()
    two.close()


def test_encrypted_blocks_are_those_of_a_key(store: Any, tmp_path: Path) -> None:
    one, both, two = (key_file(tmp_path, *k) for k in ([ONE], [TWO, ONE], [TWO]))
    first = worker(kv_key_file=one)
    assert cached(first) == CachedTokens()
    first.close()
    for keys, expected in ((one, 24), (both, 24), (two, 0)):
        engine = worker(kv_key_file=keys)
        assert cached(engine) == CachedTokens(store=expected)
        assert tier(engine).blocks_bad == (not expected)
        engine.close()
    plain = worker()
    assert cached(plain) == CachedTokens()
    plain.close()


class Failing:
    """Calls of obstore, of which those that are named fail or hang."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: set[str] = set()
        self.num_failed = 0
        self.hold = threading.Event()
        self.hold.set()
        for name in ("put", "get", "head"):
            monkeypatch.setattr(obstore, name, self.wrapped(name, getattr(obstore, name)))

    def wrapped(self, name: str, call: Any) -> Any:
        def wrapper(*about: Any, **more: Any) -> Any:
            self.hold.wait(60)
            if name in self.names:
                self.num_failed += 1
                raise obstore.exceptions.GenericError("it is not well")
            return call(*about, **more)

        return wrapper


def test_a_failing_store_costs_no_answer_and_is_left_alone(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(monkeypatch)
    one = worker()
    failing.names = {"put"}
    run(one, *map(prompt, range(4)))
    assert tier(one).write_failures > 0
    assert failing.num_failed <= object_storage._AT_ONCE  # then it is not asked for a while
    assert names(store) == []
    failing.names = set()
    two = worker()
    assert cached(two) == CachedTokens()
    failing.names = {"get"}
    three = worker()
    assert cached(three) == CachedTokens()
    failing.names = {"head"}
    four = worker()
    assert cached(four) == CachedTokens()
    for engine in (one, two, three, four):
        engine.close()


def test_a_store_that_failed_is_tried_again(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_storage, "_PAUSE_S", 0.0)
    monkeypatch.setattr(writes, "_PAUSE_S", 0.0)
    failing = Failing(monkeypatch)
    failing.names = {"put"}
    one = worker()
    cached(one)
    failing.names = set()
    assert cached(one, number=1) == CachedTokens()
    one.close()
    two = worker()
    assert cached(two, number=1) == CachedTokens(store=24)
    two.close()


def test_a_store_that_hangs_delays_a_prompt_by_a_bounded_time(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "WAIT_S_MAX", 0.01)
    failing = Failing(monkeypatch)
    one = worker()
    failing.hold.clear()
    try:
        one.add(make_spec("0", prompt(0)))
        tokens: list[int] = []
        while len(tokens) < 5:
            tokens += [t for new in one.step().new_tokens for t in new.token_ids]
        assert tokens == continuation(prompt(0), 5)
        assert one.load().blocks_used == 0
    finally:
        failing.hold.set()
    one.close()


def test_a_store_that_refuses_is_an_error_at_the_start(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise obstore.exceptions.PermissionDeniedError("403")

    monkeypatch.setattr(obstore, "put", refuse)
    with pytest.raises(ConfigError, match=r"kv-store-url s3://bucket/kv: .*kv-store-credentials"):
        worker()


@pytest.mark.parametrize("url", ["bucket", "s3://", "http://x/y", "s3://Bucket"])
def test_wrong_urls(url: str) -> None:
    with pytest.raises(ConfigError, match=r"kv-store-url is .* it must be s3://BUCKET"):
        split_url(url, "kv-store")
    assert split_url("s3://buc/a/b/", "kv-store") == ("buc", "a/b")
    assert split_url("s3://buc", "kv-store") == ("buc", "")


def test_credentials(tmp_path: Path) -> None:
    path = tmp_path / "credentials"
    with pytest.raises(ConfigError, match=r"kv-store-credentials .*No such file"):
        read_credentials(path, "kv-store")
    path.touch(0o600)
    path.write_text("[default]\naws_access_key_id = a\n")
    with pytest.raises(ConfigError, match="has no aws_secret_access_key"):
        read_credentials(path, "kv-store")
    path.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b%c\n")
    assert read_credentials(path, "kv-store") == {"access_key_id": "a", "secret_access_key": "b%c"}
    path.chmod(0o604)
    with pytest.raises(ConfigError, match=r"\(mode 604\)"):
        read_credentials(path, "kv-store")


def test_options_of_a_store_without_one() -> None:
    with pytest.raises(ConfigError, match="kv-store-endpoint is set without kv-store-url"):
        EngineConfig(model="m", kv_store_endpoint="http://x")


@pytest.mark.parametrize("windows", [(None, 6), (10,), (None, 5, 13)])
def test_windows_of_one_worker_are_loaded_by_another(windows: Windows, store: Any) -> None:
    """The chain is longer than the windows: of those only what the next token sees is there."""
    one, two = (
        make_grouped_engine(windows, num_blocks=60, max_tokens_per_step=8, kv_store_url=URL)[0]
        for _ in range(2)
    )
    tokens = [1, 2, 3] * 20
    assert run(one, tokens).ends["0"].num_cached_tokens == 0
    outcome = run(two, [*tokens, 9], [*tokens[:-1], 8])
    assert outcome.ends["0"].cached == CachedTokens(store=60)
    assert outcome.token_ids["0"] == grouped_continuation([*tokens, 9], 5, windows)
    assert outcome.token_ids["1"] == grouped_continuation([*tokens[:-1], 8], 5, windows)
    assert run(two, tokens, salt=b"another").ends["0"].num_cached_tokens == 0
    assert tier(two).blocks_bad == 0
    one.close()
    two.close()


def test_states_of_one_worker_are_loaded_by_another(store: Any) -> None:
    """A look-up asks for states at multiples of 64 tokens alone."""
    windows: Windows = (None, 5, STATE)
    one, two = (
        make_grouped_engine(windows, num_blocks=60, max_tokens_per_step=8, kv_store_url=URL)[0]
        for _ in range(2)
    )
    tokens = [1, 2, 3] * 50
    assert run(one, tokens).ends["0"].num_cached_tokens == 0
    outcome = run(two, [*tokens, 9])
    assert outcome.ends["0"].cached == CachedTokens(store=128)
    assert outcome.token_ids["0"] == grouped_continuation([*tokens, 9], 5, windows)
    assert tier(two).blocks_bad == 0
    one.close()
    two.close()


class Shelf:
    """A shared storage that counts what it is asked for."""

    def __init__(self, there: set[int]) -> None:
        self._there = {index.to_bytes(2, "big") for index in there}
        self.num_asked = 0

    def look_up(self, block_hashes: Sequence[bytes], first: int) -> int:
        found = (i for i, name in enumerate(block_hashes) if name not in self._there)
        return max(first, next(found, len(block_hashes)))

    def look_up_each(self, block_hashes: Sequence[bytes]) -> list[bool]:
        self.num_asked += len(block_hashes)
        return [name in self._there for name in block_hashes]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_a_search_finds_the_deepest_runs_of_windows(data: st.DataObject) -> None:
    """A search goes as deep as one that asks for every block, but near a chain's first one, and
    makes fewer requests."""
    windows: Windows = data.draw(st.sampled_from([(None, 6), (14,), (None, 5, 13)]))
    layout = GroupedToyRunner(windows, block_size=4).layout()
    size = data.draw(st.integers(1, 60))
    ends = data.draw(st.lists(st.integers(1, size), max_size=3))
    there = []
    for group in layout.groups:
        seen = [range(group.first_seen((end - 1) * 4), end) for end in ends]
        there.append({i for run in seen for i in run} if group.window else set(range(size)))
    for group in there:
        group -= data.draw(st.sets(st.integers(0, size - 1), max_size=2))
    chain = [index.to_bytes(2, "big") for index in range(size)]
    shelves = [Shelf(group) for group in there]
    found = search(shelves, layout, chain, 0)

    def depth(held: list[Any]) -> int:
        whole = next((i for i in range(size) if i not in held[0]), size)
        deepest = whole if windows[0] is None else size
        return layout.deepest_hit(
            chain, deepest, lambda number, name: int.from_bytes(name, "big") in held[number]
        )

    assert all(set(f) <= t for f, t in zip(found, there, strict=True))
    stride = max(group.blocks_seen for group in layout.groups if group.window)
    if (expected := depth(there)) >= stride:
        assert depth([set(group) for group in found]) == expected
    if not ends:
        asked = sum(shelf.num_asked for shelf in shelves)
        assert asked <= -(-size // stride)


def test_a_search_takes_no_run_for_the_deepest_before_all_its_blocks_were_asked_for() -> None:
    """A request goes on after two blocks. The search also asks for blocks 0 and 10, but for block 1
    only at the end."""
    layout = GroupedToyRunner((None, 6), block_size=4).layout()
    chain = [index.to_bytes(2, "big") for index in range(13)]
    shelves = [Shelf(set(range(13))), Shelf({0, 1, 10, 12})]
    assert {0, 1} <= set(search(shelves, layout, chain, 0)[1])


@pytest.mark.parametrize(("states", "depth"), [({15, 31, 40}, 32), ({15, 40}, 16), ({40}, 0)])
def test_a_search_asks_for_few_states(states: set[int], depth: int) -> None:
    """The chain has 240 tokens, and a state is at a multiple of 64."""
    layout = GroupedToyRunner((None, 6, STATE), block_size=4).layout()
    chain = [index.to_bytes(2, "big") for index in range(60)]
    shelves = [Shelf(set(range(60))), Shelf(set(range(60))), Shelf(states)]
    _, windows, found = search(shelves, layout, chain, 0)
    assert max(found, default=-1) == depth - 1
    assert shelves[2].num_asked <= 3
    assert shelves[1].num_asked == len(windows) == (2 if depth else 0)
