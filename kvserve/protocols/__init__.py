"""Wire formats: JSON objects in, nouns out, and back. Pure functions without sockets, engine or tokenizer; only
`responses_store.py` keeps something: the responses that clients name again."""
