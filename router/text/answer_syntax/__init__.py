"""The parsers of models' answers, which find reasoning, content and tool calls while the text is generated."""
