"""Text and model tokens: tokenizer, chat template, and what the template would refuse or drop rendered all the same."""
