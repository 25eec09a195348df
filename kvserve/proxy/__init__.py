"""The LiteLLM proxy in front of the server: its child process, and the code around LiteLLM in that process."""
