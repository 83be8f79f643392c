"""Makes the certificate of a pod's Ray, which other pods know by the pod's own address.

    python -m tandem.cluster.launch.pod_certificate AUTHORITY FOLDER NAME...

AUTHORITY is the folder of a Secret with the authority's tls.crt and tls.key, an elliptic curve's.
FOLDER gets ca.crt, tls.crt and tls.key. Each NAME is an IP address or a DNS name of the pod. In the
head's pod, KubeRay adds the name by which nodes reach the head, in the variable FQ_RAY_IP.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tandem.cluster.launch.certificates import Authority

_LOCAL = ("127.0.0.1", "localhost")  # Ray's processes of a pod call each other there, too


def make_pod_certificate(
    authority: Path, folder: Path, names: Sequence[str], environment: Mapping[str, str]
) -> None:
    """Writes the three files into `folder`. Raises OSError or ValueError if the authority cannot
    be read."""
    certificate, key = ((authority / name).read_bytes() for name in ("tls.crt", "tls.key"))
    head = environment.get("FQ_RAY_IP", "")
    known = dict.fromkeys(name for name in (*names, head, *_LOCAL) if name)
    signer = Authority.with_key("ray", certificate, key)
    signer.write(folder, "ray", addresses=list(known))


if __name__ == "__main__":
    make_pod_certificate(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:], os.environ)
