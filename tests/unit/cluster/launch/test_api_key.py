"""The API key that `tandem up` takes from a file or a variable."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from tandem.cluster.launch.api_key import take_api_key, with_api_key
from tandem.cluster.launch.options import LaunchOptions, options_for_others
from tandem.common.config.router import AdmissionOptions
from tandem.common.options import parse
from tandem.errors import ConfigError
from tandem.net.security.keys import KeyRecord, check_secret, parse_key


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TANDEM_API_KEY", raising=False)


def is_record_of(record: KeyRecord | None, key: str) -> bool:
    assert record is not None
    key_id, secret = parse_key(key)
    check_secret(record, secret, now=0.0)
    return record.key_id == key_id


def test_a_key_comes_from_the_file_then_from_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert take_api_key(LaunchOptions()) is None
    file = tmp_path / "key"
    file.write_text("sk-of-the-file\n")
    monkeypatch.setenv("TANDEM_API_KEY", "sk-of-the-variable")
    assert is_record_of(take_api_key(LaunchOptions(api_key_file=str(file))), "sk-of-the-file")
    assert is_record_of(take_api_key(LaunchOptions()), "sk-of-the-variable")
    assert "TANDEM_API_KEY" not in os.environ, "child processes would get it"


@pytest.mark.parametrize(
    "options",
    [
        LaunchOptions(redis_url="redis://h"),
        LaunchOptions(admission=AdmissionOptions(keys_file="keys.json")),
    ],
)
def test_a_cluster_with_other_keys_does_not_take_the_one_for_calls(
    options: LaunchOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_API_KEY", "tandem-id-secret")
    assert take_api_key(options) is None


@pytest.mark.parametrize("key", ["", "short", "two words here", "schlüssel-1"])
def test_what_is_no_key_is_refused(key: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(key, "utf-8")
    with pytest.raises(ConfigError, match="at least 8 ASCII characters and no spaces"):
        take_api_key(LaunchOptions(api_key_file=str(file)))
    with pytest.raises(ConfigError, match=r"--api-key-file: .*none cannot be read"):
        take_api_key(LaunchOptions(api_key_file=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="cannot be given together"):
        LaunchOptions(api_key_file="a", admission=AdmissionOptions(keys_file="b"))


def test_routers_read_a_record_without_the_secret(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("sk-my-own-key")
    options = LaunchOptions(host="0.0.0.0", api_key_file=str(file))
    record = take_api_key(options)
    assert record is not None
    made = with_api_key(options, record, tmp_path)
    path = Path(made.admission.keys_file)
    assert path.parent == tmp_path
    assert path.stat().st_mode & 0o777 == 0o600
    assert msgspec.json.decode(path.read_bytes(), type=list[KeyRecord]) == [record]
    assert b"sk-my-own-key" not in path.read_bytes()


def test_a_machine_that_joins_has_the_record_in_its_own_run_folder(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("sk-my-own-key")
    options = LaunchOptions(listen="10.0.0.1", host="10.0.0.1", api_key_file=str(file))
    record = take_api_key(options)
    assert record is not None
    sent = options_for_others(with_api_key(options, record, tmp_path))
    assert "sk-my-own-key" not in " ".join(sent)
    received = parse(LaunchOptions, "tandem join", sent)
    own = tmp_path / "joined"
    own.mkdir()
    joined = with_api_key(received, record, own)
    assert Path(joined.admission.keys_file).parent == own
    assert str(file) not in sent
