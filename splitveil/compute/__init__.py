"""How work is started on a CPU or GPU: which one, CUDA graphs, a second stream, compiled kernels, process groups."""
