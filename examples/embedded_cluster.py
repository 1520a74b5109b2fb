"""Starts a cluster from Python, sends it a prompt and stops it: `python examples/embedded_cluster.py [MODEL]`.

MODEL is a folder in Hugging Face layout or a GGUF file; without it the small model of `make run` is served.
"""

import sys
from pathlib import Path

from tandem.cli.models.default_model import find_default_model
from tandem.client import Client
from tandem.cluster.launcher import Cluster
from tandem.engine.weights.gguf import prepare_model
from tandem.settings.cluster import ClusterSettings


def main() -> None:
    """Prints the answer."""
    model = prepare_model(Path(sys.argv[1]) if len(sys.argv) > 1 else find_default_model())
    cluster = Cluster.start(ClusterSettings.of(model, grpc_port=0, http_port=0))
    try:
        with Client(cluster.endpoints.grpc) as client:
            stream = client.stream_chat("Name the capital of France.", max_tokens=40, temperature=0)
            for chunk in stream:
                print(chunk.text, end="", flush=True)
            answer = stream.answer()
        print(f"\ntokens: {answer.prompt_tokens} and {answer.completion_tokens}")
    finally:
        cluster.stop()


if __name__ == "__main__":
    main()
