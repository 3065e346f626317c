"""One call of compiled code: what runs, on which arguments, and for how many threads there is work."""

from array import array
from typing import NamedTuple

from kvwatch_kernels.cpu.threads import call_on_threads


class KernelCall(NamedTuple):
    """A call that is laid out and not made yet. What its arguments point to must live until it is."""

    function: int
    """Address of `void function(int64_t)`; the threads that call it share its work items out among themselves."""
    params: "array[int]"
    """What it is given the address of. The counters of the work items in it begin at zero, so it serves once."""
    num_items: int
    """Number of work items: more threads would find nothing to do."""

    def run(self) -> None:
        """Make the call, on as many threads as torch uses at most."""
        call_on_threads(self.function, self.params, self.num_items)
