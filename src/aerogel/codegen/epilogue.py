"""What is applied to a finished sum before it is stored: bias, residual add, activation. All in f32, in vectors.

NaN goes through every one of them, as it does in torch. SiLU uses an exponential of ours (a polynomial): LLVM's would be a
call into libm on most ISAs, and its bits would differ between machines.
"""

from __future__ import annotations

from llvmlite import ir

from aerogel.codegen.emit import F32, I32, Emit, Value, constant

_LOG2E = 1.4426950408889634
_LN2_HIGH = 0.693145751953125  # ln 2 in two pieces: n * high is exact for |n| < 2^10
_LN2_LOW = 1.42860682030941723e-6
_EXP = (1.0, 1.0, 0.5, 1 / 6, 1 / 24, 1 / 120, 1 / 720, 1 / 5040)
_VANISHES = -110.0  # under this, x * sigmoid(x) is less than half the smallest float


def activation(e: Emit, name: str, v: Value, lanes: int, slope: Value) -> Value:
    """Apply the activation `name`; `slope` is a vector, used by leaky alone."""
    b, zero = e.b, constant(lanes, 0.0)
    if name == "relu":
        return _at_least(e, v, zero)
    if name == "relu6":
        return _at_most(e, _at_least(e, v, zero), constant(lanes, 6.0))
    if name == "leaky":
        return b.select(b.fcmp_ordered(">", v, zero), v, b.fmul(v, slope))
    if name == "hardswish":
        gate = _at_most(e, _at_least(e, b.fadd(v, constant(lanes, 3.0)), zero), constant(lanes, 6.0))
        return b.fmul(v, b.fdiv(gate, constant(lanes, 6.0)))  # v * gate first would overflow near the largest floats
    if name == "silu":
        return _silu(e, v, lanes)
    raise ValueError(f"no emitter for activation '{name}'")


def _at_least(e: Emit, v: Value, low: Value) -> Value:
    return e.b.select(e.b.fcmp_ordered("<", v, low), low, v)  # NaN compares false and stays


def _at_most(e: Emit, v: Value, high: Value) -> Value:
    return e.b.select(e.b.fcmp_ordered(">", v, high), high, v)


def _silu(e: Emit, x: Value, lanes: int) -> Value:
    """x * sigmoid(x) with t = exp(-|x|): x / (1 + t) for x >= 0, x * t / (1 + t) below.

    t = p * 2^n. Below zero the power of two is applied last and in two halves, so that results among the subnormals are
    rounded once.
    """
    b = e.b
    kind, ints = ir.VectorType(F32, lanes), ir.VectorType(I32, lanes)
    negative = b.fcmp_ordered("<", x, constant(lanes, 0.0))
    minus = b.select(negative, x, b.fneg(x))
    clamped = _at_least(e, minus, constant(lanes, _VANISHES))
    scaled = b.fmul(clamped, constant(lanes, _LOG2E))
    n = b.fptosi(b.fsub(scaled, constant(lanes, 0.5)), ints)  # clamped <= 0, so truncation rounds to nearest
    n = b.select(b.fcmp_unordered("uno", x, x), ir.Constant(ints, [0] * lanes), n)
    turns = b.sitofp(n, kind)
    r = b.fsub(clamped, b.fmul(turns, constant(lanes, _LN2_HIGH)))
    r = b.fsub(r, b.fmul(turns, constant(lanes, _LN2_LOW)))
    p = constant(lanes, _EXP[-1])
    for coefficient in reversed(_EXP[:-1]):
        p = b.fadd(b.fmul(p, r), constant(lanes, coefficient))
    half = b.ashr(n, ir.Constant(ints, [1] * lanes))
    low, high = _power(e, half, lanes), _power(e, b.sub(n, half), lanes)
    one_plus = b.fadd(constant(lanes, 1.0), b.fmul(b.fmul(p, low), high))
    below = b.fmul(b.fmul(b.fdiv(b.fmul(x, p), one_plus), low), high)
    below = b.select(b.fcmp_ordered("<", x, constant(lanes, _VANISHES)), b.fmul(x, constant(lanes, 0.0)), below)
    return b.select(negative, below, b.fdiv(x, one_plus))


def _power(e: Emit, n: Value, lanes: int) -> Value:
    """2^n for -126 <= n <= 127, by writing the exponent."""
    ints = ir.VectorType(I32, lanes)
    bits = e.b.shl(e.b.add(n, ir.Constant(ints, [127] * lanes)), ir.Constant(ints, [23] * lanes))
    return e.b.bitcast(bits, ir.VectorType(F32, lanes))
