"""Text and tokens: tokenizing, chat templates, detokenizing, stop strings."""
