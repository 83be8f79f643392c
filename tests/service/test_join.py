"""Two machines in one cluster: one joins, gets a worker, and is lost."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc import StatusCode

from tandem.cluster.joining.call import request_join
from tandem.cluster.launch.certificates import Authority
from tandem.cluster.operate import show_status
from tandem.errors import ConfigError
from tests.harness.hosts import why_not
from tests.harness.joined import JOIN_PORT, TOKEN, Joined, two_machines
from tests.harness.network import Shape
from tests.harness.waiting import wait_until

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.service

GCS_PORT = 8101
RAY_PORTS = {GCS_PORT, 8102, 8103}  # and the raylet's and the object manager's
RAY_ACTOR_PORTS = range(8120, 8320)
PUBLIC_PORTS = {8000, 8001, 8002, 8003}
HOSTS = Path(__file__).parents[2] / "docs" / "hosts.md"
NEVER_OPEN = (10001, 8265)  # Ray's client server and its dashboard
SLOW_BYTES_PER_S = 8e6


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Joined]:
    folder = tmp_path_factory.mktemp("join")
    with two_machines(folder, "--prefill", "0", "--decode", "1") as made:
        yield made


def test_a_strange_authority_learns_no_token_and_a_wrong_token_gets_nothing(joined: Joined) -> None:
    where = (joined.first.address, JOIN_PORT)
    with pytest.raises(ConfigError, match="did not send the join token"):
        request_join(*where, token=TOKEN, ca_sha256="ab" * 32, own_address="")
    with pytest.raises(ConfigError, match="the join token is wrong"):
        request_join(*where, token=TOKEN + "x", ca_sha256=joined.ca_sha256, own_address="")


def called(host: str, port: int, ca: bytes, *own: bytes) -> StatusCode:
    """Returns the status of a call of nothing in particular, with a key and a certificate, or
    without."""
    credentials = grpc.ssl_channel_credentials(ca, *own)
    with grpc.secure_channel(f"{host}:{port}", credentials) as channel:
        call = channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")
        with pytest.raises(grpc.RpcError) as refused:
            call(b"", timeout=10)
    code = refused.value.code()
    assert isinstance(code, StatusCode)
    return code


def documented_ports() -> dict[int, str]:
    """Returns the rows of the table in docs/hosts.md by port, those of single ports and ranges."""
    rows = re.findall(r"^\| (8\d\d\d[^|]*) \| (.*) \|$", HOSTS.read_text(), re.MULTILINE)
    found: dict[int, str] = {}
    for ports, told in rows:
        numbers = list(map(int, re.findall(r"\d+", ports)))
        is_range = " to " in ports
        found |= dict.fromkeys(range(numbers[0], numbers[1] + 1) if is_range else numbers, told)
    return found


def test_ray_answers_only_with_a_certificate_of_the_cluster(joined: Joined, tmp_path: Path) -> None:
    """A call with a certificate of the cluster and without Ray's token is refused as a call."""
    joined.scale("prefill=1")  # the joined machine has an agent
    (tls,) = joined.first.folder.glob("tandem-*/tls/ray")
    ca, *own = ((tls / name).read_bytes() for name in ("ca.crt", "tls.key", "tls.crt"))
    Authority("stranger").write(tmp_path, "ray", addresses=[joined.first.address])
    strange = [(tmp_path / name).read_bytes() for name in ("tls.key", "tls.crt")]
    for machine in (joined.first, joined.second):
        listening = joined.ports(machine)
        ports = {p for p in listening if p in RAY_PORTS or p in RAY_ACTOR_PORTS}
        assert (ports & RAY_PORTS) | {GCS_PORT} == RAY_PORTS
        assert ports & set(RAY_ACTOR_PORTS)
        for port in ports:
            codes = [called(machine.address, port, ca, *key) for key in ([], strange, own)]
            assert codes[:2] == [StatusCode.UNAVAILABLE] * 2, (port, codes)
            assert codes[2] in (StatusCode.UNAUTHENTICATED, StatusCode.UNIMPLEMENTED), port


def test_only_the_ports_of_the_table_are_open(joined: Joined) -> None:
    table = documented_ports()
    silent = {port for port, told in table.items() if "are closed" in told}
    assert len(silent) == 3
    workers = joined.get("/v1/cluster")["workers"]
    told = [w[name] for w in workers for name in ("address", "metrics_address")]
    for machine, public in ((joined.first, PUBLIC_PORTS), (joined.second, set[int]())):
        ports = joined.ports(machine)
        assert not ports & {*NEVER_OPEN, *silent}
        of_workers = {
            int(port)
            for host, _, port in (address.rpartition(":") for address in told)
            if host == machine.address
        }
        assert ports - table.keys() <= public | of_workers, machine.address
        assert public <= ports
    on_second = joined.ports(joined.second)
    alone = {port for port, told in table.items() if "on the head" in told or "first mach" in told}
    named = set(range(JOIN_PORT, JOIN_PORT + 10)) & table.keys() - silent
    assert joined.ports(joined.first) & named == named
    assert on_second & named == named - alone


def test_a_worker_goes_near_its_peers_where_as_many_of_its_pool_are(
    joined: Joined, capsys: pytest.CaptureFixture[str]
) -> None:
    # A pair is measured when it begins: no worker is there before the link is slow.
    joined.scale("prefill=0")
    wait_until(lambda: not joined.decode_worker()["transports"])
    joined.network.shape(joined.second.place, Shape(bytes_per_s=SLOW_BYTES_PER_S))
    joined.scale("prefill=2")
    far, near = (agent["host"] for agent in joined.agents("prefill"))
    assert far in joined.second.text()
    wait_until(lambda: joined.decode_worker()["transports"].keys() == {"prefill-0", "prefill-1"})
    joined.scale("prefill=3")
    # The second machine has two workers less, and each of them one prefill worker.
    added = joined.agents("prefill")[-1]
    assert added["host"] == near
    show_status(joined.admin_url)
    told = re.sub(r"\s+", " ", capsys.readouterr().out)
    found = re.search(
        rf"prefill-2 runs on {near}, because {far} has ([\d.]+) MB/s to the decode", told
    )
    assert found, told
    assert float(found[1]) * 1e6 < 2 * SLOW_BYTES_PER_S
    joined.network.shape(joined.second.place, Shape())
    joined.scale("prefill=1")


def test_a_worker_goes_to_the_machine_that_joined_and_elsewhere_when_that_is_lost(
    joined: Joined,
) -> None:
    joined.scale("prefill=1")
    (agent,) = joined.agents("prefill")
    assert agent["host"] in joined.second.text()
    # No memory is shared between the two hosts, and NIXL does not use TCP.
    wait_until(lambda: joined.decode_worker()["transports"].get("prefill-0") == "grpc")
    before = joined.chat("What is gravity?")
    assert "prefill-0" in json.dumps(joined.get(f"/v1/requests/{before['id']}"))
    (log,) = joined.second.folder.glob("state/tandem/runs/*/prefill-0.log")
    told = joined.logs("prefill-0")
    assert (told.returncode, told.stderr) == (0, "")
    assert "prefill worker prefill-0 is ready at" in told.stdout
    assert log.read_text().startswith(told.stdout)
    joined.second.kill()
    wait_until(lambda: joined.serves("prefill-1"), 60)
    states = {agent["id"]: agent["state"] for agent in joined.agents("prefill")}
    assert states == {"prefill-0": "lost", "prefill-1": "running"}
    gone = joined.logs("prefill-0")
    assert gone.returncode == 1
    assert f"its host {agent['host']} is down or cut off" in gone.stderr
    assert "`tandem logs prefill-0` there" in gone.stderr
    wait_until(lambda: "prefill-1" in joined.decode_worker()["transports"], 60)
    after = joined.chat("What is gravity?")
    assert after["choices"] == before["choices"]


@pytest.mark.slow
def test_a_machine_that_leaves_hands_over_first(joined: Joined) -> None:
    joined.second.kill()
    joined.join()
    before = {agent["id"] for agent in joined.agents("decode")}
    joined.scale("decode=2")
    (added,) = (a for a in joined.agents("decode") if a["id"] not in before)
    assert added["host"] in joined.second.text()
    wait_until(lambda: joined.serves(added["id"]))
    joined.second.terminate()
    on_first = [a for a in joined.agents("decode") if a["host"] != added["host"]]
    assert len([a for a in on_first if a["state"] == "running"]) == 2
    assert all(joined.serves(agent["id"]) for agent in on_first if agent["state"] == "running")
    # It has drained: nothing of it was lost.
    assert not [a for a in joined.agents("decode") if a["host"] == added["host"]]
