"""The LiteLLM proxy in front of the server: its child process, and what that process runs around LiteLLM."""
