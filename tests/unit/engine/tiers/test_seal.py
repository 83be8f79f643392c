"""Blocks on disk that are encrypted: with other keys or in other places they are computed again."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tandem.engine.engine import Engine
from tandem.engine.tiers.seal import Encrypted, Plain, make_seal, read_keys
from tandem.engine.tiers.storage import BadBlock
from tandem.errors import ConfigError
from tests.toy_runner import continuation
from tests.unit.engine.tiers.test_tiers import disk, prompt, run, tier

HASH, OTHER = b"h" * 16, b"o" * 16
ONE, TWO = b"1" * 32, b"2" * 32
DATA = np.arange(200, dtype=np.uint8)


def key_file(folder: Path, *keys: bytes) -> str:
    path = folder / f"keys-{len(list(folder.iterdir()))}"
    path.touch(0o600)
    path.write_text("".join(f"{key.hex()}\n" for key in keys))
    return str(path)


def opened(seal: Encrypted, block_hash: bytes, sealed: np.ndarray) -> bytes:
    target = np.empty_like(DATA)
    buffer = seal.buffer(target)
    buffer[:] = sealed
    seal.open(block_hash, buffer, target)
    return target.tobytes()


def test_what_is_sealed_is_opened_and_differs_each_time() -> None:
    seal = Encrypted([ONE], "model")
    sealed = seal.seal(HASH, DATA)
    assert opened(seal, HASH, sealed) == DATA.tobytes()
    assert DATA[:16].tobytes() not in sealed.tobytes()
    assert seal.seal(HASH, DATA).tobytes() != sealed.tobytes()


@pytest.mark.parametrize("at", [0, 8, 20, -1], ids=["key", "nonce", "bytes", "tag"])
def test_a_flipped_bit_is_found(at: int) -> None:
    seal = Encrypted([ONE], "model")
    sealed = seal.seal(HASH, DATA)
    sealed[at] ^= 1
    with pytest.raises(BadBlock):
        opened(seal, HASH, sealed)


def test_another_blocks_or_models_bytes_are_not_opened() -> None:
    sealed = Encrypted([ONE], "model").seal(HASH, DATA)
    with pytest.raises(BadBlock, match="cannot be decrypted"):
        opened(Encrypted([ONE], "model"), OTHER, sealed)
    with pytest.raises(BadBlock, match="cannot be decrypted"):
        opened(Encrypted([ONE], "another"), HASH, sealed)


def test_the_first_key_seals_and_each_opens() -> None:
    old, both, new = (Encrypted(keys, "model") for keys in ([ONE], [TWO, ONE], [TWO]))
    assert opened(both, HASH, old.seal(HASH, DATA)) == DATA.tobytes()
    assert opened(new, HASH, both.seal(HASH, DATA)) == DATA.tobytes()
    with pytest.raises(
        BadBlock, match=r"encrypted with key [0-9a-f]{16}, but kv-key-file lacks this key"
    ):
        opened(new, HASH, old.seal(HASH, DATA))


def test_key_files(tmp_path: Path) -> None:
    assert read_keys(Path(key_file(tmp_path, ONE, TWO))) == [ONE, TWO]
    assert isinstance(make_seal("", "model"), Plain)
    with pytest.raises(ConfigError, match=r"kv-key-file .*No such file"):
        make_seal(str(tmp_path / "none"), "model")
    with pytest.raises(ConfigError, match="64 hexadecimal digits on each line"):
        make_seal(key_file(tmp_path), "model")
    with pytest.raises(ConfigError, match="64 hexadecimal digits on each line"):
        make_seal(key_file(tmp_path, ONE[:-1]), "model")
    open_to_all = key_file(tmp_path, ONE)
    os.chmod(open_to_all, 0o644)
    with pytest.raises(ConfigError, match=r"kv-key-file .* \(mode 644\)"):
        make_seal(open_to_all, "model")


def cached(engine: Engine) -> int:
    """Closes the engine after a prompt; returns how many of its 24 tokens were on disk."""
    outcome = run(engine, prompt(0))
    engine.close()
    assert outcome.token_ids["0"] == continuation(prompt(0), 5)
    return outcome.ends["0"].num_cached_tokens


def test_a_disk_keeps_encrypted_blocks_while_their_key_is_there(tmp_path: Path) -> None:
    folder, keys = tmp_path / "kv", tmp_path / "keys"
    keys.mkdir()
    one, both, two = (key_file(keys, *k) for k in ([ONE], [TWO, ONE], [TWO]))
    assert cached(disk(folder, kv_key_file=one)) == 0
    assert cached(disk(folder, kv_key_file=one)) == 24
    assert cached(disk(folder, kv_key_file=both)) == 24
    rotated = disk(folder, kv_key_file=two)
    assert cached(rotated) == 0  # of an unknown key, so computed again
    assert tier(rotated).blocks_bad == 1
    assert cached(disk(folder, kv_key_file=two)) > 0  # and written anew


def test_plain_blocks_are_cleared_when_a_key_comes(tmp_path: Path) -> None:
    folder, keys = tmp_path / "kv", tmp_path / "keys"
    keys.mkdir()
    assert cached(disk(folder)) == 0
    plain = (folder / "0" / "blocks").read_bytes()
    assert any(plain)
    engine = disk(folder, kv_key_file=key_file(keys, ONE))
    assert not any((folder / "0" / "blocks").read_bytes())
    assert cached(engine) == 0
    assert cached(disk(folder)) == 0


def test_a_key_without_anything_to_encrypt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv-key-file is set without .*kv-disk-path"):
        disk(Path(), kv_key_file=key_file(tmp_path, ONE), kv_disk_path="")
