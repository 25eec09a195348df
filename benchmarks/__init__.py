"""How much of bare MLX's speed arrives over HTTP, and what the prefix cache costs and saves: `python -m benchmarks`
prints one table of figures with their bounds.

Every benchmark is one small file with a `run`; what they share is a server process, a light client and bare mlx-lm.
"""
