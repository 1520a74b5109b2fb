"""Tokenizers in every published format, and grammars over their tokens; used by routers and engines."""
