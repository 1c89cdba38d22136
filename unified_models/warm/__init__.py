"""DeepGEMM's kernels, compiled before they are needed: `products` says which, `compiling` compiles them."""
