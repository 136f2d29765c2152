"""A backend with several kernels that runs anywhere."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from mxquant.backends import KernelChoice, Operand, Problem, TunableBackend
from mxquant.scheme import Scheme


def _answering(name: str, value: int) -> KernelChoice:
    def multiply(x: Tensor, weight: Operand, bias: Tensor | None, problem: Problem) -> Tensor:
        return x.new_full((x.shape[0], problem.out_features), value)

    return KernelChoice(name, multiply)


ONE, TWO, THREE = _answering("one", 1), _answering("two", 2), _answering("three", 3)


class Forked(TunableBackend):
    """Takes weight-only MXFP4. Its kernels answer 1, 2 and 3, by which each is recognized; 3 takes up to 64 rows."""

    name = "forked"

    def reject(self, problem: Problem) -> str | None:
        return None if (problem.weight, problem.activation) == ("mxfp4", None) else "weight-only mxfp4"

    def kernel_choices(self, problem: Problem, rows: int) -> tuple[KernelChoice, ...]:
        return (THREE, ONE, TWO) if rows <= 64 else (ONE, TWO)


def dense_problem(**changes: Any) -> Problem:
    fields: dict[str, Any] = {
        "weight": "mxfp4", "out_features": 64, "in_features": 256, "block_offset": 0, "dtype": torch.bfloat16,
        "device": torch.device("cpu"), "capability": None,
    }  # fmt: skip
    fields |= changes
    of_scheme = {field.name: fields.pop(field.name) for field in dataclasses.fields(Scheme) if field.name in fields}
    return Problem(Scheme(**of_scheme), **fields)
