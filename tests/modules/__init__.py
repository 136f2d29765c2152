"""Tests of mxquant.modules: quantized weights inside of modules."""
