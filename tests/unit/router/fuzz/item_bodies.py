"""Bodies of the Responses and the Messages API, in which some fields have arbitrary values."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.unit.router.fuzz.json_bodies import SCALARS, TEXTS, VALUES

_TOOL_TEXTS = st.sampled_from(["{}", '{"a": 1}', "[", "", "1" * 5000])
_ROLES = st.sampled_from(["user", "assistant", "system", "developer", "tool", ""])


def _objects(required: dict[str, st.SearchStrategy[Any]], **others: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Returns objects with mostly all of the `required` fields, and others of them or arbitrary values."""
    plain = st.fixed_dictionaries(required, optional=others)
    return plain | st.fixed_dictionaries({}, optional={**required, **others}) | VALUES


def _typed(kind: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return _objects({"type": st.just(kind), **fields}, id=SCALARS, status=SCALARS)


_PART = st.sampled_from(["input_text", "output_text", "text"]).flatmap(lambda kind: _typed(kind, text=TEXTS))
_CONTENT = TEXTS | st.lists(_PART | _typed("refusal", refusal=TEXTS), max_size=3)
_ITEM = st.one_of(
    _objects({"role": _ROLES, "content": _CONTENT}),
    _typed("message", role=_ROLES, content=_CONTENT),
    _typed("function_call", call_id=TEXTS, name=TEXTS, arguments=_TOOL_TEXTS | TEXTS),
    _typed("function_call_output", call_id=TEXTS, output=_CONTENT),
    _typed("reasoning", summary=VALUES, content=st.lists(_typed("reasoning_text", text=TEXTS), max_size=2)),
)
_RESPONSE_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "instructions": TEXTS,
    "tools": st.lists(_typed("function", name=TEXTS, parameters=VALUES), max_size=2),
    "tool_choice": st.sampled_from(["none", "auto", "required", {"type": "function", "name": "f"}]),
    "text": _objects({"format": _objects({"type": st.sampled_from(["text", "json_object", "json_schema"])})}),
    "reasoning": _objects({"effort": TEXTS}),
    "metadata": st.dictionaries(TEXTS, SCALARS, max_size=2),
    "temperature": st.floats(0, 2),
    "include": st.lists(TEXTS, max_size=2),
    "store": st.booleans(),
}
_RESULT = TEXTS | st.lists(_typed("text", text=TEXTS), max_size=2)
_BLOCK = st.one_of(
    _typed("text", text=TEXTS),
    _typed("thinking", thinking=TEXTS),
    _typed("redacted_thinking", data=TEXTS),
    _typed("tool_use", name=TEXTS, input=st.dictionaries(TEXTS, VALUES, max_size=2)),
    _typed("tool_result", tool_use_id=TEXTS, content=_RESULT),
)
_MESSAGE = _objects({"role": _ROLES, "content": TEXTS | st.lists(_BLOCK, max_size=3)})
_MESSAGE_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "system": _RESULT,
    "tools": st.lists(_objects({"name": TEXTS, "input_schema": VALUES}), max_size=2),
    "tool_choice": _objects({"type": st.sampled_from(["auto", "any", "tool", "none"])}, name=TEXTS),
    "thinking": _objects({"type": st.sampled_from(["enabled", "disabled", "adaptive"])}),
    "output_config": _objects({"effort": TEXTS}),
    "stop_sequences": st.lists(TEXTS, max_size=2),
    "temperature": st.floats(0, 1),
    "metadata": VALUES,
}


@st.composite
def _bodies(
    draw: st.DrawFn, given: dict[str, st.SearchStrategy[Any]], fields: dict[str, st.SearchStrategy[Any]]
) -> dict[str, Any]:
    body = {name: draw(value) for name, value in given.items()}
    for name in draw(st.lists(st.sampled_from(sorted(fields)), max_size=3, unique=True)):
        body[name] = draw(fields[name])
    for name in draw(st.lists(st.sampled_from([*fields, *given]) | TEXTS, max_size=2, unique=True)):
        body[name] = draw(VALUES)
    return body


RESPONSES = _bodies(
    {"input": TEXTS | st.lists(_ITEM, max_size=4), "max_output_tokens": st.integers(1, 4), "stream": st.booleans()},
    _RESPONSE_FIELDS,
)
MESSAGES = _bodies(
    {
        "messages": st.just([{"role": "user", "content": "Hi"}]) | st.lists(_MESSAGE, max_size=4),
        "max_tokens": st.integers(1, 4),
        "stream": st.booleans(),
    },
    _MESSAGE_FIELDS,
)
