"""A Redis server that several kvserve servers share: its address, a connection, what it was measured to give. It knows
keys and bytes, neither KV nor words."""
