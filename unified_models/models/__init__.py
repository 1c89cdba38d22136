"""One file is one architecture: Config, Model, its parts in the order a token meets them, NAMES."""
