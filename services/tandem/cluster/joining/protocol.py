"""The HTTPS messages with which a machine joins a cluster.

  GET  /ca      returns the certificate of the cluster's certificate authority
  POST /join    takes a `JoinRequest`, returns a `JoinReply`, both as JSON; needs the header
                `Authorization: Bearer TOKEN`

The operator gives the joining machine the token and the SHA-256 of the authority's certificate.

1. The machine gets /ca over an unverified connection and compares the SHA-256.
2. The machine opens a second connection. The server must present a certificate of that authority
   for the name `join.CLUSTER.tandem`.
3. Only then does the machine send the token.

So a man in the middle learns no secret.
"""

import msgspec

from tandem.net.security.keys import KeyRecord

TOKEN_BYTES_MIN = 16


class JoinRequest(msgspec.Struct, frozen=True):
    version: str  # version of Tandem, which must be the same on all hosts
    address: str  # address of the joining machine


class JoinReply(msgspec.Struct, frozen=True):
    """Everything that a host needs in order to join. It contains secrets."""

    cluster_id: str
    # command-line options of `tandem up`, without those that apply only to the first machine
    options: list[str]
    cluster_token: str
    ray_token: str
    # kind of process (such as router) -> URL of Redis. The joining machine replaces `{tls}` in a
    # URL by its folder of TLS files.
    redis_urls: dict[str, str]
    authority: str  # certificate of the authority, PEM
    authority_key: str  # key of the authority, PEM
    may_lead: bool  # True: a joined host may become Ray's head. False: only the first host may.
    # address of the machine that ran `tandem up`. A joining machine replaces this address in
    # `options` by its own address.
    first_address: str = ""
    api_key: KeyRecord | None = None  # record of the key in `--api-key-file`, with its hash
