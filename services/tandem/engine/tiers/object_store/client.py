"""Opens the object store of --kv-store-url with obstore."""

from __future__ import annotations

import configparser
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

from tandem.common.config.engine import EngineConfig
from tandem.errors import ConfigError

# Time limit for a request, in seconds. A load that gets no block in this time is cancelled anyway.
REQUEST_S = 2.0
_CONNECT_S = 1.0
_FIELDS = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
}


def open_store(config: EngineConfig) -> Any:
    """Returns a store of obstore for the bucket and the prefix. Raises ConfigError."""
    try:
        from obstore.store import S3Store
    except ImportError as error:
        raise ConfigError(
            "kv-store-url needs the package obstore: pip install 'tandem-llm[store]'"
        ) from error
    bucket, prefix = split_url(config.kv_store_url)
    settings: dict[str, Any] = {}
    if config.kv_store_endpoint:
        settings["endpoint"] = config.kv_store_endpoint
    if config.kv_store_region:
        settings["region"] = config.kv_store_region
    if config.kv_store_credentials:
        settings |= read_credentials(Path(config.kv_store_credentials).expanduser())
    try:
        return S3Store(
            bucket,
            prefix=prefix or None,
            client_options={
                "allow_http": config.kv_store_endpoint.startswith("http://"),
                "timeout": timedelta(seconds=REQUEST_S),
                "connect_timeout": timedelta(seconds=_CONNECT_S),
            },
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=REQUEST_S)},
            **settings,
        )
    except Exception as error:  # obstore raises a different class for each setting
        raise ConfigError(f"kv-store-url {config.kv_store_url} cannot be used: {error}") from error


def split_url(url: str) -> tuple[str, str]:
    """Returns the bucket and the prefix of s3://BUCKET/PREFIX. Raises ConfigError."""
    found = re.fullmatch(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(.*))?", url)
    if found is None:
        raise ConfigError(f"kv-store-url is {url!r}; it must be s3://BUCKET or s3://BUCKET/PREFIX")
    return found[1], (found[2] or "").strip("/")


def read_credentials(path: Path) -> dict[str, str]:
    """Reads the section `default` of an AWS credentials file. Raises ConfigError."""
    option = f"kv-store-credentials {path}"
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
