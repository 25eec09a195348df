"""Decides which turn a request continues, by messages without ids, clocks and telemetry, and what the model reads."""
