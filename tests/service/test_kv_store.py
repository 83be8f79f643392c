"""Real engine processes that share an object store, and a server that is killed, hangs and lies."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest

from tandem.errors import ConfigError
from tests.harness.tiered_process import DEADLINE_S, PROMPTS, Process
from tests.tiny_models import make_tiny_model

pytest.importorskip("obstore")
pytest.importorskip("moto")

import obstore

from tests.harness.object_store import ObjectStoreServer

pytestmark = pytest.mark.service


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("models")
    make_tiny_model("llama", folder / "model")
    make_tiny_model("qwen3", folder / "other")
    return str(folder / "model"), str(folder / "other")


async def start(server: ObjectStoreServer, model: str, **settings: str) -> Process:
    process = Process(model, None, **server.settings, **settings)
    await process.start()
    return process


async def ask(process: Process, name: str, prompts: list[list[int]]) -> list[list[int]]:
    return [(await process.answer(f"{name}{n}", p))[0] for n, p in enumerate(prompts)]


async def right_answers(model: str) -> list[list[int]]:
    plain = Process(model, None)
    await plain.start()
    answers = await ask(plain, "plain", PROMPTS)
    await plain.stop()
    return answers


@pytest.fixture(scope="module")
def expected(models: tuple[str, str]) -> list[list[int]]:
    """The answers of a process without a tier."""
    return asyncio.run(right_answers(models[0]))


async def test_what_one_process_wrote_another_loads(
    server: ObjectStoreServer, models: tuple[str, str], expected: list[list[int]]
) -> None:
    """The second process finds the blocks by asking the store alone. Another model is apart."""
    model, other = models
    async with asyncio.timeout(DEADLINE_S):
        first = await start(server, model)
        assert await ask(first, "first", PROMPTS[3:4]) == expected[3:4]
        await first.wait_for_writes(4)  # all that are full
        await first.kill()
        second = await start(server, model)
        tokens, num_cached = await second.answer("second", PROMPTS[3])
        assert tokens == expected[3]
        assert num_cached == 64
        assert second.tier.name == "store"
        assert await ask(second, "again", PROMPTS) == expected
        await second.check_idle()
        third = await start(server, other)
        assert (await third.answer("third", PROMPTS[0]))[1] == 0
        await third.wait_for_writes(4)
        assert len({name.split("/")[1] for name in server.blocks()}) == 2
        await second.stop()
        await third.stop()


async def test_no_fault_of_the_store_changes_a_token(
    server: ObjectStoreServer, models: tuple[str, str], expected: list[list[int]]
) -> None:
    model, _ = models
    async with asyncio.timeout(DEADLINE_S):
        first = await start(server, model)
        assert await ask(first, "whole", PROMPTS) == expected
        await first.wait_for_writes(8)  # some left the small pool before they were written
        damage(server)
        second = await start(server, model)
        assert await ask(second, "damaged", PROMPTS) == expected
        assert await ask(first, "warm", PROMPTS) == expected
        server.stop()
        assert await ask(first, "hangs", PROMPTS) == expected
        assert await ask(second, "hangs", PROMPTS) == expected
        server.kill()
        assert await ask(first, "gone", PROMPTS) == expected
        third = await start(server, model)  # without a store
        assert await ask(third, "gone", PROMPTS) == expected
        server.start()
        assert await ask(third, "empty", PROMPTS) == expected
        for process in (first, second, third):
            await process.check_idle()
            await process.stop()


def damage(server: ObjectStoreServer) -> None:
    """Flips bits of some objects, cuts others short, and deletes others."""
    rng = Random(0)
    for number, name in enumerate(server.blocks()):
        data = bytearray(obstore.get(server.client, name).bytes())
        data[rng.randrange(len(data))] ^= 1
        match number % 5:
            case 0:
                obstore.put(server.client, name, bytes(data))
            case 1:
                obstore.put(server.client, name, bytes(data[: rng.randrange(len(data))]))
            case 2:
                obstore.delete(server.client, name)


async def test_wrong_credentials_are_an_error_that_names_the_option(
    server: ObjectStoreServer, models: tuple[str, str], tmp_path: Path
) -> None:
    server.kill()
    server.start(num_open_calls=1)  # the bucket's
    credentials = tmp_path / "credentials"
    credentials.touch(0o600)
    credentials.write_text("[default]\naws_access_key_id = x\naws_secret_access_key = y\n")
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(ConfigError, match=r"kv-store-url .* kv-store-credentials"):
            await start(server, models[0], kv_store_credentials=str(credentials))
