"""OpenAI's Responses API, without storage: POST /v1/responses."""
