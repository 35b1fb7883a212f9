"""Numbers only: fast solvers that know nothing of regularisers."""
