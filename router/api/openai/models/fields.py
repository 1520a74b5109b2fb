"""The types of request fields, with the bounds that the validator checks."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from router.requests.validation import INT32_MAX, SALT_MAX, SEED_MAX, TEMPERATURE_MAX
from tandem.protocol.messages import (
    FREQUENCY_MAX,
    LOGIT_BIAS_MAX,
    LOGIT_BIASES_MAX,
    LOGPROBS_MAX,
    PRESENCE_MAX,
    REPETITION_MAX,
    REPETITION_MIN,
)

Count = Annotated[int, Field(ge=1, le=INT32_MAX)]
"""A limit of tokens."""
Natural = Annotated[int, Field(ge=0)]
Priority = Annotated[int, Field(ge=-INT32_MAX - 1, le=INT32_MAX)]
Seed = Annotated[int, Field(ge=-1, le=SEED_MAX)]
Temperature = Annotated[float, Field(ge=0, le=TEMPERATURE_MAX)]
TopK = Annotated[int, Field(ge=-1, le=INT32_MAX)]
TopP = Annotated[float, Field(gt=0, le=1)]
MinP = Annotated[float, Field(ge=0, le=1)]
Frequency = Annotated[float, Field(ge=-FREQUENCY_MAX, le=FREQUENCY_MAX)]
Presence = Annotated[float, Field(ge=-PRESENCE_MAX, le=PRESENCE_MAX)]
Repetition = Annotated[float, Field(ge=REPETITION_MIN, le=REPETITION_MAX)]
Bias = Annotated[float, Field(ge=-LOGIT_BIAS_MAX, le=LOGIT_BIAS_MAX)]
Biases = Annotated[
    dict[str, Bias],
    Field(max_length=LOGIT_BIASES_MAX, json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,10}$"}}),
]
"""The numbers that are added to logits, by token id."""
Logprobs = Annotated[int, Field(ge=0, le=LOGPROBS_MAX)]
LastTokens = Annotated[int, Field(ge=1, le=INT32_MAX)] | Literal[-1]
Salt = Annotated[str, Field(max_length=SALT_MAX)]
Name = Annotated[str, Field(min_length=1)]
JsonSchema = dict[str, Any] | bool | str
