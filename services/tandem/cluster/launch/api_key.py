"""Reads the API key of a cluster of `tandem up` from `--api-key-file` or TANDEM_API_KEY.

Routers read the key's record from a file in the run folder. The record has a hash in place of the
secret. So no process of the cluster has the key in its command line or environment.
"""

import os
import time
from dataclasses import replace
from pathlib import Path

import msgspec

from tandem.cluster.launch.options import LaunchOptions
from tandem.common.config.cluster import API_KEY_VARIABLE
from tandem.errors import ConfigError
from tandem.net.security.keys import KeyRecord, record_of

KEY_LENGTH_MIN = 8
_FILE = "api-key.json"


def take_api_key(options: LaunchOptions) -> KeyRecord | None:
    """Returns the record of the API key that requests need; None if there is no key. Raises
    ConfigError.

    TANDEM_API_KEY is ignored if an option names another source of keys (--api-key-file, --keys-file
    or --redis), because it may be the key that an operator's commands send. Otherwise it is removed
    from the environment, so that no child process gets it.
    """
    if options.api_key_file:
        where = options.api_key_file
        try:
            key = Path(where).read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file: {where} cannot be read: {error}") from None
    elif options.admission.keys_file or options.redis_url:
        return None
    else:
        where = API_KEY_VARIABLE
        key = os.environ.pop(API_KEY_VARIABLE, "").strip()
        if not key:
            return None
    if len(key) < KEY_LENGTH_MIN or not key.isascii() or len(key.split()) > 1:
        raise ConfigError(
            f"the API key in {where} must have at least {KEY_LENGTH_MIN} ASCII characters and no "
            "spaces"
        )
    return record_of(key, now=time.time())


def with_api_key(options: LaunchOptions, record: KeyRecord, run_folder: Path) -> LaunchOptions:
    """Writes the record to a file in the run folder, from which routers read their keys. Returns
    the options that name this file."""
    path = run_folder / _FILE
    path.touch(mode=0o600)
    path.write_bytes(msgspec.json.encode([record]))
    admission = replace(options.admission, keys_file=str(path))
    return replace(options, admission=admission, api_key_file="")
