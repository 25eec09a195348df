"""The HTTP front: sockets, status lines, limits and the table of endpoints. It knows no model and no tokens."""
