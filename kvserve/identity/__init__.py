"""Recognises the conversation that a turn continues, and gives its messages as the model is to see them; joins
`canonical/` and `sessions/`.

    owner       whose records a request finds and adds to: a principal's and, in it, a session's
    recognise   every message's identity -> the deepest point that the model has read or written -> up to where the
                request shows that this client was there, each message as the model saw it
    remember    afterwards: what the model read and wrote

These messages are only rendered: which KV is reused is decided later, by the model's own tokens.
"""
