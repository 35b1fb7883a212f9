"""A change of a cache, interrupted at any instruction."""

import sys

from fenchel._attention import cache, page_table
from fenchel._kernels import pages
from tests import needs

FILES = {module.__file__ for module in (cache, page_table, pages)}
traces = needs.unless(sys.gettrace() is None, "something else traces", "changes interrupted")


def is_ending(frame):
    """Part of `__del__`, in which Python drops what is raised."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def interrupted(step, change):
    """Whether a change came to its end before so many instructions of the cache."""
    left = [step]

    def trace(frame, event, _):
        if frame.f_code.co_filename not in FILES or is_ending(frame):
            return None
        frame.f_trace_opcodes = True
        left[0] -= event == "opcode"
        if left[0] == 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        change()
    except KeyboardInterrupt:
        return False
    finally:
        sys.settrace(None)
    return True
