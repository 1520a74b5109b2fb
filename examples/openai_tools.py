"""Lets the model call a function, and answers from its result: `python examples/openai_tools.py [BASE_URL]`."""

import json
import os
import sys

from openai import OpenAI
from openai.types.chat import (
    ChatCompletionMessageFunctionToolCall,
    ChatCompletionMessageParam,
    ChatCompletionToolUnionParam,
)

BASE_URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
TOOLS: list[ChatCompletionToolUnionParam] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Returns the weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 20}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


def get_weather(city: str) -> str:
    """Returns the weather of a city; a real one would look it up."""
    return f"It is 18 degrees and sunny in {city}."


def main() -> None:
    """Prints the call, its result and the answer."""
    client = OpenAI(base_url=BASE_URL, api_key=os.environ.get("TANDEM_API_KEY", "unused"))
    model = client.models.list().data[0].id
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the weather in Paris?"}]

    # "required": the answer is exactly one call, which follows the schema. With "auto" the model may answer in text.
    asked = client.chat.completions.create(
        model=model, messages=messages, tools=TOOLS, tool_choice="required", temperature=0, max_tokens=100
    )
    (call,) = asked.choices[0].message.tool_calls or []
    if not isinstance(call, ChatCompletionMessageFunctionToolCall):
        raise SystemExit(f"the model called no function, but {call.type}")
    arguments = json.loads(call.function.arguments)
    result = get_weather(**arguments)
    print(f"call: {call.function.name}({arguments})")
    print(f"result: {result}")

    function = {"name": call.function.name, "arguments": call.function.arguments}
    messages.append({"role": "assistant", "tool_calls": [{"id": call.id, "type": "function", "function": function}]})  # type: ignore[typeddict-item]
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    answer = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=60)
    print(f"answer: {answer.choices[0].message.content}")


if __name__ == "__main__":
    main()
