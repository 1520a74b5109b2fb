"""The router's listeners for clients: gRPC, OpenAI-compatible HTTP, probes and metrics."""
