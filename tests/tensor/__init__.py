"""Tests of mxquant.tensor: what a quantized tensor computes, survives and refuses."""
