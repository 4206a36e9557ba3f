"""`segment`: the generated function that walks a list of kernels, one foreign call for all of them.

    walk(context)      one thread: call every step; more: enter torch's OpenMP pool once
    share(context)     on each thread of the pool: run its part of a step, wait for the others, go on

A step is (entry, arguments). The context is `CONTEXT`: 64-bit slots. The pool's C entries come in as
addresses, so the object has no undefined symbol and can be cached.
"""

from __future__ import annotations

from llvmlite import ir

from aerogel.codegen.cpu.emit import I32, I64, PTR, VOID, Emit, Value

CONTEXT = ("steps", "count", "threads", "parallel", "barrier", "thread_num", "num_threads")
ENTRY = "walk"


def emit() -> str:
    """LLVM IR of `void walk(int64 *context)`."""
    module = ir.Module(name="segment")
    share = _share(module)
    e = Emit.start(module, ENTRY, [PTR])
    (context,) = e.function.args
    threads = _slot(e, context, "threads", I64)

    def alone() -> list[Value]:
        _steps(e, context, I64(0), I64(1), lambda: None)
        return []

    def together() -> list[Value]:
        signature = ir.FunctionType(VOID, [PTR, PTR, I32, I32])
        parallel = _function(e, context, "parallel", signature)
        e.b.call(parallel, [share, context, e.b.trunc(threads, I32), I32(0)])
        return []

    e.choose(e.b.icmp_signed("<=", threads, I64(1)), alone, together)
    e.b.ret_void()
    return str(module)


def _share(module: Value) -> Value:
    e = Emit.start(module, "share", [PTR])
    e.function.linkage = "internal"
    (context,) = e.function.args
    number = ir.FunctionType(I32, [])
    thread = e.b.sext(e.b.call(_function(e, context, "thread_num", number), []), I64)
    threads = e.b.sext(e.b.call(_function(e, context, "num_threads", number), []), I64)
    barrier = _function(e, context, "barrier", ir.FunctionType(VOID, []))
    _steps(e, context, thread, threads, lambda: e.b.call(barrier, []))
    e.b.ret_void()
    return e.function


def _steps(e: Emit, context: Value, thread: Value, threads: Value, after: object) -> None:
    steps, count = _slot(e, context, "steps", PTR), _slot(e, context, "count", I64)
    signature = ir.FunctionType(VOID, [PTR, I64, I64])

    def step(i: Value, _: list[Value]) -> None:
        pair = e.at(steps, e.b.mul(i, I64(16)))
        entry = e.load(pair, signature.as_pointer(), 8)
        e.b.call(entry, [e.load(e.at(pair, I64(8)), PTR, 8), thread, threads])
        assert callable(after)
        after()

    e.loop(I64(0), count, step)


def _slot(e: Emit, context: Value, name: str, typ: Value) -> Value:
    return e.load(e.at(context, I64(8 * CONTEXT.index(name))), typ, 8)


def _function(e: Emit, context: Value, name: str, typ: Value) -> Value:
    return _slot(e, context, name, typ.as_pointer())
