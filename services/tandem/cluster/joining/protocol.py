"""The messages between a machine that joins and a host of the cluster.

  GET  /ca      the authority's certificate, before anything is verified
  POST /join    `JoinRequest` -> `JoinReply`, both JSON; header `Authorization: Bearer TOKEN`

The joiner compares the certificate's SHA-256 with the one given by its operator. Only then does it
open a second connection, on which the server must prove the name `join.CLUSTER.tandem` with a
certificate of that authority, and sends the token. A man in the middle learns no secret.
"""

import msgspec

TOKEN_BYTES_MIN = 16


class JoinRequest(msgspec.Struct, frozen=True):
    version: str  # version of Tandem; all hosts must run the same
    address: str  # address of the joining machine


class JoinReply(msgspec.Struct, frozen=True):
    """Everything that a host needs in order to join. It contains secrets."""

    cluster_id: str
    # command line of `tandem up`, without the options that apply only to its machine
    options: list[str]
    cluster_token: str
    ray_token: str
    # URLs by kind of process; `{tls}` stands for the joiner's tls folder
    redis_urls: dict[str, str]
    authority: str  # certificate of the authority, PEM
    authority_key: str  # key of the authority, PEM
    may_lead: bool  # True if a joined host may become Ray's head
    first_address: str = ""  # address of the machine of `tandem up`, which `options` may contain
