"""Splits a model's text into reasoning, content and tool calls, and makes grammars that force their form."""
