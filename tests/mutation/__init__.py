"""Faults planted in a copy of the package, to see whether the tests notice them: `python -m tests.mutation`."""
