"""The engine room: everything that touches an `mx.array`, on the one thread that owns the model."""
