"""Conversion between text and tokens: tokenizer, chat templates, detokenizer, stop strings.

Workers know token ids only; text exists only in the router.
"""
