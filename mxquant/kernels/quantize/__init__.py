"""Quantizing, dequantizing and rotating, for every format."""
