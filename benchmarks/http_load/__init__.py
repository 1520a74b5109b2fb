"""Open-loop load over OpenAI's HTTP, the same against any server."""
