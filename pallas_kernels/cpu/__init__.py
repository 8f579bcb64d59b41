"""Kernels for x86 CPUs: XLA custom calls, compiled by LLVM for this machine."""
