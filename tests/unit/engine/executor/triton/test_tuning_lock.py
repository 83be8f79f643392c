"""Workers on one card tune one after the other."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from triton import knobs

from tandem.engine.executor.triton.tuning_lock import held, tuning_alone
from tandem.errors import ConfigError

LOG = "tandem.engine.executor.triton.tuning_lock"


def test_the_second_worker_waits_for_the_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    order: list[str] = []
    is_waiting = threading.Event()

    class Noted(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            is_waiting.set()

    def second() -> None:
        with held(tmp_path, "card-a"):
            order.append("second")

    logger = logging.getLogger(LOG)
    caplog.set_level(logging.INFO, LOG)
    handler = Noted()
    logger.addHandler(handler)
    try:
        with held(tmp_path, "card-a"):
            thread = threading.Thread(target=second)
            thread.start()
            assert is_waiting.wait(10)
            with held(tmp_path, "card-b"):  # another card is free
                order.append("first")
        thread.join(10)
    finally:
        logger.removeHandler(handler)
    assert order == ["first", "second"]
    assert "waiting until another worker has tuned" in caplog.text


def test_a_lock_that_nobody_gives_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with held(tmp_path, "card"), held(tmp_path, "card", wait_s=0.0):
        pass
    assert "Restart the worker that holds" in caplog.text


def test_the_lock_of_a_killed_worker_is_free(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code = (
        "import fcntl, sys, time\n"
        "file = open(sys.argv[1], 'a')\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\n"
        "time.sleep(60)\n"
    )
    path = tmp_path / "tandem-tuning-card.lock"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with held(tmp_path, "card", wait_s=0.0):
            assert "Restart the worker" in caplog.text
        caplog.clear()
        other.kill()
        other.wait(10)
        with held(tmp_path, "card", wait_s=0.0):
            assert not caplog.records


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="TRITON_CACHE_DIR"), held(tmp_path / "file", "card"):
        pass


def test_each_card_has_its_own_lock_in_tritons_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-7")
    )
    with tuning_alone(torch.device("cpu")):
        assert not list(tmp_path.iterdir())
    with tuning_alone(torch.device("cuda", 0)):
        assert [path.name for path in tmp_path.iterdir()] == ["tandem-tuning-GPU-7.lock"]
