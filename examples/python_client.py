"""Asks with Tandem's own Python client, over gRPC: `python examples/python_client.py [127.0.0.1:50051]`."""

import sys

from tandem.client import Client

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
QUESTION = "What is the capital of France?"


def main() -> None:
    """Prints an answer whole, and as it comes."""
    with Client(ADDRESS) as client:
        answer = client.chat(QUESTION, max_tokens=40, temperature=0)
        print("whole:", answer.text)
        print("streamed: ", end="")
        with client.stream_chat(QUESTION, max_tokens=40, temperature=0) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
