"""`start_llm.py` for a tiny model that reads a prompt slowly: another request comes before it is through."""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    ROOT = Path(__file__).resolve().parents[2]
    sys.path.insert(0, str(ROOT))

    from tests.serving import slow_prefill

    with slow_prefill():
        runpy.run_path(str(ROOT / "start_llm.py"), run_name="__main__")
