"""Reads secrets from files. A secret on a command line could be read by every user of the host."""

from __future__ import annotations

import logging
import stat
from pathlib import Path

log = logging.getLogger(__name__)


def keys_in(option: str, file: str) -> tuple[str, ...]:
    """Return the keys in `file`, separated by whitespace; `#` begins a comment that ends with the line.

    Raises InvalidArgument, which names `option`, for a file that cannot be read or has no key. If every user of this
    host may read the file, it is used, but a warning is logged.
    """
    from tandem.protocol.errors import InvalidArgument
    from tandem.settings.parsing import check_key

    path = Path(file)
    try:
        lines = path.read_text().splitlines()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise InvalidArgument(option, f"cannot read {file} ({reason})") from None
    warn_if_readable(path)
    keys = tuple(key for line in lines for key in line.partition("#")[0].split())
    if not keys:
        raise InvalidArgument(option, f"{file} has no secret in it")
    for key in keys:
        check_key(option, key)
    return keys


def check_key_file(option: str, file: Path) -> None:
    """Check that a router's file of API keys can be used, and log a warning if every user of this host may read it.

    Raises InvalidArgument, which names `option`, if the file cannot be read, has no key, or has a malformed line.
    """
    from tandem.net.security.api_keys import read_keys

    read_keys(option, file)
    warn_if_readable(file)


def warn_if_readable(secret: Path) -> None:
    """Log a warning if every user of this host may read the file."""
    if secret.stat().st_mode & stat.S_IROTH:
        log.warning("every user of this host may read %s: `chmod o-r` keeps the secret from them", secret)


def one_key(option: str, given: str, file: str) -> str:
    """Return `given`, or the only key in `file`, or "".

    Raises InvalidArgument as `keys_in` does, and for several keys.
    """
    from tandem.protocol.errors import InvalidArgument

    if given or not file:
        return given
    keys = keys_in(option, file)
    if len(keys) > 1:
        raise InvalidArgument(option, f"{file} has {len(keys)} secrets in it; one is wanted")
    return keys[0]


def first_key(option: str, given: str, file: str) -> str:
    """Return `given`, or the first key in a router's file of API keys, or "".

    Raises InvalidArgument if the file has only hashed keys.
    """
    from tandem.net.security.api_keys import plain_keys
    from tandem.protocol.errors import InvalidArgument

    if given or not file:
        return given
    keys = plain_keys(keys_in(option, file))
    if not keys:
        raise InvalidArgument(option, f"{file} has hashes only; give the key itself by --api-key")
    return keys[0]
