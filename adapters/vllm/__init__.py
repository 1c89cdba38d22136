"""vLLM: our definitions as vLLM models. See plugin.py for how it finds us."""
