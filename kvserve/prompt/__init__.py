"""Turns conversations into model tokens: tokenizer, chat template, and forms for what the template refuses or drops."""
