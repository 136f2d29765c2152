"""What `gpu_linear.py` is wanted to reach, and whether its results do. Not a benchmark itself."""

from dataclasses import dataclass

from record import Record


@dataclass(frozen=True)
class Goal:
    """`version` is to be `at_least` so many times as fast as `baseline`, wherever both were measured."""

    version: str
    baseline: str
    rows: range
    at_least: float


DECODE, FEW, SOME, MANY = range(1, 17), range(32, 65), range(128, 513), range(1024, 1 << 20)
GOALS = (
    Goal("W4A16", "bf16", DECODE, 2.6),
    Goal("W4A16", "Humming W4A16", DECODE, 1.15),
    Goal("W4A16", "triton_kernels W4A16", DECODE, 1.2),
    Goal("W4A16", "bf16", FEW, 1.8),
    Goal("W4A16", "Humming W4A16", FEW, 1.1),
    Goal("W4A16", "triton_kernels W4A16", FEW, 1.1),
    Goal("W4A16", "bf16", SOME, 1.1),
    Goal("W4A16", "bf16", MANY, 0.95),
    Goal("W4A16", "triton_kernels W4A16", MANY, 1.15),
    Goal("W4A4", "bf16", DECODE, 3.1),
    Goal("W4A4", "Humming W4A8", DECODE, 1.1),
    Goal("W4A4", "bf16", range(64, 65), 2.5),
    Goal("W4A4", "Humming W4A8", range(64, 65), 1.05),
    Goal("W4A4", "bf16", range(128, 129), 1.9),
    Goal("W4A4", "bf16", range(512, 513), 1.45),
    Goal("W4A4", "bf16", range(2048, 2049), 1.65),
    Goal("W4A4", "Humming W4A8", range(2048, 2049), 1.15),
    Goal("W4A4", "torchao W4A4", range(2048, 2049), 10),
    Goal("W4A4", "bf16", range(8192, 8193), 1.85),
)
SHAPE = "28672x8192"
ELSEWHERE = 0.85
"""How much of a goal is wanted at the other shapes."""


def check_goals(record: Record) -> None:
    """Add to the record each goal that its results tell about."""
    check_linears(record)
    check_quantizer(record)


def check_linears(record: Record) -> None:
    measured = [row for row in record.results if "version" in row and "us" in row]
    times = {(row["shape"], row["rows"], row["version"]): row["us"] for row in measured}
    for goal in GOALS:
        for (shape, rows, version), taken in times.items():
            baseline = times.get((shape, rows, goal.baseline))
            if version == goal.version and rows in goal.rows and baseline is not None:
                at_least = goal.at_least if shape == SHAPE else round(goal.at_least * ELSEWHERE, 3)
                record.goal(f"{version} times {goal.baseline}, {shape}, M={rows}", baseline / taken, at_least=at_least)


def check_quantizer(record: Record) -> None:
    for row in (row for row in record.results if "quantize" in row):
        what = f"quantize to {row['quantize']}, {row['rows']}x{row['columns']}"
        if row["rows"] <= 16:
            record.goal(f"{what}, us", row["us"], at_most=4)
        if row["rows"] * row["columns"] >= 16_000_000:
            record.goal(f"{what}, of a copy's rate", row["of_copy"], at_least=0.85)
            if "rotated_us" in row:
                record.goal(f"{what}, rotated, times as long", row["rotated_us"] / row["us"], at_most=1.15)
        if "torchao_us" in row:
            record.goal(f"{what}, times torchao compiled", row["torchao_us"] / row["us"], at_least=1.0)
