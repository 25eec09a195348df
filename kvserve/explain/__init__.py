"""Why a request reused as much of its prompt as it did: it is compared with what the model has read before. It renders
nothing and remembers raw prompts only."""
