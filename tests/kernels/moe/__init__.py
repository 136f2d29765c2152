"""Tests of mxquant.kernels: each kernel against its twin in mxquant.formats."""
