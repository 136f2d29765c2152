"""Tests of mxquant.algorithms."""
