"""The prompts of a text completion: one prompt or several, each a string or a list of token ids."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PlainValidator

from router.api.fields import Natural
from tandem.protocol.errors import InvalidArgument

Prompt = str | tuple[int, ...]
PROMPTS_MAX = 128
"""Maximum number of answers to a call with several prompts, and therefore also of its prompts."""


def check_prompts(count: int) -> None:
    """Raise InvalidArgument if a call has no prompt or too many."""
    if not count:
        raise InvalidArgument("prompt", "is missing; send at least one prompt")
    if count > PROMPTS_MAX:
        raise InvalidArgument("prompt", f"has {count} prompts, the limit is {PROMPTS_MAX}; send others separately")


def check_answers(prompts: int, answers: int) -> None:
    """Raise InvalidArgument if a call with several prompts, each with `answers` answers, has too many answers."""
    if prompts > 1 and prompts * answers > PROMPTS_MAX:
        raise InvalidArgument(
            "prompt", f"{prompts} prompts with {answers} answers each are more than {PROMPTS_MAX}; send fewer prompts"
        )


def _prompts(value: Any) -> tuple[Prompt, ...]:
    if isinstance(value, str):
        return (value,)
    if _is_ids(value):
        return (tuple(value),)
    if not isinstance(value, list) or not value:
        raise InvalidArgument("prompt", "is missing; send a string, a list of token ids, or a list of such prompts")
    check_prompts(len(value))
    if not all(isinstance(prompt, str) or _is_ids(prompt) for prompt in value):
        raise InvalidArgument("prompt", "must be a string, a list of token ids, or a list of such prompts")
    return tuple(prompt if isinstance(prompt, str) else tuple(prompt) for prompt in value)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


_Text = Annotated[str, Field(min_length=1)]
_Ids = Annotated[list[Natural], Field(min_length=1)]
_Several = Annotated[list[_Text | _Ids], Field(min_length=1, max_length=PROMPTS_MAX)]
Prompts = Annotated[tuple[Prompt, ...], PlainValidator(_prompts, json_schema_input_type=_Text | _Ids | _Several)]
"""The type of the prompts of a body; its validator raises InvalidArgument for an invalid prompt.

A list of token ids may have hundreds of thousands of entries. It is checked by Python code, not by pydantic's, so that
other threads can run during the check.
"""
