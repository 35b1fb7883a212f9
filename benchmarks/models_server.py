"""What every process of the sweep over models has in common, loaded once: they are forked from it.

`import benchmarks.models_server` is all there is to do.
"""

import os
from pathlib import Path

import transformers

from benchmarks import models_checks, models_testers
from benchmarks.models import CHECKOUT

__all__ = ["models_checks"]

transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
models_testers.share(Path(os.environ[CHECKOUT]))
