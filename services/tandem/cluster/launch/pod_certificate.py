"""Creates the certificate of a pod's Ray processes. Other pods check that it names the pod's
address.

  python -m tandem.cluster.launch.pod_certificate AUTHORITY FOLDER NAME...

AUTHORITY is a folder with tls.crt and tls.key of the certificate authority (elliptic curve), such
as a mounted Secret. The program writes ca.crt, tls.crt and tls.key to FOLDER. Each NAME is an IP
address or a DNS name of the pod. In the head's pod, KubeRay sets the variable FQ_RAY_IP to the name
by which nodes reach the head; the certificate gets this name, too.

If the authority cannot be used, the program prints one line and exits with status 2.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tandem.cluster.launch.certificates import Authority
from tandem.errors import ConfigError

_LOCAL = ("127.0.0.1", "localhost")  # Ray's processes within a pod use these addresses


def make_pod_certificate(
    authority: Path, folder: Path, names: Sequence[str], environment: Mapping[str, str]
) -> None:
    """Writes ca.crt, tls.crt and tls.key to `folder`. Raises ConfigError if the authority cannot be
    used."""
    head = environment.get("FQ_RAY_IP", "")
    known = dict.fromkeys(name for name in (*names, head, *_LOCAL) if name)
    _read(authority).write(folder, "ray", addresses=list(known))


def _read(folder: Path) -> Authority:
    try:
        certificate, key = ((folder / name).read_bytes() for name in ("tls.crt", "tls.key"))
        return Authority.with_key("ray", certificate, key)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the Secret with Ray's certificate authority, mounted at {folder}, cannot be used: "
            f"{error}"
        ) from error


def main() -> int:
    """Runs the program. Returns the exit status."""
    authority, folder, *names = sys.argv[1:]
    try:
        make_pod_certificate(Path(authority), Path(folder), names, os.environ)
    except ConfigError as error:
        print(f"ray-certificate: {error.message}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
