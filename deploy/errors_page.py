"""Writes docs/errors.md, every error message of the commands and the APIs: `python -m deploy.errors_page`.

The messages are those that the source creates typed errors with; "…" stands for a part that only a run knows.
"""

from __future__ import annotations

import ast
import html
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from router.refusal import Refused
from tandem.cli.connection.router import COMMANDS
from tandem.cli.plain_errors import exit_code, in_options
from tandem.client.connection import PYTHON
from tandem.protocol import errors
from tandem.protocol.errors import ContextLengthExceeded, InvalidArgument, TandemError, Unauthenticated, Unavailable

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "errors.md"
PACKAGES = ("tandem", "router", "prefill_worker", "decode_worker", "kv_transfer")
UNKNOWN = "…"
_HEAD = """# Errors

Every message of the commands and of the APIs, by the code of the error, with "…" for the parts that depend on the \
case. A message says what is wrong and what to do; what is true of all errors of a code is said first. To find a \
message, search for the words between the names and numbers in it, in quotes. HTTP responses have the code, in lower \
case, in `error.code` and the message in `error.message`; gRPC calls have them in the trailing metadata \
`tandem-error-code` and in the details; commands print the message after `error:` and end with the exit code. What is \
slow or unclear without an error is in [Troubleshooting](operations/troubleshooting.md). This page is made of the \
source by `python -m deploy.errors_page`.
"""
REMEDIES: dict[str, str] = {
    "INVALID_ARGUMENT": "The message begins with the field, option or setting that is wrong. Correct it; the same "
    "request fails again.",
    "CONTEXT_LENGTH_EXCEEDED": "Shorten the prompt or the conversation, or lower `max_tokens`; `--max-model-len` and "
    "the memory for KV pages (`--kv-cache-gib`, `--memory-fraction`) limit what a cluster takes.",
    "UNAUTHENTICATED": "Send `Authorization: Bearer <key>` with a key of the cluster, or give the command `--api-key` "
    "or `--api-key-file`; between the parts of a cluster, give all of them the same `--token-file`. "
    "[Security](security.md) has the keys.",
    "PERMISSION_DENIED": "The key is valid; use one whose role allows the call ([Security](security.md)).",
    "NOT_FOUND": "Name something that exists: `GET /v1/models` lists models and adapters, `tandem status` workers.",
    "DEADLINE_EXCEEDED": "Try again with more time, and look for the cause with `tandem trace` and `tandem why`.",
    "RESOURCE_EXHAUSTED": "Wait for `Retry-After` and try again. If it recurs, the load is more than the cluster can "
    "serve within its targets: `tandem why` names what limits it, [Scale](operations/scale.md) what to add.",
    "RATE_LIMIT_EXCEEDED": "Wait for `Retry-After`; the quota of the key is in the key file ([Security](security.md)).",
    "UNAVAILABLE": "Try again in a moment: something is starting, restarting or unreachable. If it stays, `tandem "
    "status` names what does not serve and why, and `tandem logs` has the reason.",
    "ROLE_CLOSED": "Routers handle it by themselves: they send the request to another worker.",
    "CANCELLED": "The client or its router ended the request; nothing is to be done.",
    "FAILED_PRECONDITION": "Change the state that the message names, or start parts of one version, model and dtype.",
    "STALE_EPOCH": "Parts of a cluster handle it by themselves: the message belongs to something that has ended.",
    "TRANSFER_FAILED": "Routers compute the prompt again elsewhere. If it recurs, `tandem doctor` checks the "
    "transports between hosts.",
    "MODEL_ERROR": "The message names the file and what is wrong with it. [Models](models.md) lists what can be "
    "served; download the file again if it is damaged.",
    "NON_FINITE_LOGITS": "Only this request fails. Change it, or look for a defect in the weights or the adapter.",
    "INTERNAL": "A defect of Tandem, or of something below it: only this request fails. Please report it with the "
    "lines of `tandem logs` about the request.",
}
"""The remedy of each error code, as the page states it."""
AREAS = {
    "Commands and settings": ("tandem/cli", "tandem/settings", "tandem/capacity", "tandem/cost_model"),
    "Requests": ("router", "tandem/tokenizers", "tandem/client", "tandem/protocol"),
    "Models, weights and adapters": ("tandem/engine",),
}  # fmt: skip
"""The headings under which messages are listed, by the folders that create them."""
REST = "The cluster and its parts"
_PLACE = re.compile(r"\{\w+\}")
"""A place of `str.format`."""
_SPECIAL = re.compile(r"([\\`*_\[\]()|#~])")
_CLASSES = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, TandemError)
}
_CREATORS: dict[str, type[TandemError]] = {
    **_CLASSES,
    "Refused": Refused,
    "BadParameter": InvalidArgument,
    "refuse": InvalidArgument,
}
"""The error that a call of each name creates."""
_WORDINGS: dict[str, type[TandemError]] = {
    "no_key": Unauthenticated, "wrong_key": Unauthenticated, "unreachable": Unavailable, "lost": Unavailable
}  # fmt: skip
"""The errors that clients create with each text of a `Wording`."""


def page() -> str:
    """Return the page as Markdown."""
    found = messages()
    codes = dict.fromkeys(kind.code for kind in _CLASSES.values() if kind is not TandemError)
    return "\n".join([_HEAD, *(_section(code, found) for code in codes)])


def messages() -> dict[tuple[str, str], set[str]]:
    """Return all messages by code and area."""
    found: dict[tuple[str, str], set[str]] = {}
    for field, kind in _WORDINGS.items():
        texts = {_PLACE.sub(UNKNOWN, getattr(wording, field)) for wording in (PYTHON, COMMANDS)}
        found.setdefault((kind.code, "Requests"), set()).update(texts)
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            path = file.relative_to(ROOT).as_posix()
            if "/generated/" not in path:
                area = next((name for name, folders in AREAS.items() if path.startswith(folders)), REST)
                for code, text in _messages_of(ast.parse(file.read_text(encoding="utf-8"))):
                    found.setdefault((code, area), set()).add(text)
    return found


def pattern(message: str) -> re.Pattern[str]:
    """Return a pattern that matches what a run makes of a listed message."""
    return re.compile(".*".join(re.escape(part) for part in message.split(UNKNOWN)), re.DOTALL)


def _section(code: str, found: dict[tuple[str, str], set[str]]) -> str:
    kind = next(one for one in _CLASSES.values() if one.code == code and one is not TandemError)
    example = kind("", "") if issubclass(kind, InvalidArgument) else kind("")
    lines = [
        f"## {code}",
        "",
        f"{(kind.__doc__ or '').strip().splitlines()[0]} HTTP {kind.http_status}, gRPC {kind.grpc_status.name}, exit "
        f"code {exit_code(example)}.",
        "",
        REMEDIES[code],
        "",
    ]
    for area in (*AREAS, REST):
        if texts := found.get((code, area)):
            lines += [f"### {code}: {area.lower()}", "", *(f"- {_escaped(text)}" for text in sorted(texts)), ""]
    return "\n".join(lines)


def _escaped(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", html.escape(text, quote=False))


def _messages_of(module: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the code and the text of each message that a module creates an error with."""
    scopes = [module, *(node for node in ast.walk(module) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))]
    for scope in scopes:
        known = {**_assigned(module), **_assigned(scope)}
        for call in _calls_in(scope):
            for kind, form, parts in _forms(call):
                for texts in product(*(_texts(part, known) for part in parts)):
                    text = in_options(" ".join(form.format(*texts).split()))
                    text = re.sub(f"{UNKNOWN}[{UNKNOWN} ]*{UNKNOWN}", UNKNOWN, text)
                    if re.search(r"\w", text):
                        yield kind.code, text


def _forms(call: ast.Call) -> Iterator[tuple[type[TandemError], str, list[ast.expr]]]:
    """Yield each error that a call creates: its class, and the form and the parts of its message."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if name == "BadParameter":
        yield InvalidArgument, "Invalid value for {}: {}", [given["param_hint"], call.args[0]]
    elif name in _CREATORS and call.args:
        kind = _CREATORS[name]
        if issubclass(kind, ContextLengthExceeded | Refused):
            yield kind, "{}", call.args[1:2]
        elif issubclass(kind, InvalidArgument):
            yield kind, "{}: {}", call.args[:2]
        else:
            yield kind, "{}", call.args[:1]


def _calls_in(scope: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls in a scope, without those in functions inside it."""
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(child, ast.Call):
            yield child
        yield from _calls_in(child)


def _assigned(scope: ast.AST) -> dict[str, list[ast.expr]]:
    """Return the expressions that are assigned to each name in a scope."""
    values: dict[str, list[ast.expr]] = {}
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            values.setdefault(node.targets[0].id, []).append(node.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            values.setdefault(node.target.id, []).append(node.value)
    return values


def _texts(node: ast.expr, known: dict[str, list[ast.expr]]) -> list[str]:
    """Return the texts that an expression may have, with `UNKNOWN` for what only a run knows."""
    texts = [UNKNOWN]
    match node:
        case ast.Constant(value=str(text)):
            texts = [_PLACE.sub(UNKNOWN, text)]
        case ast.JoinedStr():
            texts = ["".join(parts) for parts in product(*(_texts(part, known) for part in node.values))]
        case ast.FormattedValue(value=value, conversion=-1):
            texts = _texts(value, known)
        case ast.BinOp(op=ast.Add()):
            texts = ["".join(parts) for parts in product(_texts(node.left, known), _texts(node.right, known))]
        case ast.IfExp():
            texts = [*_texts(node.body, known), *_texts(node.orelse, known)]
        case ast.Name(id=name) if name in known:
            others = {other: values for other, values in known.items() if other != name}
            texts = [text for value in known[name] for text in _texts(value, others)]
    return texts


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
