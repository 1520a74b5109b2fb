"""The schemas are the contract: every message, field and method in them has a comment."""

import re
from pathlib import Path

import pytest

from tandem.protocol.generate import PROTO

NAMED = re.compile(r"\s*(?:message|enum|service|rpc) \w+|\s+(?:optional |repeated )?(?:map<[^>]+>|[\w.]+) \w+ = \d+;")
OF_A_METHOD = re.compile(r"message \w+(Request|Response) ")
"""Request and response messages, which the comment of their method describes."""


@pytest.mark.parametrize("schema", sorted(PROTO.rglob("*.proto")), ids=lambda path: path.stem)
def test_each_service_method_message_and_field_has_a_comment(schema: Path) -> None:
    lines = schema.read_text().splitlines()
    silent = [
        f"{schema.name}:{number}: {line.strip()}"
        for number, line in enumerate(lines, 1)
        if NAMED.match(line)
        and not OF_A_METHOD.match(line)
        and "//" not in line
        and not lines[number - 2].lstrip().startswith("//")
    ]
    assert not silent, "\n".join(silent)
