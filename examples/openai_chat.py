"""Requests a chat answer, whole and streamed: `python examples/openai_chat.py [http://127.0.0.1:8000/v1]`."""

import os
import sys

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

BASE_URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Name the capital of France."}]


def main() -> None:
    """Prints both answers."""
    client = OpenAI(base_url=BASE_URL, api_key=os.environ.get("TANDEM_API_KEY", "unused"))
    model = client.models.list().data[0].id

    answer = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=40)
    print("whole:", answer.choices[0].message.content)
    if answer.usage is not None:
        print(f"tokens: {answer.usage.prompt_tokens} and {answer.usage.completion_tokens}")

    print("streamed: ", end="")
    for chunk in client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=40, stream=True
    ):
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
