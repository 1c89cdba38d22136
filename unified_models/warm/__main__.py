"""`python -m unified_models.warm` is `unified-models warm`, for an environment without the script."""

import sys

from unified_models.cli import app

if __name__ == "__main__":  # processes that compile import this file, too
    app(["warm", *sys.argv[1:]], prog_name="unified-models")
