"""`python -m benchmarks`: measure on this machine, as ratios to plain torch."""

from benchmarks.command import commands

if __name__ == "__main__":
    commands(prog_name="python -m benchmarks")
