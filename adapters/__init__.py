"""Thin adapters to engines and trainers. On disk in adapters/, in Python `unified_models.adapters`."""

if __name__ != "unified_models.adapters":
    raise ImportError(
        f"adapters/ of unified_models was imported as {__name__!r}: write `import unified_models.adapters`. "
        "If you meant another package called adapters, the current folder hides it: "
        "run `python -P`, or leave the root of this repository"
    )
