"""Tests of mxquant.formats, and `reference`: an independent model of the formats that other tests use too."""
