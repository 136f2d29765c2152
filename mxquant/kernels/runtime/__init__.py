"""How kernels are launched: each launch cached, a sequence of them planned once."""
