"""What is remembered of conversations: what the model read and wrote in each, its branches, where two differ."""
