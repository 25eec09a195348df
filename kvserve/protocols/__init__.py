"""Wire formats: JSON objects in, nouns out, and back. Pure functions without sockets, engine or tokenizer."""
