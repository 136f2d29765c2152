"""Ways into other libraries. The package imports none of them, but that `mxquant` registers torchao's handlers."""
