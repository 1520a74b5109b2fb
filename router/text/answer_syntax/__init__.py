"""The syntax of models' answers: reasoning, content and tool calls, parsed while the text is generated."""
