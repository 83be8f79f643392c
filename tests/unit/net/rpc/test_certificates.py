"""The files of a certificate are read again when they change, and only if they fit each other."""

from pathlib import Path

import pytest

from tandem.cluster.launch.certificates import Authority
from tandem.errors import ConfigError
from tandem.net.rpc.certificates import CertificateFiles


def test_changed_files_are_read_again(tmp_path: Path) -> None:
    authority = Authority("c")
    authority.write(tmp_path, "worker")
    files = CertificateFiles.in_folder(str(tmp_path))
    first = files.current()
    assert files.current() is first
    other = Authority("c")
    other.write(tmp_path, "worker", roots=authority.pem + other.pem)
    second = files.current()
    assert second.chain != first.chain
    assert second.roots == authority.pem + other.pem


def test_a_key_of_another_certificate_leaves_the_last_good_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Authority("c").write(tmp_path / "a", "worker")
    Authority("c").write(tmp_path / "b", "worker")
    files = CertificateFiles.in_folder(str(tmp_path / "a"))
    first = files.current()
    (tmp_path / "b" / "tls.crt").replace(tmp_path / "a" / "tls.crt")
    assert files.current() is first
    assert files.current() is first
    assert len([r for r in caplog.records if "stays in use" in r.message]) == 1
    (tmp_path / "b" / "tls.key").replace(tmp_path / "a" / "tls.key")
    assert files.current().chain != first.chain


def test_files_that_vanish_leave_the_last_good_ones(tmp_path: Path) -> None:
    Authority("c").write(tmp_path, "worker")
    files = CertificateFiles.in_folder(str(tmp_path))
    first = files.current()
    (tmp_path / "tls.key").unlink()
    assert files.current() is first


@pytest.mark.parametrize("name", ["ca.crt", "tls.crt", "tls.key"])
def test_a_start_without_usable_files_is_refused(tmp_path: Path, name: str) -> None:
    Authority("c").write(tmp_path, "worker")
    (tmp_path / name).write_text("nothing")
    with pytest.raises(ConfigError, match=r"tls\.crt cannot be used"):
        CertificateFiles.in_folder(str(tmp_path))


def test_keys_are_private_and_in_no_repr(tmp_path: Path) -> None:
    Authority("c").write(tmp_path / "tls", "worker")
    assert (tmp_path / "tls").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "tls" / "tls.key").stat().st_mode & 0o777 == 0o600
    assert "PRIVATE" not in repr(CertificateFiles.in_folder(str(tmp_path / "tls")).current())
