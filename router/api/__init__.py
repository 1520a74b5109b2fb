"""What clients speak: gRPC, OpenAI's HTTP, probes and metrics, at the ports where the router listens."""
