"""mxquant's bytes against those that other implementations wrote: see data/PROVENANCE.md."""
