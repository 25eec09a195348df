"""How much of bare MLX's speed arrives over HTTP: `python -m benchmarks` prints one table of ratios with their bounds.

Every benchmark is one small file with a `run`; what they share is a server process, a light client and bare mlx-lm.
"""
