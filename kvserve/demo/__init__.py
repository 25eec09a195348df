"""The embedded demo model: tiny real models of every family, built locally from a seed, never downloaded.

The door is `kvserve.demo.build.build_model`; importing this package alone loads nothing heavy.
"""
