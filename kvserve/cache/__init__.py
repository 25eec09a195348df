"""The prefix cache: which KV is kept, how it is found again and what leaves; it never sees an array."""
