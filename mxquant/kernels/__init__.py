"""The kernels alone, one family a file: plain tensors in, plain tensors out, each compared with its twin in
`mxquant.formats`.
"""
