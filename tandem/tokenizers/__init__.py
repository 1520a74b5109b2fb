"""A model's tokens, for routers and engines: tokenizers in every published format, and grammars over tokens."""
