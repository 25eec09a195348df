"""What a start reads and checks before anything slow begins: flags, values, `.env`, and what they may name. Standard
library only, and every line runs under Python 3.9: `install_and_run.py` imports it before anything is installed."""
