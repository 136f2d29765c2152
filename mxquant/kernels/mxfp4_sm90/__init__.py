"""Matmuls with MXFP4 weights on Hopper (compute capability 9.0): decoded in registers, multiplied by wgmma.

Sizes: M input rows, N weight rows, K columns.
"""
