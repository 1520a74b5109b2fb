"""Streams an answer by gRPC: `python examples/grpc_generate.py [127.0.0.1:50051]`.

It uses the stubs of Tandem's own package; other languages generate theirs from `proto/tandem/v1`.
"""

import os
import sys

import grpc

from tandem.protocol.generated.tandem.v1 import inference_pb2, inference_pb2_grpc, types_pb2

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"


API_KEY = os.environ.get("TANDEM_API_KEY", "")


def main() -> None:
    """Prints the answer as it comes, and then the times of its phases."""
    request = inference_pb2.ChatRequest(
        messages=[inference_pb2.ChatMessage(role="user", content="Name the capital of France.")],
        options=inference_pb2.GenerationOptions(max_tokens=40, temperature=0),
    )
    metadata = [("authorization", f"Bearer {API_KEY}")] if API_KEY else []
    with grpc.insecure_channel(ADDRESS) as channel:
        for reply in inference_pb2_grpc.InferenceStub(channel).Chat(request, metadata=metadata):
            if reply.HasField("chunk"):
                print(reply.chunk.text, end="", flush=True)
            else:
                done = reply.complete
    print(f"\ntokens: {done.prompt_tokens} and {done.completion_tokens}")
    print(f"prefill on {done.timeline.prefill_worker}, decode on {done.timeline.decode_worker}")
    stamps = done.timeline.event_times
    for stamp in stamps:
        event = types_pb2.LifecycleEvent.Name(stamp.event)
        print(f"{(stamp.unix_nanos - stamps[0].unix_nanos) / 1e6:8.1f} ms  {event}")


if __name__ == "__main__":
    main()
