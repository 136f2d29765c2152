"""Arithmetic that gives the same bits on every device: conversion to fp32, IEEE division; and the size of chunks."""

from __future__ import annotations

import torch
from torch import Tensor

_CACHED = 1 << 16
_CHUNKS = 16


def chunk_elements(x: Tensor) -> int:
    """Elements to work on at a time, a small share of `x`.

    On a CPU a chunk and its temporaries fit each thread's cache. On a GPU chunks are large, for few launches.
    """
    share = x.numel() // _CHUNKS
    if x.device.type == "cpu":
        # NOTE: a graph must not depend on the number of threads when it was traced.
        share = 0 if torch.compiler.is_compiling() else min(share, _CACHED * torch.get_num_threads())
    return max(_CACHED, share)


def to_fp32(x: Tensor) -> Tensor:
    """`x` in fp32; exact for bf16 and fp16. fp64 is rounded to odd, which a later rounding to a code does not show.

    Raises:
        ValueError: an fp64 tensor holds a finite value beyond fp32's range.
    """
    if x.dtype != torch.float64:
        return x.to(torch.float32)
    rounded = x.to(torch.float32)
    if (rounded.isinf() & x.isfinite()).any():
        largest = x[x.isfinite()].abs().max().item()
        raise ValueError(f"fp64 input holds {largest:g}, beyond fp32's range (3.4e38); scale it down before quantizing")
    bits = rounded.view(torch.int32)
    # Round to odd: truncate towards zero, then set the last bit where anything was lost.
    away = rounded.to(torch.float64).abs() > x.abs()
    inexact = (rounded.to(torch.float64) != x) & x.isfinite()
    return ((bits - away.to(torch.int32)) | inexact.to(torch.int32)).view(torch.float32)


def divide(x: Tensor, divisor: float) -> Tensor:
    """The IEEE quotient. On CUDA, torch makes `x / number` a product with the reciprocal, which can be one ulp off."""
    return x / x.new_full((), divisor)
