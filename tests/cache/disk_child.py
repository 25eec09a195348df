"""A disk tier in a process of its own, without a model: it says prompts of a few words, and tells what is written.

    python -m tests.cache.disk_child FOLDER SEED

Each line on its output is a prompt, as a list of tokens, of which the tier says that all of it is on disk, with a state
at its end. It is killed some time.
"""

import json
import random
import sys
from pathlib import Path

from tests.cache.disks import WAIT_SECONDS, Disk

WORDS = [[place * 100 + number for number in range(size)] for place, size in enumerate((7, 3, 12, 5))]
MAX_WORDS = 8


def main(folder: str, seed: int) -> None:
    """Until somebody ends it."""
    chance = random.Random(seed)
    with Disk(Path(folder)) as disk:
        while True:
            ids = [token for word in chance.choices(WORDS, k=chance.randint(1, MAX_WORDS)) for token in word]
            told = [ids[: chance.randint(1, len(ids))] for _ in range(chance.randint(0, 2))]
            for prompt in (*told, ids):  # the same beginning in one piece, or in several
                is_based = chance.random() < 0.5
                disk.say(prompt, states=(len(prompt),), flush=chance.random() < 0.5, is_based=is_based)
            if chance.random() < 0.2:
                disk.tier._order(disk.tier.worker.account.reconcile, WAIT_SECONDS)
            found = disk.found(ids).written()
            if found.depth == len(ids) and found.steps[-1].checkpoint is not None:
                print(json.dumps(ids), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
