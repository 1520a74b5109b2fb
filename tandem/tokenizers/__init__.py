"""A model's tokens: tokenizers in every published format, and grammars over them. Routers and engines know it."""
