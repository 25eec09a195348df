"""A request from its turn to its end: which prompt it has, its events as they come, what is kept of it and what is
told. It joins rooms, and knows no wire format and no array."""
