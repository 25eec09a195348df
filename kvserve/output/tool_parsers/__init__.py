"""Reads tool calls, with one file per written form; each file knows its own tags, not the stream around them."""
