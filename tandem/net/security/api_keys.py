"""API keys with their roles and quotas: from the settings, or from a file that may change while a process runs.

A line of the file has a key, or `sha256:` and the hexadecimal SHA-256 of one, then the settings of that key:

    KEY name=acme requests_per_minute=600 tokens_per_minute=200000
    sha256:HEX name=ops role=operator

The rest of a line after `#` is a comment. Keys with the same name belong to the same tenant, so that an old and a new
key are valid together while both are in the file.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from tandem.logging.recurring import RECURRING
from tandem.net.security.credentials import presented_key
from tandem.net.security.watched_files import WatchedFiles
from tandem.protocol.errors import InvalidArgument, PermissionDenied, TandemError, Unauthenticated
from tandem.settings.parsing import check_key

log = logging.getLogger(__name__)

_HASHED = "sha256:"
_NO_DIGEST = bytes(hashlib.sha256().digest_size)
"""A digest that no key has: an unknown key is compared with it, so that its check takes as long as any other."""
_QUOTA_MAX = 10**12
_NAME_CHARS = 64


class KeyRole(StrEnum):
    """The role of a key, which determines the calls that are allowed with it."""

    TENANT = "tenant"
    """May send generation requests."""
    OPERATOR = "operator"
    """May send generation requests, read the router's state, metrics and traces, and change the router."""
    READER = "reader"
    """May read the router's state, metrics and traces."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An accepted key with its settings; quotas are per minute, 0 = no quota."""

    digest: bytes = field(repr=False)
    """SHA-256 of the key."""
    name: str = ""
    """The tenant's name.

    Keys with the same name belong to the same tenant, and a key without a name is its own tenant.
    """
    role: KeyRole = KeyRole.TENANT
    requests_per_minute: int = 0
    tokens_per_minute: int = 0


@dataclass(frozen=True, slots=True)
class KeySource:
    """The sources of the keys that a process accepts."""

    given: tuple[str, ...] = field(default=(), repr=False)
    """Keys of tenants without quotas, from the settings."""
    file: Path | None = None
    """A file with more keys; it is read again after a change."""
    readers: frozenset[str] = field(default=frozenset(), repr=False)
    """Metrics keys, which have the role `reader`."""

    @property
    def required(self) -> bool:
        """True if calls need a key."""
        return bool(self.given) or self.file is not None


class ApiKeys:
    """The accepted keys of one process. Not thread-safe."""

    def __init__(self, source: KeySource, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the keys. Raises InvalidArgument for a file that cannot be read or has an error."""
        self.required = source.required
        """True if calls need a key."""
        self._file = source.file
        self._watch = WatchedFiles(*([source.file] if source.file else ()), clock=clock)
        readers = (ApiKey(digest_of(key), "metrics", KeyRole.READER) for key in source.readers if key)
        given = (ApiKey(digest_of(key)) for key in source.given if key)
        self._fixed = (*readers, *given)
        self._by_digest = self._indexed(read_keys("api_key_file", source.file) if source.file else ())

    def find(self, headers: Iterable[tuple[str | bytes, str | bytes]]) -> ApiKey | None:
        """Return the accepted key in the headers of a call; None if the headers have no key, or an unknown one.

        Raises InvalidArgument if the headers have several keys.
        """
        presented = presented_key(headers)
        self._follow_file()
        # The duration of the search depends on hashes only, so it reveals nothing about the keys.
        digest = hashlib.sha256(presented or b"").digest()
        key = self._by_digest.get(digest)
        same = hmac.compare_digest(digest, _NO_DIGEST if key is None else key.digest)
        return key if presented and same else None

    def check(self, headers: Iterable[tuple[str | bytes, str | bytes]]) -> None:
        """Raise Unauthenticated if calls need a key and the headers of this call have no accepted key."""
        if self.find(headers) is None and self.required:
            raise no_valid_key()

    def _follow_file(self) -> None:
        if self._file is None or not self._watch.changed():
            return
        try:
            in_file = read_keys("api_key_file", self._file)
        except InvalidArgument as error:
            log.error("%s; the keys that were read before stay valid", error, extra=RECURRING)
        else:
            self._by_digest = self._indexed(in_file)
            log.info("read %d API keys from %s, which has changed", len(in_file), self._file)

    def _indexed(self, in_file: Iterable[ApiKey]) -> dict[bytes, ApiKey]:
        """Return all keys by digest; settings in the file override those from other sources."""
        return {key.digest: key for key in (*self._fixed, *in_file)}


def no_valid_key(kind: str = "API key") -> Unauthenticated:
    """Return the error for a call without an accepted key."""
    return Unauthenticated(f"the call carries no valid {kind}; send 'Authorization: Bearer <key>'")


def check_role(key: ApiKey, *roles: KeyRole) -> None:
    """Raise PermissionDenied unless the key has one of these roles."""
    if key.role not in roles:
        message = f"this needs a key of the role {' or '.join(roles)}; this key has the role {key.role}"
        raise PermissionDenied(message)


def digest_of(key: str) -> bytes:
    """Return the SHA-256 of a key. Long random keys cannot be guessed, so they need no slower hash."""
    return hashlib.sha256(key.encode()).digest()


def read_keys(option: str, file: Path) -> tuple[ApiKey, ...]:
    """Read the keys of a file.

    Raises InvalidArgument, which names `option`, if the file cannot be read, has no key, or has an error.
    """
    try:
        text = file.read_text()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise InvalidArgument(option, f"cannot read {file} ({reason})") from None
    try:
        keys = parse_keys(text)
    except TandemError as error:
        raise InvalidArgument(option, f"{file}: {error.message}") from None
    if not keys:
        raise InvalidArgument(option, f"{file} has no secret in it")
    return keys


def parse_keys(text: str) -> tuple[ApiKey, ...]:
    """Parse the text of a key file. Raises InvalidArgument for an error; it names the line, but never a key."""
    keys: list[ApiKey] = []
    for number, line in enumerate(text.splitlines(), 1):
        keys += _keys_of(f"line {number}", line.partition("#")[0].split())
    _check_distinct(keys)
    return tuple(keys)


def plain_keys(words: Iterable[str]) -> list[str]:
    """Return those words of a key file that are keys in plain text, without hashed keys and settings."""
    return [word for word in words if word.partition("=")[0] not in _SETTINGS and not word.startswith(_HASHED)]


def _keys_of(line: str, words: Sequence[str]) -> list[ApiKey]:
    keys: list[ApiKey] = []
    configured = False
    for word in words:
        setting, equals, value = word.partition("=")
        if not equals or setting not in _SETTINGS:
            _check_no_setting(line, word, after_settings=configured)
            keys.append(ApiKey(_digest(line, word)))
        elif keys:
            keys[-1] = replace(keys[-1], **{setting: _SETTINGS[setting](f"{line}: {setting}", value)})
            configured = True
        else:
            raise InvalidArgument(line, f"{setting}= has no key before it")
    return keys


def _check_no_setting(line: str, word: str, *, after_settings: bool) -> None:
    """Raise InvalidArgument if a word looks like a misspelled setting, which would otherwise become a guessable key.

    A `=` at the end of a word is allowed, because Base64 ends with it.
    """
    if "=" in word.rstrip("=") or not word.rstrip("=") or word in _SETTINGS:
        known = ", ".join(f"{name}=" for name in _SETTINGS)
        raise InvalidArgument(line, f"has a setting that is not one of {known}; give a key with = in it as its sha256:")
    if after_settings:
        raise InvalidArgument(line, "has a word after the settings; names have no blanks, and another key its own line")


def _digest(line: str, word: str) -> bytes:
    if not word.startswith(_HASHED):
        check_key(line, word)
        return digest_of(word)
    try:
        digest = bytes.fromhex(word.removeprefix(_HASHED))
    except ValueError:
        digest = b""
    if len(digest) != hashlib.sha256().digest_size:
        raise InvalidArgument(line, f"{_HASHED} is not followed by 64 hexadecimal digits")
    return digest


def _name(where: str, value: str) -> str:
    if not 0 < len(value) <= _NAME_CHARS or not value.isprintable():
        raise InvalidArgument(where, f"must have 1 to {_NAME_CHARS} printable characters")
    return value


def _role(where: str, value: str) -> KeyRole:
    try:
        return KeyRole(value)
    except ValueError:
        raise InvalidArgument(where, f"must be one of {', '.join(KeyRole)}") from None


def _quota(where: str, value: str) -> int:
    if not (value.isascii() and value.isdecimal() and 0 < int(value[:16]) <= _QUOTA_MAX):
        raise InvalidArgument(where, f"must be a whole number from 1 to {_QUOTA_MAX}")
    return int(value)


_SETTINGS: dict[str, Callable[[str, str], Any]] = {
    "name": _name,
    "role": _role,
    "requests_per_minute": _quota,
    "tokens_per_minute": _quota,
}


def _check_distinct(keys: Sequence[ApiKey]) -> None:
    by_digest: dict[bytes, ApiKey] = {}
    by_name: dict[str, ApiKey] = {}
    for key in keys:
        if by_digest.setdefault(key.digest, key) != key:
            raise InvalidArgument("keys", "one key is on two lines with different settings")
        if key.name and replace(by_name.setdefault(key.name, key), digest=key.digest) != key:
            raise InvalidArgument("keys", f"the keys of {key.name} differ in role or quotas, which they share")
