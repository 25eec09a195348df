"""One model over several ranks: what is decided once and told to all. Decision 0095 has the reasons."""
