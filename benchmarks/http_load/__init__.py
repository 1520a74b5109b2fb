"""Open-loop load over OpenAI's HTTP API, the same for any server."""
