"""The syntaxes of models' answers: reasoning, content and tool calls are parsed while the text is generated."""
