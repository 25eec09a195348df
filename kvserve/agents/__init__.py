"""Agents whose history the server keeps: their data, the store of their turns, and the turns that a prompt shows."""
