"""Requests an answer that follows a JSON schema: `python examples/openai_structured_output.py [BASE_URL]`."""

import json
import os
import sys

from openai import OpenAI

BASE_URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 30},
        "population_millions": {"type": "integer", "minimum": 0, "maximum": 99},
        "continent": {"enum": ["Africa", "America", "Asia", "Australia", "Europe"]},
    },
    "required": ["city", "population_millions", "continent"],
    "additionalProperties": False,
}


def main() -> None:
    """Prints the object's fields."""
    client = OpenAI(base_url=BASE_URL, api_key=os.environ.get("TANDEM_API_KEY", "unused"))
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "Describe the capital of France as JSON."}],
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}},
        temperature=0,
        max_tokens=120,
    )
    for name, value in json.loads(answer.choices[0].message.content or "").items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
