"""Where bits lie in the tensors that kernels read. torch only, no Triton."""
