"""Runs the CUDA sources on the CPU, under the address and undefined sanitizers."""
