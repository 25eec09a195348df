"""Agents whose history the server keeps: what they are, where their turns lie, how much of them a prompt shows."""
