"""One file per written form of a tool call; each knows its own tags and nothing of the stream around them."""
