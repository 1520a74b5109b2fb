"""Checks of a router's key file and certificate, for `tandem doctor`.

The module imports gRPC, so `tandem doctor` imports it only when it runs.
"""

import stat
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tandem.cli.diagnosis.checks import Check, Level
from tandem.net.security.api_keys import KeyRole, read_keys
from tandem.net.security.server_tls import load, tls_files
from tandem.protocol.errors import InvalidArgument

_SOON = timedelta(days=14)


def check_key_file(file: str) -> list[Check]:
    """Check a router's file of API keys; without a file (""), return no checks."""
    if not file:
        return []
    try:
        keys = read_keys("--api-key-file", Path(file))
        mode = Path(file).stat().st_mode
    except (InvalidArgument, OSError) as error:
        return [Check("API keys", Level.FAIL, str(error), "correct the file; `tandem up` would not start with it")]
    roles = Counter(key.role for key in keys)
    finding = ", ".join(f"{roles[role]} of role {role}" for role in KeyRole if roles[role])
    if mode & stat.S_IROTH:
        return [Check("API keys", Level.WARN, f"every user of this host may read {file}", f"chmod o-r {file}")]
    return [Check("API keys", Level.OK, finding)]


def check_certificate(certificate: str, key: str, client_ca: str, now: datetime | None = None) -> list[Check]:
    """Check the files of a router's TLS certificate, and that it does not expire soon after `now`.

    The default of `now` is the present. Without files (""), return no checks.
    """
    try:
        files = tls_files(certificate, key, client_ca)
        if files is None:
            return []
        ends = load(files).expires
    except InvalidArgument as error:
        advice = "correct the file; `tandem up` would not start with it"
        return [Check("certificate", Level.FAIL, error.message, advice)]
    finding = f"valid until {ends:%Y-%m-%d %H:%M} UTC"
    if ends - (now or datetime.now(UTC)) < _SOON:
        advice = "renew it; a running router reads the new one from the same files"
        return [Check("certificate", Level.WARN, finding, advice)]
    return [Check("certificate", Level.OK, finding)]
