"""Loops in emitted code."""

from collections.abc import Iterator
from contextlib import contextmanager

from llvmlite import ir

from kvwatch_kernels.cpu.vectors import I64


@contextmanager
def rolled_range(builder: ir.IRBuilder, count: ir.Value) -> Iterator[ir.Value]:
    """Emit a loop over i64 0 to `count - 1`, at least once, which the compiler leaves as it is.

    It would unroll a body of middling size twice and mix the halves. Where the body's sums fill most registers, they
    then do not fit, and are spilled in every round.

    Yields:
        The index.
    """
    before, body, after = builder.block, builder.append_basic_block("rolled"), builder.append_basic_block("rolled.end")
    builder.branch(body)
    builder.position_at_end(body)
    index = builder.phi(I64, name="index")
    index.add_incoming(ir.Constant(I64, 0), before)
    yield index
    following = builder.add(index, ir.Constant(I64, 1))
    index.add_incoming(following, builder.block)
    latch = builder.cbranch(builder.icmp_unsigned("<", following, count), body, after)
    latch.set_metadata("llvm.loop", _never_unrolled(builder.module))
    builder.position_at_end(after)


def _never_unrolled(module: ir.Module) -> ir.MDValue:
    """A loop's metadata: itself, which makes it this loop's own, and the wish."""
    wish = module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")])
    loop = ir.MDValue(module, (wish,), name=str(len(module.metadata)))
    loop.operands = (loop, wish)
    return loop
