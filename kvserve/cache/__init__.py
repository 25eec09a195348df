"""The prefix cache: which KV is stored, how it is found again and what is evicted; it never sees an array."""
