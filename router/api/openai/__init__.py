"""OpenAI's chat completions, completions and Responses API, with the extensions of vLLM and SGLang."""
