"""What comes in: conversion to fp32, and how much of it is worked on at a time."""

from __future__ import annotations

import torch
from torch import Tensor

_CPU_CHUNK = 1 << 16
_DEVICE_CHUNKS = 16


def chunk_elements(x: Tensor) -> int:
    """Elements to work on at a time, so that temporaries stay small beside `x` and, on a CPU, in the cache."""
    return _CPU_CHUNK if x.device.type == "cpu" else max(_CPU_CHUNK, x.numel() // _DEVICE_CHUNKS)


def to_fp32(x: Tensor) -> Tensor:
    """`x` in fp32; exact for bf16 and fp16. fp64 is rounded to odd, so that rounding to a code later rounds only once.

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
