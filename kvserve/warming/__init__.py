"""What is computed before it is asked for: beginnings that most prompts have, and what the next turn of a session
begins with. It guesses and asks; when something is computed, the engine says."""
