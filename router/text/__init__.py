"""Conversion between text and tokens: tokenizer, chat templates, detokenizer, stop strings."""
