"""`python -m kvserve.cli`: the command where it is not on the PATH, as in a checkout."""

from kvserve.cli.commands import kvserve

if __name__ == "__main__":
    kvserve(prog_name="kvserve")
