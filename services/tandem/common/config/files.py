"""Settings of clients' files and batches."""

from dataclasses import dataclass

from cyclopts import Parameter

from tandem.common.config.groups import FILES
from tandem.common.options import Options, PositiveSeconds, PositiveSize, Size, Text, option_name
from tandem.errors import ConfigError

_DAY_S = 24 * 3600.0


@Parameter(name="*", group=FILES)
@dataclass(frozen=True, slots=True, kw_only=True)
class FileOptions(Options):
    """Where routers keep files of /v1/files and batches of /v1/batches, and how long."""

    files_url: Text = ""
    """Folder, or s3://BUCKET/PREFIX, for files and batches. All routers must use the same. Default:
    a folder that outlives `tandem up` on one machine, else none: /v1/files and /v1/batches are not
    served."""
    files_endpoint: Text = ""
    """URL of the object store's server. Default: AWS's server for the region."""
    files_region: Text = ""
    """Region of the object store. Default: the variable AWS_REGION, else us-east-1."""
    files_credentials: Text = ""
    """File with the object store's credentials, in the format of ~/.aws/credentials, section
    [default]. Default: AWS_ACCESS_KEY_ID and related variables, else the credentials of the
    machine."""
    files_expire_s: PositiveSeconds = 30 * _DAY_S
    """Files and batches are deleted after this time. A client may choose a shorter time."""
    file_bytes_max: PositiveSize = 200 << 20
    """Largest file that a client may upload, in bytes."""
    tenant_bytes_max: Size = 10 << 30
    """Largest total size of the files of one tenant, in bytes. 0: no limit."""

    def check_together(self) -> None:
        for name in ("files_endpoint", "files_region", "files_credentials"):
            if getattr(self, name) and not self.in_bucket:
                raise ConfigError(
                    f"{option_name(name)} is set, but files-url is not s3://BUCKET/PREFIX; set "
                    "both, or neither"
                )

    @property
    def in_bucket(self) -> bool:
        return self.files_url.startswith("s3://")
