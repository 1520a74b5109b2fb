"""The router's listeners for clients: the gRPC API, OpenAI's and Anthropic's APIs over HTTP, probes and metrics."""
