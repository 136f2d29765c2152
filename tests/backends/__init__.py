"""Tests of mxquant.backends: selection, registration and layouts."""
