"""A machine that joins checks the cluster first, and is checked before it is answered."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding

from tandem.cluster.joining import call
from tandem.cluster.joining.call import request_join
from tandem.cluster.joining.protocol import JoinReply
from tandem.cluster.joining.server import JoinServer
from tandem.cluster.launch.certificates import Authority, host_folder, write_host_certificates
from tandem.cluster.launch.joined_host import JoinOptions
from tandem.cluster.launch.options import LaunchOptions, on_host, options_for_others
from tandem.common.config.admin import AdminOptions
from tandem.common.options import parse
from tandem.errors import ConfigError
from tandem.net import bounded_server

HERE = "127.0.0.1"
TOKEN = "a token of sixteen or more"
REPLY = JoinReply(
    cluster_id="c",
    options=["--decode", "2"],
    cluster_token="t",
    ray_token="r",
    redis_urls={"worker": "rediss://worker:p@h:1/0?ssl_ca_certs={tls}/worker/ca.crt"},
    authority="",
    authority_key="",
    may_lead=True,
)


@pytest.fixture
def authority() -> Authority:
    return Authority("c")


@pytest.fixture
def server(tmp_path: Path, authority: Authority) -> Iterator[JoinServer]:
    write_host_certificates(tmp_path, authority, HERE)
    folder = host_folder(tmp_path, "join")
    joined = list[str]()
    made = JoinServer(HERE, 0, folder=folder, token=TOKEN, reply=REPLY, joined=joined.append)
    yield made
    made.close()


def ask(server: JoinServer, sha256: str, token: str = TOKEN) -> tuple[JoinReply, str]:
    port = server.port
    return request_join(HERE, port, token=token, ca_sha256=sha256, own_address="")


def test_the_right_digest_and_token_get_the_reply(server: JoinServer, authority: Authority) -> None:
    assert ask(server, authority.sha256) == (REPLY, HERE)
    shown = ":".join(authority.sha256[i : i + 2] for i in range(0, 64, 2)).upper()
    assert ask(server, shown)[0] == REPLY


def test_another_authority_is_refused_before_the_token_is_sent(
    server: JoinServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sent(*_: object) -> None:
        raise AssertionError("the token was sent")

    monkeypatch.setattr(call, "_send_request", sent)
    with pytest.raises(ConfigError, match="did not send the join token"):
        ask(server, Authority("c").sha256)


@pytest.fixture
def padded() -> Authority:
    """An authority whose text ends in padding, where a lenient reader stops."""
    while b"=" not in (made := Authority("c")).pem:
        pass
    return made


@pytest.mark.parametrize(
    "text",
    [
        "{real}{evil}",
        "{evil}{real}",
        "{real}{real}{evil}",
        "{real}text\n{evil}",
        "text\n{real}",
        "{real}text\n",
        "{real}",
        "{trusted}{real}",
        "{real_block}{evil_block}",
        "{glued}",
        "{garbage}",
        "",
        "text",
    ],
)
def test_only_the_certificate_with_the_digest_is_trusted(
    tmp_path: Path, padded: Authority, text: str
) -> None:
    """The server in between knows the certificate of the authority, and not its key. It would take
    the token, so a call that succeeds has sent it."""
    evil = Authority("c")
    real_der, evil_der = map(ssl.PEM_cert_to_DER_cert, (padded.pem.decode(), evil.pem.decode()))
    begin = "-----BEGIN CERTIFICATE-----\n"
    end = "-----END CERTIFICATE-----\n"
    (body, evil_body) = (
        a.pem.decode().removeprefix(begin).removesuffix(end) for a in (padded, evil)
    )
    sent = text.format(
        real=padded.pem.decode(),
        evil=evil.pem.decode(),
        real_block=begin + body,
        evil_block=evil_body + end,
        glued=ssl.DER_cert_to_PEM_cert(real_der + evil_der),
        garbage=ssl.DER_cert_to_PEM_cert(real_der + b"garbage"),
        trusted=evil.pem.decode().replace("CERTIFICATE", "TRUSTED CERTIFICATE"),
    )
    evil.write(tmp_path, "join", roots=sent.encode() or b"\n", addresses=[HERE])
    made = JoinServer(HERE, 0, folder=tmp_path, token=TOKEN, reply=REPLY, joined=print)
    try:
        with pytest.raises(ConfigError, match=r"cannot be joined|did not send the join token"):
            ask(made, padded.sha256)
    finally:
        made.close()


@pytest.mark.parametrize("is_authority", [False, True])
def test_what_the_authority_certified_certifies_no_join_server(
    tmp_path: Path, authority: Authority, is_authority: bool
) -> None:
    """The chain is: join server, a certificate of the cluster, and its authority."""
    between = Authority("between")
    certificate = (
        x509.CertificateBuilder()
        .subject_name(between._name)
        .issuer_name(authority._name)
        .public_key(between._key.public_key())
        .serial_number(1)
        .not_valid_before(datetime.now(UTC) - timedelta(hours=1))
        .not_valid_after(datetime.now(UTC) + timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .sign(authority._key, hashes.SHA256())
    )
    between._cluster_id = "c"
    between.write(tmp_path, "join", roots=authority.pem, addresses=[HERE])
    with (tmp_path / "tls.crt").open("ab") as file:
        file.write(certificate.public_bytes(Encoding.PEM))
    made = JoinServer(HERE, 0, folder=tmp_path, token=TOKEN, reply=REPLY, joined=print)
    try:
        with pytest.raises(ConfigError, match="certificate verify failed"):
            ask(made, authority.sha256)
    finally:
        made.close()


def test_a_certificate_of_another_kind_is_no_join_server(
    tmp_path: Path, authority: Authority
) -> None:
    """A worker has a certificate of the same authority; it gets no joiner's token."""
    authority.write(tmp_path / "w", "worker", addresses=[HERE])
    made = JoinServer(HERE, 0, folder=tmp_path / "w", token=TOKEN, reply=REPLY, joined=print)
    try:
        with pytest.raises(ConfigError, match="Hostname mismatch"):
            ask(made, authority.sha256)
    finally:
        made.close()


def test_a_wrong_token_and_another_version_are_refused(
    server: JoinServer, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="the join token is wrong"):
        ask(server, authority.sha256, TOKEN + "x")
    monkeypatch.setattr(call, "version", lambda _: "0.0.1")
    with pytest.raises(ConfigError, match=r"runs Tandem .* but the joining host runs '0\.0\.1'"):
        ask(server, authority.sha256)


def test_a_call_that_is_too_large_is_a_413(server: JoinServer, authority: Authority) -> None:
    context = ssl.create_default_context(cadata=authority.pem.decode())
    with (
        socket.create_connection((HERE, server.port), timeout=5) as raw,
        context.wrap_socket(raw, server_hostname="join.c.tandem") as secure,
    ):
        headers = f"Authorization: Bearer {TOKEN}\r\nContent-Length: 99999999\r\n"
        secure.sendall(f"POST /join HTTP/1.0\r\n{headers}\r\n".encode())
        assert secure.recv(100).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("num_silent", [20, 200])
def test_silent_callers_of_one_address_keep_nobody_from_joining(
    server: JoinServer, authority: Authority, num_silent: int
) -> None:
    """They have the address of the machine that joins. Old ones give way."""
    with contextlib.ExitStack() as opened:
        for _ in range(num_silent):
            opened.enter_context(socket.create_connection((HERE, server.port), timeout=5))
        give_up_at = time.monotonic() + 30
        while True:
            try:
                assert ask(server, authority.sha256)[0] == REPLY
                break
            except ConfigError:
                assert time.monotonic() < give_up_at


def test_an_authority_is_made_again_from_its_key(tmp_path: Path, authority: Authority) -> None:
    again = Authority.with_key("c", authority.pem, authority.key_pem)
    assert (again.sha256, again.pem) == (authority.sha256, authority.pem)
    again.write(tmp_path, "worker")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")


def test_a_joining_machine_has_the_options_of_the_first_at_its_own_address() -> None:
    words = [
        "--listen",
        "10.0.0.1",
        "--host",
        "10.0.0.1",
        "--allow-anonymous",
        "--decode",
        "3:zone=b",
    ]
    words += ["--labels", "gpu=H100", "--join-token-file", "secret"]
    first = parse(LaunchOptions, "tandem up", words)
    told = parse(LaunchOptions, "tandem join", options_for_others(first))
    there = on_host(told, first="10.0.0.1", address="10.0.0.2", labels=("zone=b",))
    assert (there.listen, there.host, there.admin) == ("10.0.0.2", "10.0.0.2", AdminOptions())
    assert (int(there.num_decode), there.labels, there.join_token_file) == (3, ("zone=b",), "")


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("10.0.0.1", ("10.0.0.1", 8100)),
        ("host.example:9000", ("host.example", 9000)),
        ("[fd00::1]:9000", ("fd00::1", 9000)),
        ("[fd00::1]", ("fd00::1", 8100)),
        ("fd00::1", ("fd00::1", 8100)),
    ],
)
def test_the_address_to_join(address: str, expected: tuple[str, int]) -> None:
    assert JoinOptions(address=address, token_file="f", ca_sha256="ab").host_and_port == expected


def test_what_cannot_be_listened_at_or_is_no_label_is_refused() -> None:
    with pytest.raises(ConfigError, match="give a single IP address"):
        LaunchOptions(listen="0.0.0.0")
    with pytest.raises(ConfigError, match="must be an IP address"):
        LaunchOptions(listen="localhost")
    with pytest.raises(ConfigError, match=r"the label .* must be NAME=VALUE"):
        parse(LaunchOptions, "tandem up", ["--labels", "gpu"])


def test_a_caller_that_sends_a_byte_now_and_then_is_cut_off(
    server: JoinServer, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte came within the socket's time-out: some such callers could keep all others out."""
    monkeypatch.setattr(bounded_server, "DEADLINE_S", 1.0)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    raw = socket.create_connection((HERE, server.port), timeout=30)

    def trickle() -> None:
        slow.sendall(b"GET /ca HTTP/1.1\r\nX: ")
        give_up_at = time.monotonic() + 30
        while time.monotonic() < give_up_at:
            slow.sendall(b"x")
            time.sleep(0.1)

    with raw, context.wrap_socket(raw) as slow, pytest.raises(OSError):
        trickle()
    assert ask(server, authority.sha256)[0] == REPLY
