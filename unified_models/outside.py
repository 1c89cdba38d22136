"""Commands of adapters, each in a process of its own: an engine sets up the process that imports it."""

import subprocess
import sys


def run_adapter(module: str, *arguments: object) -> int:
    """Run `unified_models.adapters.<module>` as a program; its exit status."""
    name = f"unified_models.adapters.{module}"
    return subprocess.run([sys.executable, "-m", name, *map(str, arguments)]).returncode
