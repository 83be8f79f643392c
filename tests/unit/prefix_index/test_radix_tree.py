"""The radix tree that `tandem bench index` compares with finds what the others find."""

from __future__ import annotations

import random

from tandem.prefix_index.memory import MemoryIndex
from tandem_bench.radix_tree import RadixTree


async def test_it_finds_what_the_index_in_memory_finds() -> None:
    rng = random.Random(5)
    names = [bytes([n]) * 16 for n in range(3)]
    for _ in range(60):
        tree, index = RadixTree(), MemoryIndex()
        paths = [tuple(rng.choices(range(3), k=rng.randrange(1, 9))) for _ in range(12)]

        def chain(path: tuple[int, ...]) -> list[bytes]:
            """A block's hash covers all before it."""
            return [names[path[i]][:1] + bytes(path[:i]).ljust(15) for i in range(len(path))]

        for number, path in enumerate(paths):
            worker_id = f"w{number % 4}"
            if number < 4:
                await index.reset(worker_id, "1")
            assert await index.publish(worker_id, "1", number // 4, chain(path), [])
            tree.store(worker_id, chain(path))
        for path in paths + [tuple(rng.choices(range(3), k=9)) for _ in range(20)]:
            assert await tree.match(chain(path)) == await index.match(chain(path))
        assert await tree.match([]) == {}
