"""kvserve: a local inference server whose promise is that no token is prefilled twice."""

__version__ = "0.1.0"
