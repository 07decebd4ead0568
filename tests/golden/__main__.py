"""Write the golden runs anew: `python -m tests.golden [NAME ...]`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from golden_runs import RUNS, write

for name in sys.argv[1:] or RUNS:
    write(name)
    print(f"tests/golden/{name}.json")
