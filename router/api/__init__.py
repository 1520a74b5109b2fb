"""The router's listeners for clients: gRPC, OpenAI's and Anthropic's APIs over HTTP, probes and metrics."""
