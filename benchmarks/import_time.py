"""How much longer does `import mxquant` take than the imports of torch and torchao, which it needs anyway?

Each run is a fresh interpreter that imports torch and torchao, then mxquant, and tells how long each took. The
first run warms the file cache and is not counted.

    python benchmarks/import_time.py
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence

from record import Record

PROGRAM = """
import json, time
start = time.perf_counter()
import torch, torchao
between = time.perf_counter()
import mxquant
print(json.dumps([between - start, time.perf_counter() - between]))
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    arguments = parser.parse_args(argv)

    record = Record(
        "import_time",
        "seconds that `import mxquant` takes after `import torch, torchao`",
        f"median of {arguments.runs} fresh interpreters, after one that warms the file cache",
    )
    timings = []
    for _ in range(1 + arguments.runs):
        run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
        timings.append(json.loads(run.stdout.splitlines()[-1]))
    needed, own = (list(column) for column in zip(*timings[1:], strict=True))
    for what, seconds in (("import torch, torchao", needed), ("import mxquant, after them", own)):
        row = {"what": what, "median_s": statistics.median(seconds), "min_s": min(seconds), "max_s": max(seconds)}
        record.results.append(
            {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
        )
        print(f"{what}: median {row['median_s']:.3f} s ({min(seconds):.3f} to {max(seconds):.3f})")
    record.goal("import mxquant, seconds over torch and torchao", statistics.median(own), at_most=1.0)
    record.save()


if __name__ == "__main__":
    main()
