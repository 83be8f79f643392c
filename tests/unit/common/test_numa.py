"""Cores by NUMA node, from files as Linux writes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tandem.common.config.engine import EngineConfig
from tandem.common.process.numa import by_node
from tandem.engine.executor.ranks import cores as ranks


def write_nodes(folder: Path, *cpulists: str) -> Path:
    for number, cpulist in enumerate(cpulists):
        (folder / f"node{number}").mkdir()
        (folder / f"node{number}" / "cpulist").write_text(f"{cpulist}\n")
    return folder


def test_cores_are_grouped_by_node(tmp_path: Path) -> None:
    nodes = write_nodes(tmp_path, "0-1,8-9", "2-3", "")  # the last one has memory and no cores
    assert by_node([9, 3, 0, 2], nodes) == [[0, 9], [2, 3]]
    assert by_node([1, 77], nodes) == [[1], [77]]
    assert by_node([1, 0], tmp_path / "none") == [[0, 1]]
    assert by_node([], nodes) == []


def test_nodes_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    nodes = write_nodes(tmp_path, *(str(number) for number in range(11)))
    assert by_node(range(11), nodes) == [[number] for number in range(11)]


def test_this_machine() -> None:
    cores = os.sched_getaffinity(0)
    groups = by_node(cores)
    assert sorted(core for group in groups for core in group) == sorted(cores)


def test_the_cores_of_a_rank_are_in_one_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = write_nodes(tmp_path, "0,2,4,6", "1,3,5,7")
    pinned: list[list[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: pinned.append(cores))
    monkeypatch.setattr(ranks, "by_node", lambda cores: by_node(cores, nodes))
    config = EngineConfig(model="m", num_threads=4, tensor_parallel=2)
    for rank in range(2):
        ranks.pin_to_share(config, rank)
    assert pinned == [[0, 2, 4, 6], [1, 3, 5, 7]]
