"""Sends a prompt with Tandem's Python client, over gRPC: `python examples/python_client.py [127.0.0.1:50051]`."""

import os
import sys

from tandem.client import Client

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
QUESTION = "Name the capital of France."


def main() -> None:
    """Prints an answer whole, and as it comes."""
    with Client(ADDRESS, api_key=os.environ.get("TANDEM_API_KEY", "")) as client:
        answer = client.chat(QUESTION, max_tokens=40, temperature=0)
        print("whole:", answer.text)
        print("streamed: ", end="")
        with client.stream_chat(QUESTION, max_tokens=40, temperature=0) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
