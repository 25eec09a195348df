"""Reads what a model writes: reasoning, content and tool calls out of text, and grammars that make it write them."""
