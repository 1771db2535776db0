"""How work is started on a device: which one, captured CUDA graphs, a second stream, process groups."""
