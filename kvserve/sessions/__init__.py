"""What is remembered of conversations: what the model read and wrote in each, and its branches."""
