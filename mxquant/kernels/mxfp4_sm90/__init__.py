"""Matmuls with MXFP4 weights on Hopper (compute capability 9.0): decoded in registers, multiplied by wgmma."""
