"""Opens an S3 bucket with obstore: that of the KV tier, or that of clients' files."""

from __future__ import annotations

import configparser
import re
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from tandem.errors import ConfigError

_CONNECT_S = 1.0
_FIELDS = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
}


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """A bucket and a prefix, and how to reach them. `option` is the common beginning of the options
    that set the other fields, such as kv-store. Error messages use it."""

    option: str
    url: str  # s3://BUCKET/PREFIX
    endpoint: str = ""  # URL of the server; "": AWS's server for the region
    region: str = ""  # "": that of AWS_REGION
    credentials: str = ""  # a file; "": the credentials of the environment or the machine


def open_store(address: StoreAddress, *, request_s: float, retries: int = 0) -> Any:
    """Returns a store of obstore for the bucket and the prefix. A request fails after `request_s`
    seconds, and is repeated at most `retries` times. Raises ConfigError."""
    try:
        from obstore.store import S3Store
    except ImportError as error:
        raise ConfigError(
            f"{address.option}-url needs the package obstore: pip install 'tandem-llm[store]'"
        ) from error
    bucket, prefix = split_url(address.url, address.option)
    settings: dict[str, Any] = {}
    if address.endpoint:
        settings["endpoint"] = address.endpoint
    if address.region:
        settings["region"] = address.region
    if address.credentials:
        settings |= read_credentials(Path(address.credentials).expanduser(), address.option)
    try:
        return S3Store(
            bucket,
            prefix=prefix or None,
            client_options={
                "allow_http": address.endpoint.startswith("http://"),
                "timeout": timedelta(seconds=request_s),
                "connect_timeout": timedelta(seconds=_CONNECT_S),
            },
            retry_config={
                "max_retries": retries,
                "retry_timeout": timedelta(seconds=(1 + retries) * request_s),
            },
            **settings,
        )
    except Exception as error:  # obstore raises a different class for each setting
        raise ConfigError(f"{address.option}-url {address.url} cannot be used: {error}") from error


def split_url(url: str, option: str) -> tuple[str, str]:
    """Returns the bucket and the prefix of s3://BUCKET/PREFIX. Raises ConfigError."""
    found = re.fullmatch(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(.*))?", url)
    if found is None:
        raise ConfigError(f"{option}-url is {url!r}; it must be s3://BUCKET or s3://BUCKET/PREFIX")
    return found[1], (found[2] or "").strip("/")


def read_credentials(path: Path, option: str) -> dict[str, str]:
    """Reads the section `default` of an AWS credentials file. Raises ConfigError."""
    option = f"{option}-credentials {path}"
    parser = configparser.ConfigParser(interpolation=None)
    try:
        mode = path.stat().st_mode
        parser.read_string(path.read_text())
    except (OSError, UnicodeDecodeError, configparser.Error) as error:
        raise ConfigError(f"{option} cannot be read: {type(error).__name__}: {error}") from error
    if mode & 0o007:
        raise ConfigError(
            f"every user of this machine has access to {option} (mode {mode & 0o777:o}); run "
            f"chmod o= {path}"
        )
    found = dict(parser["default"]) if parser.has_section("default") else {}
    missing = [name for name in list(_FIELDS)[:2] if not found.get(name)]
    if missing:
        raise ConfigError(f"{option}: the section [default] has no {' and no '.join(missing)}")
    return {field: found[name] for name, field in _FIELDS.items() if found.get(name)}
