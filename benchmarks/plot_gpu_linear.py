"""Draw docs/gpu_linear.svg, speed relative to bf16 by rows of the input, from results/gpu_linear.json.

    python benchmarks/plot_gpu_linear.py

The same results give the same file; their SHA-256 stands in it, by which an old plot is noticed.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "gpu_linear.json"
PLOT = ROOT / "docs" / "gpu_linear.svg"
ROWS = (1, 4, 16, 64, 256, 1024, 8192)
SPEEDS = (0.05, 0.1, 0.2, 0.5, 1, 2, 3)
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "gpu_linear", "font.size": 8, "axes.grid": True, "grid.alpha": 0.3}


def curves(results: list[dict[str, Any]]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """By shape and version, what was measured: rows and the speed relative to bf16."""
    found: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for row in results:
        if "version" in row and "us" in row:
            points = found.setdefault(row["shape"], {}).setdefault(row["version"], [])
            points.append((row["rows"], row["times_bf16"]))
    return found


def draw(record: dict[str, Any]) -> Figure:
    """A panel for each shape, and a legend in the last place."""
    by_shape = curves(record["results"])
    versions = list(dict.fromkeys(version for shape in by_shape.values() for version in shape))
    columns = 3
    lines = math.ceil((len(by_shape) + 1) / columns)
    figure, grid = plt.subplots(lines, columns, figsize=(9, 2.9 * lines), sharex=True, sharey=True, squeeze=False)
    for (shape, points_of), axis in zip(by_shape.items(), grid.flat, strict=False):
        for version, points in points_of.items():
            rows, speed = zip(*sorted(points), strict=True)
            peer = " " in version  # a peer carries its project's name
            style = {"linewidth": 1, "linestyle": "--"} if peer else {"linewidth": 1.8, "marker": "."}
            axis.plot(rows, speed, color=f"C{versions.index(version)}", label=version, **style)
        axis.set(xscale="log", yscale="log", title=shape.replace("x", " x "), ylabel="times as fast as bf16")
        axis.set(xlabel="rows of the input", xticks=ROWS, xticklabels=map(str, ROWS))
        axis.set(yticks=SPEEDS, yticklabels=[f"{speed:g}" for speed in SPEEDS])
        axis.minorticks_off()
        axis.tick_params(labelbottom=True)
    for axis in grid.flat[len(by_shape) :]:
        axis.set_axis_off()
    handles = {line.get_label(): line for axis in grid.flat for line in axis.get_lines()}
    grid.flat[-1].legend(handles.values(), handles.keys(), loc="center", frameon=False)
    figure.suptitle(f"MXFP4 linears on {record['machine']['gpu']}, commit {record['commit']}")
    figure.tight_layout()
    return figure


def main() -> None:
    content = RESULTS.read_bytes()
    with plt.rc_context(STYLE):
        figure = draw(json.loads(content))
        digest = hashlib.sha256(content).hexdigest()
        metadata = {"Date": None, "Creator": None, "Description": f"sha256 of the results: {digest}"}
        figure.savefig(PLOT, metadata=metadata)
    plt.close(figure)
    print(f"written: docs/{PLOT.name}")


if __name__ == "__main__":
    main()
