"""Parses the fields of text completions: one or several prompts, and `logit_bias`, which chat completions have, too."""

from typing import Any

from router.api.json_fields import JsonFields, is_integers
from router.requests.request import Prompt
from tandem.protocol.errors import InvalidArgument, shown

PROMPTS_MAX = 128
"""Most answers to a call with several prompts, and so most prompts."""


def take_prompts(fields: JsonFields) -> tuple[Prompt, ...]:
    """Take one prompt or several, each a string or a list of token ids."""
    value = fields.take("prompt")
    if isinstance(value, str):
        return (value,)
    if is_integers(value) and value:
        return (tuple(value),)
    if not isinstance(value, list) or not value:
        raise InvalidArgument("prompt", "is missing; send a string, a list of token ids, or a list of such prompts")
    check_prompts(len(value))
    if not all(isinstance(each, str) or (is_integers(each) and each) for each in value):
        raise InvalidArgument("prompt", "must be a string, a list of token ids, or a list of such prompts")
    return tuple(each if isinstance(each, str) else tuple(each) for each in value)


def check_prompts(count: int) -> None:
    """Raise InvalidArgument if a call has no prompt or too many."""
    if not count:
        raise InvalidArgument("prompt", "is missing; send at least one prompt")
    if count > PROMPTS_MAX:
        raise InvalidArgument("prompt", f"has {count} prompts, the limit is {PROMPTS_MAX}; send others separately")


def check_answers(prompts: int, answers: int) -> None:
    """Raise InvalidArgument if several prompts with so many answers each have more answers than one call may."""
    if prompts > 1 and prompts * answers > PROMPTS_MAX:
        raise InvalidArgument(
            "prompt", f"{prompts} prompts with {answers} answers each are more than {PROMPTS_MAX}; send fewer prompts"
        )


def take_bias(fields: JsonFields) -> tuple[tuple[int, float], ...]:
    """Take `logit_bias`, an object from token ids to numbers."""
    return tuple((_token_id(name), _bias(name, value)) for name, value in fields.object("logit_bias").items())


def _token_id(name: str) -> int:
    if not (name.isascii() and name.isdecimal() and len(name) <= len(str(1 << 32))):
        raise InvalidArgument("logit_bias", f"{shown(name)} is no token id")
    return int(name)


def _bias(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidArgument(f"logit_bias.{name}", "must be a number")
    try:
        return float(value)
    except OverflowError:
        raise InvalidArgument(f"logit_bias.{name}", "is too large for a number") from None
