"""The sampling and placement fields that every HTTP API has: fields of vLLM, and Tandem's own fields.

The bounds in their types only document the fields in the OpenAPI page. The validator checks the values, so that gRPC
requests are checked as well.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from router.api.body import Body, list_of
from router.requests.request import Options
from router.requests.validation import SALT_MAX
from tandem.protocol.messages import (
    FREQUENCY_MAX,
    INT32_MAX,
    LOGPROBS_MAX,
    PRESENCE_MAX,
    REPETITION_MAX,
    REPETITION_MIN,
    SEED_MAX,
    TEMPERATURE_MAX,
)


def bounded(low: float | None = None, high: float | None = None, **more: Any) -> Any:
    """Return pydantic metadata that adds bounds to the schema of a type without checking them."""
    bounds = {"minimum": low, "maximum": high, **more}
    return Field(json_schema_extra={name: value for name, value in bounds.items() if value is not None})


Count = Annotated[int, bounded(1, INT32_MAX)]
"""The type of a field that limits the number of tokens."""
Natural = Annotated[int, bounded(0)]
Logprobs = Annotated[int, bounded(0, LOGPROBS_MAX)]
Temperature = Annotated[float, bounded(0, TEMPERATURE_MAX)]
Frequency = Annotated[float, bounded(-FREQUENCY_MAX, FREQUENCY_MAX)]
Presence = Annotated[float, bounded(-PRESENCE_MAX, PRESENCE_MAX)]
Repetition = Annotated[float, bounded(REPETITION_MIN, REPETITION_MAX)]
Name = Annotated[str, Field(min_length=1)]
TokenIds = Annotated[list[Natural], list_of(int, "must be a list of integers")]
TemplateVariables = Annotated[dict[str, Any], Field(description="Variables for the model's chat template.")]


def _without_default(schema: dict[str, Any]) -> None:
    del schema["default"]


INCOMPLETE: Any = Field({}, validate_default=True, json_schema_extra=_without_default)
"""The default of an object that a body must have: {}, whose validation reports the object's first required field.

The model must list the object in `required`, because a field with a default is optional in the schema.
"""


def required(*fields: str) -> Any:
    """Return a schema extension that lists `fields` as required."""
    return {"required": [*fields]}


class Sampling(Body):
    """The options of sampling and placement."""

    temperature: Temperature | None = None
    top_p: Annotated[float, bounded(high=1, exclusiveMinimum=0)] | None = None
    top_k: Annotated[int, bounded(-1, INT32_MAX)] | None = Field(None, description="0 and -1: any token.")
    min_p: Annotated[float, bounded(0, 1)] | None = None
    frequency_penalty: Frequency | None = None
    presence_penalty: Presence | None = None
    repetition_penalty: Repetition | None = None
    seed: Annotated[int, bounded(-1, SEED_MAX)] | None = Field(None, description="-1: a random one.")
    stop_token_ids: TokenIds | None = None
    min_tokens: Natural | None = None
    ignore_eos: bool | None = None
    speculate: bool | None = Field(None, description="False: no speculative decoding. The tokens are the same.")
    priority: Annotated[int, bounded(-INT32_MAX - 1, INT32_MAX)] | None = Field(
        None, description="Lower values are served first."
    )
    slo_class: str | None = Field(None, description="The service class, by name.")
    cache_salt: Annotated[str, bounded(maxLength=SALT_MAX)] | None = Field(
        None, description="Cached KV is reused only between requests of the same salt."
    )

    def options(self, **given: Any) -> Options:
        """Return the options of a request; `given` has the options that are not defined here, such as `max_tokens`."""
        return Options(
            temperature=self.temperature,
            top_p=self.top_p,
            # vLLM's clients send -1 for a disabled filter and for a random seed.
            top_k=0 if self.top_k == -1 else self.top_k,
            min_p=self.min_p,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            seed=None if self.seed == -1 else self.seed,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            min_tokens=self.min_tokens or 0,
            ignore_eos=bool(self.ignore_eos),
            speculate=self.speculate is not False,
            priority=self.priority or 0,
            slo_class=self.slo_class or "",
            cache_salt=self.cache_salt or "",
            **given,
        )
